"""`python -m grafana`: write dashboards/*.json from boards.py; with `--check`, only compare them."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana.boards import BOARDS
from grafana.render import render

FOLDER = Path(__file__).parent / "dashboards"


def main(check: bool) -> int:
    """Write or compare the dashboards.  Returns 0, or 1 if `check` finds a file that differs from boards.py."""
    wanted = {FOLDER / f"{board.uid}.json": render(board) for board in BOARDS}
    wrong = {path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text}
    stray = set(FOLDER.glob("*.json")) - wanted.keys()
    for path in sorted(wrong | stray):
        print(f"{path.name} {'differs from boards.py' if check else 'written' if path in wrong else 'removed'}")
        if check:
            continue
        if path in wrong:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return int(check and bool(wrong or stray))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
