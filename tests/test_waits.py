"""No test waits for a fixed time, and none sets a time-out of the product to fixed seconds: pace.py owns both."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WAITS = {  # functions whose `timeout`, or argument at this place, bounds a wait
    "ClientTimeout": 0,
    "communicate": 1,
    "create_connection": 1,
    "get_message": None,
    "join": 0,
    "run": None,
    "timeout": 0,
    "urlopen": None,
    "wait": 0,
    "wait_for": 1,
    "wait_procs": 1,
}
BOUNDS = {"timeout", "total", "sock_read", "sock_connect"}
PRODUCT = {  # timeouts of the product after which a test continues
    "body_timeout_s",
    "drain_s",
    "header_timeout_s",
    "keepalive_s",
    "lease_ms",
    "step_timeout_s",
    "takeover_wait_s",
}
ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
OPTION = re.compile(r"--((?:[a-z]+-)+m?s)[= ]([\d.]+)")
SHORT_S, LONG_S = 0.25, 60.0  # shorter waits are polls, or end at once; no pause of a machine is longer
VIRTUAL = {"service/http/test_state_feed.py"}  # its event loop's clock jumps from timer to timer
UNIT_TESTS = {"test_pace.py", "test_waits.py"}


def number(node: ast.AST) -> float | None:
    """The value of a literal, or of arithmetic with literals; None for all else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = number(node.left), number(node.right)
        return None if left is None or right is None else ARITHMETIC[type(node.op)](left, right)
    return None


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def product_time_out(name: str, value: float) -> bool:
    return name in PRODUCT and SHORT_S <= value / (1000 if name.endswith("_ms") else 1) < LONG_S


def waits(call: ast.Call) -> Iterator[ast.expr]:
    """The arguments of a call that bound a wait."""
    function = name_of(call.func)
    owner = ast.unparse(call.func).removesuffix(function)
    if function not in WAITS or "mark" in owner:  # verdicts.py scales the marker `timeout`
        return
    if (function == "join" and owner[:1] in "'\"") or (function == "wait_for" and "asyncio" not in owner):
        return  # text, or a helper that knows pace.py
    yield from (word.value for word in call.keywords if word.arg in BOUNDS)
    place = WAITS[function]
    if place is not None and len(call.args) > place:
        yield call.args[place]


def fixed_in_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    for bound in waits(call):
        value = number(bound)
        if (value is not None and value >= SHORT_S) or (isinstance(bound, ast.Name) and bound.id.isupper()):
            yield bound.lineno, ast.unparse(call)
    for word in call.keywords:
        if product_time_out(word.arg or "", number(word.value) or 0.0):
            yield call.lineno, f"{word.arg}={ast.unparse(word.value)}"
    if name_of(call.func) == "sleep" and call.args and SHORT_S <= (number(call.args[0]) or 0.0) < LONG_S:
        yield call.lineno, ast.unparse(call)


def fixed_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each fixed wait."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from fixed_in_call(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.Call):
            if name_of(node.left.func) in ("monotonic", "perf_counter") and (number(node.right) or 0.0) >= SHORT_S:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for option, value_ in OPTION.findall(node.value):
                if product_time_out(option.replace("-", "_"), float(value_)):
                    yield node.lineno, f"--{option}={value_}"


def test_every_wait_follows_the_machine() -> None:
    """Write patience(60) for a bound of a hang, paced(2) for a time-out of the product, until() for a poll."""
    files = [path for path in sorted(TESTS.rglob("*.py")) if path.name not in UNIT_TESTS]
    found = [
        f"{name}:{line}: {text}"
        for path in files
        if (name := path.relative_to(TESTS).as_posix()) not in VIRTUAL and not name.startswith("clients/")
        for line, text in fixed_in(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "fixed"),
    [
        ("process.wait(20)", True),
        ("process.wait(patience(20))", False),
        ("process.wait(timeout=2 * 30)", True),
        ("process.wait(LIMIT_S)", True),
        ("process.wait(seconds)", False),
        ("async with asyncio.timeout(5): pass", True),
        ("await asyncio.wait_for(ringing, 5)", True),
        ("subprocess.run(words, timeout=60)", True),
        ("end = time.monotonic() + 60", True),
        ("end = time.monotonic() + patience(60)", False),
        ("await asyncio.sleep(1.5)", True),
        ("await asyncio.sleep(0.02)", False),
        ("time.sleep(1000)", False),  # for ever
        ("engine(lease_ms=1000)", True),
        ("engine(lease_ms=paced_ms(1000))", False),
        ("engine(lease_ms=3_600_000)", False),
        ("start('--step-timeout-s=2')", True),
        ("start(f'--step-timeout-s={paced(2)}')", False),
        ("serve(header_timeout_s=0.4)", True),
        ("', '.join(words)", False),
        ("@pytest.mark.timeout(300)\ndef test(): pass", False),
    ],
)
def test_what_is_a_fixed_wait(code: str, fixed: bool) -> None:
    code = f"async def test():\n    {code}" if "await" in code or "async" in code else code
    assert bool(list(fixed_in(ast.parse(code)))) == fixed
