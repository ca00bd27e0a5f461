"""The load harness: `replay` asks and measures, `report` shows and compares; the others start servers too."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from types import FrameType

from loadtest import burst, capacity, fairness, replay, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {"replay": replay, "report": report, "burst": burst, "capacity": capacity, "fairness": fairness}
    for name, module in modules.items():
        raw = argparse.RawDescriptionHelpFormatter
        module.add_arguments(commands.add_parser(name, description=module.__doc__, formatter_class=raw))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    if args.command == "report":
        return report.main(args)
    command = f"python -m loadtest {shlex.join(sys.argv[1:])}"
    return int(modules[args.command].main(args, command))


def _leave(number: int, frame: FrameType | None) -> None:
    """The servers that a measurement has started must not outlive it."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
