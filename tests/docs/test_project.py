"""The project's own files are true: packaging, changelog, hooks, the length check, the prose report."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("service", "engine", "csrc")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # NamedTuple and dataclasses look their module up
    spec.loader.exec_module(module)
    return module


METHODS, ATTRIBUTES = 25, 22  # at most per class: a class with more does several jobs
# Classes above a bound, with what they have.  The list may only shrink: take a job out into a class of its own.
LARGER = {
    "engine/bus_thread.py BusThread": (24, 27),
    "engine/observers/measurements.py Measurements": (8, 30),
    "service/http/meter.py Meter": (17, 27),
}


def size_of(cls: ast.ClassDef) -> tuple[int, int]:
    """Return how many methods and attributes of its objects a class defines."""
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    written = [node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute)]
    ours = {
        node.attr
        for node in written
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return len(methods), len(ours)


def test_the_size_of_a_class_counts_methods_and_what_they_assign() -> None:
    [cls] = ast.parse("class A:\n def a(self):\n  self.x, self.y = 1, 2\n async def b(self):\n  self.x += 1").body
    assert isinstance(cls, ast.ClassDef)
    assert size_of(cls) == (2, 2)


def test_a_class_has_one_job() -> None:
    """Methods and attributes of a class are bounded: those above the bounds did three to five jobs each."""
    larger = {}
    for top in ("service", "engine"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    name = f"{path.relative_to(ROOT)} {node.name}"
                    listed, found = LARGER.get(name, (0, 0)), size_of(node)
                    if found[0] > max(METHODS, listed[0]) or found[1] > max(ATTRIBUTES, listed[1]):
                        larger[name] = found
    assert larger == {}, f"(methods, attributes): at most {METHODS} and {ATTRIBUTES}; take a job out"


function_lines, prose = script("function_lines"), script("prose")


def test_every_package_data_pattern_has_files() -> None:
    for patterns in PROJECT["tool"]["setuptools"]["package-data"].values():
        for pattern in patterns:
            files = [path for package in PACKAGES for path in (ROOT / package).rglob(pattern)]
            assert files, f"no file of the packages is called {pattern}"


def test_the_wheel_holds_what_the_bench_command_imports() -> None:
    # In a process of its own: setuptools replaces distutils for good.
    code = "import sys; from setuptools import find_namespace_packages as find; print(*find('.', include=sys.argv[1:]))"
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    done = subprocess.run([sys.executable, "-c", code, *include], cwd=ROOT, capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert {"quire.service.terminal", "quire.engine", "quire.csrc.cuda", "quire.loadtest"} <= set(found)
    assert {name.split(".")[0] for name in found} == {"quire"}
    assert not [name for name in found if name.startswith("quire.loadtest.")]
    assert "rich" in " ".join(PROJECT["project"]["optional-dependencies"]["cli"])


def test_the_packages_say_that_they_are_typed() -> None:
    for package in ("service", "engine"):
        assert (ROOT / package / "py.typed").is_file()


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert headings[0][0] == "Unreleased"
    assert headings[1][0] == PROJECT["project"]["version"]
    assert headings[1][1], "the version has no date"
    sections = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_dockerfile_names_this_version() -> None:
    found = set(re.findall(r"quire-\w+:([\d.]+)", (ROOT / "Dockerfile").read_text(encoding="utf-8")))
    assert found == {PROJECT["project"]["version"]}


def test_hooks_and_ci_call_the_commands_of_the_repository() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [repo["repo"] for repo in hooks] == ["local"]
    for hook in hooks[0]["hooks"]:
        program, *words = hook["entry"].split()
        assert program in (".venv/bin/python", ".venv/bin/clang-format"), hook["id"]
        assert " ".join(words) in makefile or "pytest" in words, f"{hook['id']} is not a command of make lint"
        for word in words:
            assert "/" not in word or (ROOT / word).exists(), word
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert any(step.get("run") == ".ci/run" for step in workflow["jobs"]["test"]["steps"])
    for command in ("make lint", "make clients", "make test"):
        assert command in commands


def run_ci(
    folder: Path, words: list[str], status: dict[str, int]
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run .ci/run with a `make` that ends so, and everything installed.  Return what it did and what make was asked."""
    lines = "".join(f"{target}) exit {code};; " for target, code in status.items())
    asked = folder / "asked"
    asked.unlink(missing_ok=True)
    (folder / "make").write_text(f'#!/bin/sh\necho "$1" >> {asked}\ncase "$1" in {lines} esac\n')
    for name in ("make", "prometheus", "redis-server", "luacheck", "chromedriver"):
        (folder / name).touch()
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run", *words], env=environment, capture_output=True, text=True, check=False)
    return done, asked.read_text(encoding="utf-8").split()


@pytest.mark.parametrize(("fetched", "passed", "status"), [(0, 0, 0), (0, 1, 2), (1, 0, 0)])
def test_clients_are_left_out_only_where_their_packages_cannot_be_fetched(
    tmp_path: Path, fetched: int, passed: int, status: int
) -> None:
    for words, before, after in (["clients"], [], []), ([], ["lint"], ["test"]):
        done, asked = run_ci(tmp_path, words, {"fetch-clients": 2 * fetched, "clients": 2 * passed})
        assert done.returncode == status
        expected = ["fetch-clients", "clients"][: 2 - fetched]
        assert asked == before + expected + (after if not status else [])
        assert done.stderr.count("\n") == fetched
        assert ("cannot be fetched" in done.stderr) == bool(fetched)


def test_the_table_of_clients_has_the_versions_that_are_tested() -> None:
    """`make clients` installs what is pinned, in environments that may differ in the official client's version."""
    pins: dict[str, set[str]] = {}
    for file in (ROOT / ".ci" / "clients").glob("*.txt"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert not [line for line in lines if "==" not in line], f"{file.name} has packages without a version"
        for name, _, version in (line.partition("==") for line in lines):
            pins.setdefault(name, set()).add(version)
    assert not pins.keys() & {"torch", "transformers"}
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("\n## Clients\n")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d., ]+) \|", page, re.MULTILINE)
    assert len(rows) >= 7
    for name, versions in rows:
        assert set(versions.split(", ")) == pins[name], name


@pytest.fixture(scope="module")
def every_function() -> list[Any]:
    """Lines of each function of the repository, which take 3 s of CPU time to count."""
    found: list[Any] = function_lines.functions()
    return found


def test_functions_stay_short(
    every_function: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make lint` runs the file as a program."""
    monkeypatch.setattr(sys, "argv", ["function_lines.py"])
    for more, status in ([], 0), ([function_lines.Function("a.py", "long", 1, 61, 60)], 1):
        monkeypatch.setattr(function_lines, "functions", lambda more=more: every_function + more)
        assert function_lines.main() == status, capsys.readouterr().out


PYTHON = '''
class A:
    def short(self):
        return 1

    def long(self):
        """A docstring."""
        def inner():
            return 2

        return inner
'''
CPP = """
#define BODY(x) { x }
namespace quire {
struct Pool {  // a comment with a brace {
  int take() const { return 1; }
  explicit Pool(int size) : size_(size) {
    text = "}";
  }
};
template <class T, int N = (1 << 2)>
__global__ void __launch_bounds__(128) fill(T* to,
                                            int n) {
  if (n) {
    to[0] = '{';
  }
}
constexpr int kTable[] = {1, 2};
}  // namespace quire
"""


def test_lines_of_python_functions() -> None:
    found = {one.name: one.lines for one in function_lines.python_functions("a.py", PYTHON)}
    assert found == {"A.short": 2, "A.long": 6, "A.long.inner": 2}


def test_lines_of_cpp_functions() -> None:
    found = {one.name: (one.line, one.lines) for one in function_lines.cpp_functions("a.cu", CPP)}
    assert found == {"take": (5, 1), "Pool": (6, 3), "fill": (10, 7)}


@pytest.mark.parametrize("room", ["csrc", "engine", "service"])
def test_the_length_check_sees_every_room(every_function: list[Any], room: str) -> None:
    assert any(one.path.startswith(room) for one in every_function)


def test_sentences_leave_out_drawings_and_tables() -> None:
    text = "Claims requests. Returns at most `n` of them.\n\n    a --> b\n\n| a | b |\n\nWrites\nnothing else."
    assert list(prose.sentences(text)) == [
        "Claims requests.",
        "Returns at most `n` of them.",
        "Writes nothing else.",
    ]


def test_comments_on_consecutive_lines_are_one_text() -> None:
    cpp = prose.cpp_prose("// One two\n// three.\nint a;  // Four five.\n")
    assert [tuple(text) for text in cpp] == [(1, "One two\nthree.", False), (3, "Four five.", True)]
    python = prose.python_prose('"""A b."""\n# One two\n# three.\nx = 1  # noqa: E501\n')
    assert [tuple(text) for text in python] == [(1, "A b.", False), (2, "One two\nthree.", False)]
    page = prose.page_prose("# One\n\nTwo\nthree.\n\n```\ncode\n```\n| a | b |\n- Four\n")
    assert [text.text.strip() for text in page if text.text.strip()] == ["One", "Two\nthree.", "Four"]


WORDS = {word: prose.pattern(word) for word in [*prose.glossary(), *prose.ALSO]}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("Adds the products of a record.", "A product line; a dot product."),
        ("A row holds 64 numbers.", "Whole numbers, the numbers of requests, the numbers 0 to 7."),
        ("Takes 3 ms a token.", "Takes 3 ms per token; has at least a token."),
        ("40 tokens a second, one line a request.", "The tokens a request has; a tenth of a second."),
        ("Reads the whole body.", "A whole number, as a whole."),
        (
            "The greatest length, the least seconds.",
            "At least one; the greatest common divisor, the least recently used.",
        ),
        ("Checkpoints of 4 bits, products with 4 bits.", "An int4 checkpoint; a mask with 4 bits set."),
        ("A sum of ranks with divided logits.", "A sum of squares, divided by the count."),
        ("Where a check is due, run it.", "Return the place where it stands."),
        ("There is room for it.", "There is headroom."),
        ("The prompt has a blank, then an end token.", "A blank line ends the event."),
        ("Under pressure the client was told.", "Under memory pressure the client received it."),
        ("Each piece holds a token.", "A vocabulary piece of SentencePiece."),
        ("The request goes on.", "It goes on a thread."),
    ],
)
def test_a_word_counts_in_the_sense_that_the_glossary_replaces(wrong: str, right: str) -> None:
    def count(text: str) -> int:
        return sum(1 for _ in prose.violations("csrc/a.cu", [prose.Text(1, text)], WORDS))

    assert count(wrong) >= 1
    assert count(right) == 0


def test_a_trailing_comment_that_only_continues_a_name_counts() -> None:
    source = "int blocks;  // of all slices\nint tiles;  // grid size in tiles of 16\n// Of course.\n"
    found = prose.violations("csrc/a.cu", list(prose.texts("csrc/a.cu", source)), WORDS)
    assert [(one.line, one.word) for one in found] == [(1, prose.DANGLING)]


def test_the_limits_of_prose_may_only_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "LIMITS", tmp_path / "limits.toml")
    assert prose.write({"csrc": 4, "docs": 2}) == ""
    assert prose.limits() == {"csrc": 4, "docs": 2}
    assert prose.over({"csrc": 3, "docs": 2}, prose.limits()) == []
    assert "tests: 1 words" in prose.over({"csrc": 4, "tests": 1}, prose.limits())[0]
    assert prose.write({"tests": 7}) != ""
    assert prose.limits() == {"csrc": 4, "docs": 2}
    assert prose.write({"tests": 5}) == ""  # code has moved, and a word is gone
    assert prose.limits() == {"tests": 5}


def test_no_folder_of_pages_has_more_words_than_its_limit() -> None:
    """`make lint` checks all folders; these are read in a second."""
    command = [sys.executable, str(ROOT / ".ci" / "prose.py"), "--check", "docs", "helm", "examples", "grafana"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_issue_templates_ask_for_what_a_report_needs() -> None:
    needed = {"bug": {"version", "model", "flags", "log"}, "performance": {"machine", "command"}}
    for name, fields in needed.items():
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
        required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
        assert fields <= required, name
