"""Every file of examples/ runs as a program against a real server with the built-in model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.paged_memory import BlockTables
from quire.engine import llm
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.blocks import OutOfBlocks
from quire.engine.executor.models.sources.builtin import builtin
from tests.pace import patience
from tests.system.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def stack(redis_server: EmbeddedRedis) -> Iterator[Stack]:
    with Stack(redis_server.url, f"test-{uuid.uuid4().hex[:8]}", builtin(), gateways=2) as running:
        yield running


def run(name: str, *words: str, url: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)] if name.endswith(".py") else [str(EXAMPLES / name)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "QUIRE_URL": url}
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=patience(250), check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def post(url: str, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience(60)) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def test_streaming(stack: Stack) -> None:
    done = run("stream.py", "Hello", url=stack.url)
    assert done.stderr == ""
    text, usage = done.stdout.rsplit("\n", 2)[:2]
    assert text
    assert usage.startswith("[")
    assert usage.endswith(" out]")


def test_a_resumed_answer_is_the_undisturbed_one(stack: Stack) -> None:
    done = run("resume.py", "To be", url=stack.url)
    assert done.stderr.count("connection lost, resuming after cmpl-") == 1
    body: dict[str, object] = {"model": "tiny", "prompt": "To be", "max_tokens": 64, "seed": 1}
    whole = post(stack.gateways[1].url, "/v1/completions", body)
    choices = whole["choices"]
    assert isinstance(choices, list)
    assert done.stdout == choices[0]["text"] + "\n"


def test_a_retry_gets_the_first_answer(stack: Stack) -> None:
    done = run("idempotent_retry.py", url=stack.url)
    lines = done.stdout.splitlines()
    assert lines[0].removeprefix("lost:    ") == lines[1].removeprefix("retried: ")
    assert lines[-1] == "another body under the same key: idempotency_key_reused"


@pytest.mark.timeout(400)
def test_an_offline_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MODEL", "builtin")
    done = run("offline_batch.py", "To be", "or not")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["To be", "or not"]
    assert all(len(line["texts"]) == 2 and all(line["texts"]) for line in lines)


def test_paged_memory_as_published() -> None:
    """300 tokens are 19 blocks of 16, 17 are two; token i is at place i % 16 of the block i // 16 of its table."""
    lines = [" ".join(line.split()) for line in run("paged_memory.py").stdout.splitlines()]
    assert lines == [
        "empty 0 blocks used, 0 tokens of 0 sequences",
        "300 tokens take 19 blocks of 16",
        "register a 19 blocks used, 300 tokens of 1 sequences",
        "17 tokens take 2",
        "register b 21 blocks used, 317 tokens of 2 sequences",
        "token 299 of a: block 18 (the 19th of its table), place 11",
        "fork a into c 21 blocks used, 617 tokens of 3 sequences",
        "a appends: block 18 is copied to 21",
        "c appends: nothing is copied",
        "append to a and to c 22 blocks used, 619 tokens of 3 sequences",
        "free a: c keeps 18 shared blocks 21 blocks used, 318 tokens of 2 sequences",
        "free b and c 0 blocks used, 0 tokens of 0 sequences",
    ]


@given(st.lists(st.tuples(st.sampled_from(["register", "append", "fork", "free"]), st.integers(0, 99)), max_size=80))
def test_paged_memory_is_what_a_copy_of_every_sequence_would_be(steps: list[tuple[str, int]]) -> None:
    """Each token is read back from where it was written, whatever is shared, copied and freed in between."""
    memory, made = BlockTables(blocks=30, block_size=4), 0
    written: dict[tuple[int, int], tuple[str, int, int]] = {}  # block and place -> what stands there
    whole: dict[str, list[tuple[str, int, int]]] = {}  # what each sequence should read

    def write(name: str, token: int) -> None:
        block, place = memory.address(name, token)
        assert memory.pool.refs(block) == 1, "a block that others share is written"
        written[block, place] = (name, token, made)
        whole[name].append(written[block, place])

    for what, number in steps:
        made += 1
        names = sorted(whole)
        name = names[number % len(names)] if names else ""
        with contextlib.suppress(OutOfBlocks):
            if what == "register":
                memory.register(f"s{made}", number % 20)
                whole[f"s{made}"] = []
                for token in range(number % 20):
                    write(f"s{made}", token)
            elif what == "append" and name:
                if copied := memory.append(name):
                    old, new = copied
                    written |= {(new, place): written[old, place] for place in range(4) if (old, place) in written}
                write(name, memory.lengths[name] - 1)
            elif what == "fork" and name:
                memory.fork(name, f"s{made}")
                whole[f"s{made}"] = list(whole[name])
            elif what == "free" and name:
                memory.free(name)
                del whole[name]
        memory.pool.check(memory.tables.values())
        for each, tokens in whole.items():
            assert [written[memory.address(each, at)] for at in range(memory.lengths[each])] == tokens


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_requests(stack: Stack) -> None:
    # A title begins a line.  In a text of random words "# " may stand anywhere, but JSON writes its line ends as \\n.
    parts = re.split("^# ", run("requests.sh", url=stack.url).stdout, flags=re.MULTILINE)[1:]
    assert len(parts) == 6
    assert '"ready":true' in parts[0]
    assert '"object":"text_completion"' in parts[1]
    assert "data: [DONE]" in parts[2]
    assert '"index":1' in parts[3]
    assert '"tokens":[' in parts[4]
    assert '"code":"invalid_value"' in parts[5]
    assert '{"error"' not in "".join(parts[:5])


def test_every_example_is_in_the_page_and_has_a_test() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    source = Path(__file__).read_text(encoding="utf-8")
    for name in PROGRAMS:
        assert f"]({name})" in page, name
        assert f'run("{name}"' in source, name


def test_the_python_of_the_readme_runs(stack: Stack) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    code = code.replace("http://127.0.0.1:8000", stack.url).replace("smollm2-135m", "tiny")
    code = code.replace("stream=True", "stream=True, max_completion_tokens=16")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(250), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_example_of_the_offline_api_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The code in the docstring of engine.llm, with the built-in model."""
    assert llm.__doc__ is not None
    lines = [line for line in llm.__doc__.splitlines() if line.startswith("    ")]
    code = textwrap.dedent("\n".join(lines)).replace("./checkpoint", str(builtin()))
    exec(compile(code, "quire.engine.llm", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
