"""The load harness: `python -m loadtest replay` asks and measures, `python -m loadtest report` shows and compares."""

from __future__ import annotations

import argparse
import shlex
import sys

from loadtest import replay, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    raw = argparse.RawDescriptionHelpFormatter
    replay.add_arguments(commands.add_parser("replay", description=replay.__doc__, formatter_class=raw))
    report.add_arguments(commands.add_parser("report", description=report.__doc__, formatter_class=raw))
    args = parser.parse_args()
    if args.command == "report":
        return report.main(args)
    return replay.main(args, f"python -m loadtest {shlex.join(sys.argv[1:])}")


if __name__ == "__main__":
    sys.exit(main())
