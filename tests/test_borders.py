"""Import rules (MAY_SEE, a table of folders), walked with ast.  No folder is an exception to its own rule."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TOPS = ("service", "engine", "loadtest")  # folders that are imported as quire.NAME
# folder -> our folders that it may import.  A folder is a dotted prefix below `quire`; its longest match counts.
# Of the service a folder sees itself and the folders above it in this table, no others.
SERVICE = {
    "service.config": {"engine.wire"},
    "service.common": {"engine.common", "engine.wire"},
    "service.chat_templates": {"engine.common"},
    "service.output": {"engine.wire"},
    "service.grammar": {"engine.common"},
    "service.api": {"engine.adapters", "engine.common", "engine.wire"},
    "service.api.openai_responses": set[str](),
    "service.api.anthropic": set[str](),
    "service.delivery": {"engine.adapters", "engine.wire"},
    "service.text": {"engine.common", "engine.tokenizers", "engine.wire"},
    "service.http": {"engine.common", "engine.wire"},
    "service.app": {"engine.common", "engine.wire"},
}
# Modules of the load test itself, without its studies.
LOADTEST = {f"loadtest.{path.stem}" for path in (ROOT / "loadtest").glob("*.py")} | {
    "loadtest.kernels",
    "loadtest.pages",
}
MAY_SEE: dict[str, set[str]] = {
    **{room: {*list(SERVICE)[: at + 1], *engine} for at, (room, engine) in enumerate(SERVICE.items())},
    # The command line checks the options of every program it starts, before it starts any.
    "service.supervisor": {"service.common", "engine.common"},
    "service.cli": {
        *SERVICE,
        "service.supervisor",
        "service.terminal.options",
        "engine.common",
        "engine.wire",
        "engine.config",
    },
    "service.start": {"service.cli"},
    # Clients for a terminal.  They know the names of the gateway's metrics; bench is made of the load test's parts.
    "service.terminal": {"service.terminal", "service.common.metrics", "engine.common", "loadtest"},
    "service": set(),
    "engine.common": {"engine.common", "engine.wire.messages"},
    # The tokenizer of a checkpoint, which gateways, engines and the offline API must read alike.
    "engine.tokenizers": {"engine.tokenizers", "engine.common.errors"},
    # Files and names of LoRA adapters, which gateways, engines and the offline API must read alike.
    "engine.adapters": {"engine.adapters", "engine.common.child_python", "engine.common.errors"},
    "engine.wire": {"engine.common", "engine.wire"},
    "engine.config": set(),
    "engine.core": {"engine.core", "engine.wire.messages"},
    "engine.executor": {
        "engine.executor",
        "engine.adapters",
        "engine.common.child_python",
        "engine.common.deadline",
        "engine.common.errors",
        "engine.common.fair_list",
        "engine.common.host_resources",
        "engine.config",
        "engine.core.plan",
        "engine.tokenizers.ends",
        "engine.wire.messages",
    },
    "engine": {"engine"},  # loop, __main__, offline: the folders that combine the others
    "grafana": {"grafana"},  # it knows metrics by name; that they exist is checked below
    # A client: it knows our programs and their output, nothing inside.
    "loadtest": LOADTEST,
    "loadtest.pages": {"loadtest.pages"},
    # Each made one table.  They measure the engine inside too, and nothing imports them.  One starts `quire serve` with
    # an engine that has more modes, one replays the gateway's admission.
    "loadtest.studies": {
        "loadtest",
        "engine",
        "service.cli",
        "service.common.refusal",
        "service.config",
        "service.delivery",
        "service.grammar",
    },
    # Times single operators, which no client can: it calls them through the wrappers that the engine itself uses.
    # The all-reduce needs the ranks.
    "loadtest.kernels": {"loadtest", "engine.executor.ops", "engine.executor.ranks.ranks"},
}
# folder -> heavy or impure packages that it must not import.
MAY_NOT_USE: dict[str, set[str]] = {
    "service": {"torch", "numpy"},
    "engine.common": {"torch", "transformers", "aiohttp", "numpy"},
    "engine.tokenizers": {"torch", "aiohttp", "numpy"},
    "engine.adapters": {"torch", "transformers", "aiohttp", "numpy"},
    "engine.wire": {"torch", "transformers", "aiohttp", "numpy"},
    "engine.core": {"torch", "transformers", "redis", "random", "logging", "time", "asyncio", "numpy"},
    "engine.loop": {"torch", "transformers"},
}


def room_of(module: str, rooms: dict[str, set[str]]) -> str | None:
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if (name := ".".join(parts[:n])) in rooms:
            return name
    return None


def modules() -> list[tuple[str, Path]]:
    found = []
    for top in (*TOPS, "grafana"):
        for path in sorted((ROOT / top).rglob("*.py")):
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append((dotted.removesuffix(".__init__"), path))
    return found


def imports(path: Path, module: str) -> set[str]:
    """Return what a file imports, lazily or not.  Names of ours are without `quire.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide borders"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("quire.") for name in names}


def test_quire_is_the_only_import_root_of_ours() -> None:
    """A package called `engine` or `service` may be anybody's, and a module imported under two names exists twice."""
    files = [path for room in (*TOPS, "tests", "grafana", "examples", ".ci") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 700
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in (*TOPS, "csrc"), f"{path}: import quire.{name}"


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_stay_inside_borders(module: str, path: Path) -> None:
    used = imports(path, module)
    room = room_of(module, MAY_SEE)
    assert room is not None
    for name in used:
        if name.split(".")[0] in (*TOPS, "tests") and name not in TOPS:
            inside = any(f"{name}.".startswith(f"{seen}.") or seen.startswith(f"{name}.") for seen in MAY_SEE[room])
            inside = inside and (room not in SERVICE or room_of(name, MAY_SEE) in {*MAY_SEE[room], "service", "engine"})
            assert inside, f"{module} ({room}) imports {name}; it may see {sorted(MAY_SEE[room])}"
    banned = room_of(module, MAY_NOT_USE)
    if banned:
        clash = {name.split(".")[0] for name in used} & MAY_NOT_USE[banned]
        assert not clash, f"{module} uses {sorted(clash)}, which {banned} must not"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Lazy imports and those for types count, because a module that moves needs them, too."""
    known = dict(modules())
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        names = imports(path, module) & known.keys()
        graph[module] = {name for name in names if name != module and known[name].name != "__init__.py"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_only_ops_names_torch_ops() -> None:
    for module, path in modules():
        if not f"{module}.".startswith("engine.executor.ops."):
            assert "torch.ops" not in path.read_text(encoding="utf-8"), f"{module}: call engine.executor.ops instead"


def test_every_metric_of_a_dashboard_exists() -> None:
    """Every metric is named in one of the two tables.  tests/grafana asks a real Prometheus for its values."""
    tables = [ROOT / "service" / "common" / "metrics.py", ROOT / "engine" / "observers" / "metrics.py"]
    known = {
        node.value
        for path in tables
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"quire_\w+", node.value)
    }
    known |= {name + end for name in known for end in ("_total", "_bucket", "_sum", "_count")}
    folder = ROOT / "grafana"
    for path in (folder / "alerts.yaml", folder / "README.md", *folder.glob("dashboards/*.json")):
        named = set(re.findall(r"\bquire_\w+", path.read_text(encoding="utf-8"))) - {"quire_engine_"}
        assert named, path
        assert named <= known, f"{path.name}: {sorted(named - known)}"


def test_every_metric_is_used() -> None:
    """By a dashboard, `quire top`, an alert, the load test or a test: one that nothing reads rots."""
    named: dict[str, str] = {}  # metric -> its constant in service/common/metrics.py; "": it has none
    for table in ("service/common/metrics.py", "engine/observers/metrics.py"):
        for node in ast.walk(ast.parse((ROOT / table).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(r"quire_\w+", str(node.value)):
                named.setdefault(str(node.value), "")
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                first, target = node.value.args[0], node.targets[0]
                if isinstance(first, ast.Constant) and isinstance(target, ast.Name):
                    named[str(first.value)] = target.id
    assert len(named) > 80
    read = [ROOT / "grafana" / "alerts.yaml", *(ROOT / "grafana").glob("dashboards/*.json")]
    read += [ROOT / "loadtest" / "scrape.py", *(ROOT / "tests").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in read)
    words = {re.sub(r"_(total|bucket|sum|count)$", "", word) for word in re.findall(r"\bquire_\w+", text)}
    words |= set(re.findall(r"\bquire_\w+", text))
    top = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "service" / "terminal").glob("*.py"))
    words |= {name for name, constant in named.items() if constant and re.search(rf"metrics\.{constant}\b", top)}
    assert {name for name in named if name.startswith("quire_")} - words == set()


def test_only_the_tables_name_metrics() -> None:
    for module, path in modules():
        if module.startswith(("service", "engine")) and module not in {
            "service.common.metrics",
            "engine.observers.metrics",
            "engine.observers.metrics_vllm",
        }:
            assert not re.search(r"\b(quire_[a-z]+_[a-z_]+|vllm:\w+)", path.read_text(encoding="utf-8")), module


@pytest.mark.parametrize(
    "module", ["quire.engine.wire.messages", "quire.engine.core.plan", "quire", "quire.service.app"]
)
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
