"""The entry point of `python -m gateway`, which is the same as the command `hitherto`."""

import sys

from gateway.cli import main

sys.exit(main())
