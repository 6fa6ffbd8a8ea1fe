"""The program `loadgen`, also `python -m loadgen`; Ctrl-C ends it without a traceback, even during imports."""

import signal
import sys


def main() -> int:
    try:
        from loadgen.cli import main as command  # takes half a second, during which Ctrl-C may come

        code = command()
    except KeyboardInterrupt:
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the output is complete; a late Ctrl-C must not change the exit code
    return code


if __name__ == "__main__":
    sys.exit(main())
