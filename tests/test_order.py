"""The longest files start first (order.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import order

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_exists() -> None:
    assert [file for file in [*order.SECONDS, *order.SPLIT] if not (ROOT / file).is_file()] == []


def test_long_files_go_first_and_others_keep_their_order() -> None:
    names = ["tests/b.py::one", "tests/executor/test_fused.py::two", "tests/a.py::three", "tests/system/new.py::four"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    assert [item.nodeid for item in order.longest_first(items)] == [names[3], names[1], names[0], names[2]]


def test_a_unit_is_a_file_or_a_function_of_a_split_file() -> None:
    scheduler = order.LongestFirst.__new__(order.LongestFirst)
    assert scheduler._split_scope("tests/wire/test_bus.py::test_x[a-b]") == "tests/wire/test_bus.py"
    split = min(order.SPLIT)
    assert scheduler._split_scope(f"{split}::test_x[a::b-c]") == f"{split}::test_x"


def test_workers_begin_to_import_at_files_of_their_own() -> None:
    files = [Path(f"tests/test_{number}.py") for number in range(10)]
    orders = [order.in_turn(files, number, 3) for number in range(3)]
    assert [one[0] for one in orders] == [files[0], files[3], files[6]]
    assert all(sorted(one) == files for one in orders)
    assert order.in_turn(files, 3, 3) == files  # takes the place of one that has died
