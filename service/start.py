"""The console script.  Ctrl-C ends it at once, without a traceback, while it still imports modules."""

import signal
import sys


def main() -> int:
    """Import the command, which takes most of a second, and run it.  Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from quire.service import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
