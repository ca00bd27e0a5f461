"""Harmful files of adapters: each is refused in one bounded line, and requests of others are not disturbed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quire.engine.adapters import folder as adapter_folder
from quire.engine.adapters.config import MAX_VALUES, parse_config
from quire.engine.adapters.errors import MAX_CHARS, AdapterError
from quire.engine.adapters.files import MAX_FILE_BYTES, AdapterFile, digest_of, read_adapter
from quire.engine.adapters.folder import AdapterFolder
from quire.engine.adapters.names import parse_option
from quire.engine.adapters.patterns import by_key
from quire.engine.executor.lora.packing import PackedAdapter, packer_for, scales_of, targets_of
from quire.engine.executor.lora.store import AdapterStore
from quire.engine.llm import LLM, Adapter
from tests.executor.test_lora import GREEDY, NEW, base_of, prompts_of, reference, serve
from tests.executor.test_lora_files import (
    MOST,
    Change,
    Loader,
    Q,
    base,
    config,
    folders,
    loaded,
    pack,
    sites_of,
    tensors,
    wait_for,
    weights,
)
from tests.lora import write_adapter

__all__ = ["base", "folders", "pack"]  # fixtures


def header(edit: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header and leave the values as they are."""

    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + size])
        edit(fields)
        text = json.dumps(fields).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return weights(change)


def text(edit: Callable[[str], str]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(edit(file.read_text()))

    return change


def bomb(folder: Path, of: str) -> None:
    """A header of 2 MB that would become a million objects."""
    data = b'{"x":[' + f"{of},".encode() * 600_000 + of.encode() + b"]}"
    (folder / "adapter_model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)


def overlap(fields: dict[str, Any]) -> None:
    names = [name for name in fields if name != "__metadata__"]
    first = next(name for name in names if fields[name]["data_offsets"][0] == 0)
    size = fields[first]["data_offsets"][1]
    other = next(name for name in names if name != first and fields[name]["shape"] == fields[first]["shape"])
    fields[other]["data_offsets"] = [0, size]


def nested(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()


ODD = "base_model.model.\nERROR root: x" + "\x1b[2J" + "y" * 100_000
REFUSED: dict[str, tuple[Change, str]] = {
    "a matrix twice": (
        tensors(lambda found: found.update({Q.replace(".weight", ".default.weight"): found[Q] + 1})),
        "q_proj has lora_A twice",
    ),
    "overlapping matrices": (header(overlap), "damaged header"),
    "a header of lists": (lambda folder: bomb(folder, "[]"), f"JSON values; at most {MAX_VALUES} are read"),
    "a header of objects": (lambda folder: bomb(folder, "{}"), f"JSON values; at most {MAX_VALUES} are read"),
    "a config of lists": (text(lambda _: "[" + "[]," * 300_000 + "[]]"), f"at most {MAX_VALUES} are read"),
    "a name of many lines": (header(lambda fields: fields.update({ODD: fields.pop(Q)})), r"model\.\\nERROR root"),
    "a type of many lines": (config(peft_type="X\nY" + "z" * 100_000), r"peft_type is 'X\\nY"),
    "a pattern without end": (config(rank_pattern={"q" * 100_000: 200}), "is 200; ranks from 1"),
    "float64": (tensors(lambda found: found.update({Q: found[Q].double()})), "dtype F64; F32, BF16, F16 are served"),
    "8-bit floats": (
        tensors(lambda found: found.update({Q: found[Q].to(torch.float8_e4m3fn)})),
        "dtype F8_E4M3; F32, BF16, F16 are served",
    ),
    "an unknown dtype": (header(lambda fields: fields[Q].update(dtype="F\n4")), r"dtype F\\n4"),
    "a negative shape": (header(lambda fields: fields[Q].update(shape=[-8, -128])), "has shape"),
    "a shape beyond 64 bits": (header(lambda fields: fields[Q].update(shape=[8, 2**70])), "damaged header"),
    "alpha that is no number": (text(lambda old: old.replace('"lora_alpha": 16', '"lora_alpha": NaN')), "config.json"),
    "alpha without end": (text(lambda old: old.replace('"lora_alpha": 16', '"lora_alpha": 1e999')), "config.json"),
    "alpha beyond float32": (config(lora_alpha=1e300), "NaN or infinity"),
    "a rank as text": (config(r="8"), "Expected `int`"),
    "a harmful pattern": (config(exclude_modules="(q|q)*("), "not a regular expression"),
    "B without A": (tensors(lambda found: found.pop(Q)), "lora_B without its counterpart"),
    "a prefix of other libraries": (
        tensors(lambda found: found.update({Q.replace("base_model.model.", "transformer."): found.pop(Q)})),
        "is not part of a LoRA adapter of linear layers",
    ),
    "a folder in place of a file": (
        nested,
        "not a regular file",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_harmful_is_refused_in_one_line(
    base: PreTrainedModel, pack: Callable[[AdapterFile], PackedAdapter], tmp_path: Path, change: Change, reason: str
) -> None:
    folder = write_adapter(tmp_path / "a", base)
    change(folder)
    with pytest.raises(AdapterError, match=reason) as refused:
        pack(read_adapter(folder, MOST))
    line = str(refused.value)
    assert line.isprintable()
    assert len(line) <= 2 * MAX_CHARS


@pytest.mark.parametrize(
    ("dtype", "largest", "next_one"),
    [(torch.float16, 65_519.0, 65_520.0), (torch.bfloat16, 3.396e38, 3.397e38)],
)
def test_values_that_round_to_infinity_are_refused(
    base: PreTrainedModel, tmp_path: Path, dtype: torch.dtype, largest: float, next_one: float
) -> None:
    """Up to half a unit above the largest value of the model's data type."""
    pack = packer_for(sites_of(base), dtype).pack
    for sign in (1, -1):
        folder = write_adapter(tmp_path / f"{sign}", base)
        tensors(lambda found, value=sign * largest: found[Q].view(-1)[3:4].fill_(value))(folder)  # type: ignore[misc]
        assert pack(read_adapter(folder, MOST)).weights.isfinite().all()
        tensors(lambda found, value=sign * next_one: found[Q].view(-1)[3:4].fill_(value))(folder)  # type: ignore[misc]
        with pytest.raises(AdapterError, match=f"exceed {str(dtype)[6:]}"):
            pack(read_adapter(folder, MOST))


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"fan_in_fan_out": True, "init_lora_weights": False, "lora_dropout": 0.5, "a_later_field": [1]}, 2.0),
        ({"lora_alpha": 0}, 0.0),
        ({"lora_alpha": -8}, -1.0),
        ({"lora_alpha": 0.5, "use_rslora": True}, 0.5 / math.sqrt(8)),
    ],
)
def test_what_changes_nothing_or_only_the_scale_is_served(
    base: PreTrainedModel, tmp_path: Path, fields: dict[str, Any], scale: float
) -> None:
    file = read_adapter(write_adapter(tmp_path / "a", base, **fields), MOST)
    assert set(scales_of(file, list(file.pairs)).values()) == {scale}


def test_as_many_targets_as_a_file_may_have_are_no_search_for_each_layer() -> None:
    """The first pattern counts, and a name of several parts as well as the last one."""
    layers = [f"m.layers.{at}.q_proj" for at in range(200)]
    many = [f"x{at}" for at in range(40_000)]
    named = {"r": 8, "lora_alpha": 8, "peft_type": "LORA", "target_modules": [*many, "layers.3.q_proj", "m.layers.4"]}
    wanted = parse_config(json.dumps(named).encode(), "x")
    assert targets_of(wanted, layers, "x") == {"m.layers.3.q_proj"}
    assert by_key([*many, "1.q_proj", "q_proj"], layers[:3], "x") == {
        layers[0]: "q_proj",
        layers[1]: "1.q_proj",
        layers[2]: "q_proj",
    }
    assert by_key(["q_proj", r"layers\.1\..*", "1.q_proj"], layers[:2], "x") == dict.fromkeys(layers[:2], "q_proj")
    assert by_key([r"layers\.1\..*", "q_proj"], layers[:2], "x")[layers[1]] == r"layers\.1\..*"


def test_a_sparse_file_is_not_read(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(AdapterError, match=f"{1 << 42} bytes; at most {MAX_FILE_BYTES}"):
        digest_of(folder)


def test_an_adapter_over_the_memory_waits_for_no_other_and_evicts_none(folders: dict[str, str]) -> None:
    size = max(Path(one.partition("=")[2], "adapter_model.safetensors").stat().st_size for one in folders.values())
    store = AdapterStore(Loader(size), 2 * size)
    for name in "ab":
        store.hold(name, folders[name])
        wait_for(store, folders[name])
    store.release("b")  # kept
    with Path(folders["c"].partition("=")[2], "adapter_model.safetensors").open("r+b") as file:
        file.truncate(3 * size)
    store.hold("c", folders["c"])
    wait_for(store, folders["c"])
    assert store.fault(folders["c"]).endswith(f"{3 * size} bytes; --lora-memory-gib allows {2 * size}")
    assert [loaded(store, folders[name]) for name in "ab"] == [True, True]
    store.close()


def test_files_that_cannot_be_served_are_read_once(folders: dict[str, str]) -> None:
    packed = 0

    def never(file: AdapterFile) -> PackedAdapter:
        nonlocal packed
        packed += 1
        raise AdapterError("NaN")

    store = AdapterStore(never, MOST)
    for at in range(5):
        if not store.hold(f"r{at}", folders["a"]):
            wait_for(store, folders["a"])
        assert store.fault(folders["a"]) == "NaN"
        store.release(f"r{at}")
        assert not store.is_held(folders["a"])
    assert packed == 1
    assert store.counts.held == store.counts.kept == store.counts.waiting == 0
    store.close()


def test_a_gateway_reads_a_bad_folder_once_until_it_changes(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", base)
    good = (folder / "adapter_config.json").read_text()
    config(r=200)(folder)
    reads: list[Path] = []

    def read(path: Path) -> str:
        reads.append(path)
        return digest_of(path)

    monkeypatch.setattr(adapter_folder, "digest_of", read)
    served = AdapterFolder(tmp_path)
    for _ in range(3):
        with pytest.raises(AdapterError, match="r is 200") as refused:
            served.find("a")
        assert (refused.value.limit, refused.value.given) == (128, 200)
    assert reads == [folder]
    (folder / "adapter_config.json").write_text(good)
    assert served.find("a") is not None


def test_paths_that_no_message_can_carry_are_refused(tmp_path: Path) -> None:
    odd = f"{tmp_path}/\udcff"
    Path(odd).mkdir()
    with pytest.raises(AdapterError, match=r"\\udcff: the path of an adapter must be UTF-8"):
        parse_option(f"a={odd}")
    with pytest.raises(AdapterError, match="must be UTF-8"):
        AdapterFolder(Path(odd))


def test_a_bad_adapter_ends_its_own_requests_only(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Requests of a good one and of the base model come before, with and after it."""
    directory = checkpoint("llama")
    base, llm = base_of(directory), serve(directory)
    folders = [write_adapter(tmp_path / name, base, seed=1) for name in ("good", "bad")]
    tensors(lambda found: found[Q].view(-1)[5].fill_(math.nan))(folders[1])
    good, bad = (Adapter(folder.name, str(folder)) for folder in folders)
    prompt = prompts_of(1)[0]
    alone = answer(llm, prompt, good)
    done = [
        llm.submit(prompt, GREEDY, max_new_tokens=NEW, adapter=adapter, n=1 + (adapter is bad))
        for adapter in (bad, None, good, bad, None)
    ]
    while llm.unfinished:
        llm.step()
    plain = reference(base, prompt)
    assert [one.outputs[0].token_ids for one in done] == [[], plain, alone, [], plain]
    for one in (done[0], done[3]):
        assert {(out.finish_reason, out.message) for out in one.outputs} == {("error", done[0].outputs[0].message)}
    assert "NaN" in done[0].outputs[0].message
    assert answer(llm, prompt, good) == alone
    llm.close()


def answer(llm: LLM, prompt: list[int], adapter: Adapter | None) -> list[int]:
    (done,) = llm.generate([prompt], GREEDY, max_new_tokens=NEW, adapters=adapter)
    return done.outputs[0].token_ids
