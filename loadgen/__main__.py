"""The program `loadgen`, also as `python -m loadgen`: Ctrl-C ends it without a traceback from its first import on."""

import signal
import sys


def main() -> int:
    try:
        from loadgen.cli import main as command  # half a second, in which Ctrl-C may come, too

        code = command()
    except KeyboardInterrupt:
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is told; a late Ctrl-C must not change the exit code
    return code


if __name__ == "__main__":
    sys.exit(main())
