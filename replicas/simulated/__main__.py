"""Entry point of `python -m replicas.simulated`; see `cli`."""

import sys

from .cli import main

sys.exit(main())
