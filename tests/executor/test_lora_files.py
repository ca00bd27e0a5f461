"""Adapters that cannot be served end their request with one line that names file, fault, limit and value."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.adapters import files, patterns
from quire.engine.adapters.config import AdapterConfig
from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import AdapterFile, digest_of, read_adapter
from quire.engine.adapters.names import adapter_id, folder_of, parse_option
from quire.engine.executor.lora.packing import PackedAdapter, packer_for, targets_of
from quire.engine.executor.lora.sites import Site, Sites
from quire.engine.executor.lora.store import AdapterStore, source
from quire.engine.executor.models.linear import Linears
from quire.engine.observers.prefix_reports import HeldAdapterReports
from quire.engine.wire.prefixes import adapter_digest
from tests.lora import write_adapter

MOST = 1 << 26
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)


def sites_of(base: PreTrainedModel) -> list[Site]:
    sites = Sites.of(base)
    for layer in base.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linears in ((attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,)):
            sites.add(linears)
        sites.add((mlp.gate_proj, mlp.up_proj))
        sites.add((mlp.down_proj,))
    return sites.sites


@pytest.fixture(scope="module")
def pack(base: PreTrainedModel) -> Callable[[AdapterFile], PackedAdapter]:
    assert Linears(ordered=True, dtype=torch.float32).sites is None
    return packer_for(sites_of(base), torch.float16).pack


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = load_file(file)
        edit(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)

    return change


def weights(edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        file.write_bytes(edit(file.read_bytes()))

    return change


def pipe(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[Change, str]] = {
    "prefix tuning": (config(peft_type="PREFIX_TUNING"), "peft_type is 'PREFIX_TUNING'"),
    "DoRA": (config(use_dora=True), "use_dora"),
    "modules to save": (config(modules_to_save=["lm_head"]), r"modules_to_save is \"\['lm_head'\]\""),
    "biases": (config(bias="all"), "bias is 'all'"),
    "bias of B": (config(lora_bias=True), "lora_bias"),
    "parameters": (config(target_parameters=["mlp.experts.down_proj"]), "target_parameters"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'"),
    "rank over the limit": (config(r=129), "r is 129; ranks from 1 to 128"),
    "rank 0": (config(r=0), "r is 0"),
    "rank of a pattern": (config(rank_pattern={"q_proj": 4096}), "rank_pattern: q_proj is 4096"),
    "rank no number": (config(r="eight"), "Expected `int`"),
    "no targets": (config(target_modules=None), "target_modules is empty"),
    "layer without weights": (
        tensors(lambda found: [found.pop(Q), found.pop(Q.replace("lora_A", "lora_B"))]),
        "target_modules names model.layers.0.self_attn.q_proj, the weights lack it",
    ),
    "weights without target": (config(target_modules=["q_proj"]), "target_modules does not name it"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "No such file"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff{"), "adapter_config.json"),
    "deep JSON": (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "adapter_config.json"),
    "truncated": (weights(lambda data: data[:-1]), "truncated"),
    "empty": (weights(lambda data: b""), "truncated"),
    "header too long": (weights(lambda data: (1 << 62).to_bytes(8, "little") + data[8:]), "truncated"),
    "header no JSON": (weights(lambda data: data[:8] + b"?" + data[9:]), "damaged header"),
    "further bytes": (weights(lambda data: data + b"0"), "truncated or damaged"),
    "offsets": (weights(lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,')), "damaged"),
    "NaN": (tensors(lambda found: found[Q].view(-1)[3:4].fill_(float("nan"))), "NaN or infinity"),
    "infinity": (tensors(lambda found: found[Q].fill_(float("inf"))), "NaN or infinity"),
    "beyond float16": (tensors(lambda found: found[Q].fill_(1e6)), "exceed float16"),
    "A alone": (tensors(lambda found: found.pop(Q.replace("lora_A", "lora_B"))), "without its counterpart"),
    "other base": (
        tensors(lambda found: found.update({Q: torch.zeros(8, 96)})),
        "has 96 inputs, the base model 128: an adapter of another model",
    ),
    "rank of a tensor": (tensors(lambda found: found.update({Q: torch.zeros(200, 128)})), "rank 200; at most 128"),
    "ranks differ": (tensors(lambda found: found.update({Q: torch.zeros(4, 128)})), "lora_A has rank 4, lora_B 8"),
    "integers": (tensors(lambda found: found.update({Q: torch.zeros(8, 128, dtype=torch.int8)})), "dtype I8"),
    "one dimension": (tensors(lambda found: found.update({Q: torch.zeros(8)})), "has shape"),
    "embeddings": (
        tensors(lambda found: found.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 9)})),
        "embeddings are not served",
    ),
    "magnitudes": (
        tensors(lambda found: found.update({Q.replace("lora_A", "lora_magnitude_vector"): torch.ones(8)})),
        "DoRA is not served",
    ),
    "another module": (
        tensors(lambda found: [found.update({f"base_model.model.x.lora_{w}.weight": torch.ones(8, 8)}) for w in "AB"]),
        "x: the base model has no such linear layer",
    ),
    "expert": (
        tensors(
            lambda found: [
                found.update({f"base_model.model.model.layers.0.mlp.experts.1.up.lora_{w}.weight": torch.ones(8, 8)})
                for w in "AB"
            ]
        ),
        "experts take no adapter",
    ),
    "pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "pickles are not read",
    ),
    "a pipe": (
        pipe,
        "not a regular file",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_served_is_refused_in_one_line(
    base: PreTrainedModel, pack: Callable[[AdapterFile], PackedAdapter], tmp_path: Path, change: Change, reason: str
) -> None:
    folder = write_adapter(tmp_path / "a", base)
    pack(read_adapter(folder, MOST))
    change(folder)
    with pytest.raises(AdapterError, match=reason) as refused:
        pack(read_adapter(folder, MOST))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(folder))


def test_the_gateway_refuses_by_header_and_agrees_on_the_digest(base: PreTrainedModel, tmp_path: Path) -> None:
    """It reads no more than the header into memory."""
    folder = write_adapter(tmp_path / "a", base)
    assert digest_of(folder) == read_adapter(folder, MOST).digest
    before = digest_of(folder)
    config(lora_alpha=3)(folder)
    assert digest_of(folder) != before
    weights(lambda data: data[:-1])(folder)
    with pytest.raises(AdapterError, match="truncated"):
        digest_of(folder)


def test_no_page_is_zeroed_before_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroing holds the interpreter, so no step could start meanwhile: 45 ms for an adapter of an 8B model."""
    size, resident = 256 << 20, []
    with open(tmp_path / files.WEIGHTS, "wb") as file:
        file.truncate(size)

    class Noting(FileIO):
        def readinto(self, _: object) -> int:
            resident.append(psutil.Process().memory_info().rss)
            return 0

    monkeypatch.setattr(files, "FileIO", Noting)
    before = psutil.Process().memory_info().rss
    with pytest.raises(AdapterError, match="changed"):
        files._read(tmp_path / files.WEIGHTS, size)
    assert resident[0] - before < size // 2


def test_a_file_over_the_memory_is_not_read(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    size = (folder / "adapter_model.safetensors").stat().st_size
    with pytest.raises(AdapterError, match=f"{size} bytes; at most 1000"):
        read_adapter(folder, 1000)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target_modules": ["q_proj"]}, {"m.layers.0.q_proj", "m.layers.1.q_proj"}),
        ({"target_modules": ["layers.1.q_proj", "nothing"]}, {"m.layers.1.q_proj"}),
        ({"target_modules": ["proj"]}, set()),
        ({"target_modules": r"m\.layers\.[1-9]\..*"}, {"m.layers.1.q_proj", "m.layers.1.k_proj"}),
        ({"target_modules": "All-Linear", "exclude_modules": ["k_proj"]}, {"m.layers.0.q_proj", "m.layers.1.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {"m.layers.1.q_proj"}),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
            {"m.layers.0.q_proj"},
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "h"}, set()),
        ({"target_modules": "all-linear", "exclude_modules": ".*k_proj|.*0.*"}, {"m.layers.1.q_proj"}),
    ],
)
def test_targets_are_found_as_peft_finds_them(fields: dict[str, Any], expected: set[str]) -> None:
    layers = [f"m.layers.{at}.{name}" for at in (0, 1) for name in ("q_proj", "k_proj")]
    assert targets_of(AdapterConfig(r=1, lora_alpha=1, **fields), layers, "here") == expected


def test_a_harmful_expression_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a process of its own: this one's interpreter stays free, and other adapters soon load."""
    with pytest.raises(AdapterError, match="takes over 2 s of CPU time"):
        patterns.full_matches(["(a+)+b"], ["a" * 64], "here")
    with pytest.raises(AdapterError, match="not a regular expression"):
        patterns.full_matches(["("], ["a"], "here")
    monkeypatch.setattr(patterns, "LIMIT_S", 0.0)
    with pytest.raises(AdapterError, match="has not ended after 0 s"):
        patterns.full_matches(["(a+)+b"], ["a" * 64], "here")


def test_names_in_a_directory_stay_inside(base: PreTrainedModel, tmp_path: Path) -> None:
    root, outside = tmp_path / "dir", write_adapter(tmp_path / "outside", base)
    inside = write_adapter(root / "good", base)
    assert folder_of("good", root) == inside
    for name in ("../outside", "", ".", "..", "none", "good/../good", "a" * 300, "good\0", "/etc"):
        assert folder_of(name, root) is None
    (root / "link").symlink_to(outside)
    write_adapter(root / "half", base)
    (root / "half" / "adapter_model.safetensors").unlink()
    (root / "half" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for name in ("link", "half"):
        with pytest.raises(AdapterError, match="leads out of --lora-dir"):
            folder_of(name, root)


def test_options_name_each_adapter_once() -> None:
    assert parse_option("a=/x, b=/y") == {"a": Path("/x"), "b": Path("/y")}
    for words, reason in (
        ("a", "NAME=PATH"),
        ("a=/x,a=/y", "twice"),
        ("a b=/x", "no name"),
        ("x" * 200 + "=/y", "200"),
    ):
        with pytest.raises(AdapterError, match=reason):
            parse_option(words)


# ----------------------------------------------------------------------------------------------------------- the store


class Loader:
    """Packs adapters of a size, each when it is let go."""

    def __init__(self, size: int = 100) -> None:
        self.size, self.gate, self.began = size, threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, file: AdapterFile) -> PackedAdapter:
        self.began.set()
        self.gate.wait()
        return PackedAdapter(torch.zeros(self.size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), 1)


@pytest.fixture
def folders(base: PreTrainedModel, tmp_path: Path) -> dict[str, str]:
    """Sources of three small adapters, by name."""
    made = {}
    for seed, name in enumerate("abc"):
        folder = write_adapter(tmp_path / name, base, rank=1, targets=("q_proj",), seed=seed)
        made[name] = source(adapter_id(name, digest_of(folder)), str(folder))
    return made


def wait_for(store: AdapterStore, text: str) -> None:
    """Wait until a load has ended."""
    while text not in store.finished():
        threading.Event().wait(0.002)


def loaded(store: AdapterStore, text: str) -> bool:
    try:
        store.packed(text.partition("=")[0])
    except KeyError:
        return False
    return True


def test_a_held_adapter_stays_and_the_one_used_longest_ago_goes(folders: dict[str, str]) -> None:
    size = max(Path(text.partition("=")[2], "adapter_model.safetensors").stat().st_size for text in folders.values())
    store = AdapterStore(Loader(size), 2 * size)
    assert not store.hold("1", folders["a"])
    wait_for(store, folders["a"])
    assert store.hold("2", folders["a"])
    store.hold("3", folders["b"])
    wait_for(store, folders["b"])
    store.release("3")
    assert store.counts.kept == 1
    store.hold("4", folders["c"])  # `b` is evicted
    wait_for(store, folders["c"])
    assert [loaded(store, folders[name]) for name in "abc"] == [True, False, True]
    assert (store.counts.evicted, store.counts.held, store.counts.kept) == (1, 2, 0)
    store.hold("5", folders["b"])  # waits for memory: the others are held
    store.release("1")
    store.release("2")
    wait_for(store, folders["b"])
    assert not loaded(store, folders["a"])
    assert store.counts.held_bytes == 2 * size
    store.close()


def test_a_changed_file_is_refused_and_tried_again_later(folders: dict[str, str]) -> None:
    store = AdapterStore(Loader(), MOST)
    folder = Path(folders["a"].partition("=")[2])
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-4] + b"\0\0\0\0")
    store.hold("1", folders["a"])
    wait_for(store, folders["a"])
    assert "have changed since they were loaded" in store.fault(folders["a"])
    store.release("1")
    (folder / "adapter_model.safetensors").write_bytes(whole)
    store.hold("2", folders["a"])
    wait_for(store, folders["a"])
    assert store.fault(folders["a"]) == ""
    assert loaded(store, folders["a"])
    store.close()


def test_a_load_that_nothing_waits_for_is_dropped_or_kept(folders: dict[str, str]) -> None:
    loader = Loader()
    loader.gate.clear()
    store = AdapterStore(loader, MOST)
    store.hold("1", folders["a"])
    loader.began.wait()
    store.hold("2", folders["b"])
    store.release("2")  # it was not begun
    store.release("1")  # it runs
    loader.gate.set()
    wait_for(store, folders["a"])
    counts = store.counts
    assert (counts.held, counts.kept, counts.waiting, counts.loads) == (0, 1, 0, 1)
    store.close()


def test_a_thousand_loads_leave_nothing_behind(folders: dict[str, str]) -> None:
    """A sample of the load and unload cycles under traffic: memory and entries are those of two adapters."""
    size = max(Path(text.partition("=")[2], "adapter_model.safetensors").stat().st_size for text in folders.values())
    store = AdapterStore(Loader(size), 2 * size)
    for turn in range(300):
        text = folders["abc"[turn % 3]]
        if not store.hold(str(turn), text):
            wait_for(store, text)
        store.finished()
        store.release(str(turn))
    counts = store.counts
    assert counts.loads == 300
    assert counts.evicted == 298
    assert len(store._adapters) == len(store._loaded) == 2
    assert not store._by_request
    assert counts.kept_bytes == 2 * size
    store.close()


def test_another_base_is_one_warning(base: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name of the same base, in any case and folder, is none."""
    for named, warned in (("org/other", True), ("/x/Tiny/", False), ("", False), (None, False)):
        folder = write_adapter(tmp_path / "a", base, rank=1, targets=("q_proj",), base_model_name_or_path=named)
        store = AdapterStore(Loader(), MOST, "org/tiny")
        caplog.clear()
        store.hold("r", text := source(adapter_id("a", digest_of(folder)), str(folder)))
        wait_for(store, text)
        assert store.fault(text) == ""
        assert [one.levelname for one in caplog.records].count("WARNING") == warned
        store.close()


def test_what_is_loaded_and_what_leaves_is_published(folders: dict[str, str]) -> None:
    """With the time until one more is loaded, which grows with the loads that wait."""
    size = max(Path(text.partition("=")[2], "adapter_model.safetensors").stat().st_size for text in folders.values())
    loader, sink = Loader(size), Published()
    store = AdapterStore(loader, size)
    reports = HeldAdapterReports(store, sink)
    assert (store.load_s, store.unloaded) == (0.0, 0)
    store.hold("1", folders["a"])
    wait_for(store, folders["a"])
    first = store.load_s
    reports.observe(RECORD)
    assert sink.taken() == ([digest(folders["a"])], [])
    store.release("1")
    loader.gate.clear()
    store.hold("2", folders["b"])
    assert store.unloaded == 1
    assert 0 < first < store.load_s
    loader.gate.set()
    wait_for(store, folders["b"])
    reports.observe(RECORD)
    assert sink.taken() == ([digest(folders["b"])], [digest(folders["a"])])
    reports.observe(RECORD)
    assert sink.taken() == ([], [])
    store.close()


class Published:
    """Takes what an observer publishes."""

    def __init__(self) -> None:
        self._gained: list[bytes] = []
        self._lost: list[bytes] = []

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        self._gained += gained
        self._lost += lost

    def taken(self) -> tuple[list[bytes], list[bytes]]:
        found = self._gained, self._lost
        self._gained, self._lost = [], []
        return found


RECORD: Any = None  # the observer reads the store, not the turn


def digest(text: str) -> bytes:
    return adapter_digest(text.partition("=")[0])
