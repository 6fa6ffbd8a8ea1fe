"""`python -m gateway` is `hitherto`."""

import sys

from gateway.cli import main

sys.exit(main())
