"""Which files of a repository are fetched, from a hub on this machine."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import snapshot_download

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models import hf
from quire.engine.executor.models.served_config import read_config
from quire.engine.executor.models.sources import hub
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.models.weights import weight_files
from tests.checkpoints import make_checkpoint

COMMIT = "c" * 40
SMALL = ["config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
OTHERS = ["consolidated.safetensors", "original/model.safetensors", "onnx/config.json", "pytorch_model.bin", "a.png"]


class Hub(BaseHTTPRequestHandler):
    """A repository by the hub's HTTP interface, as far as its client uses that for a snapshot."""

    files: ClassVar[dict[str, bytes]] = {}
    fetched: ClassVar[list[str]] = []
    ranges: ClassVar[list[str]] = []  # requested byte ranges of files
    broken: ClassVar[set[str]] = set()  # files that are listed and not sent
    cut_at: ClassVar[list[int]] = []  # bytes of a weight file after which the connection breaks; one for each answer

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        prefix = f"/org/name/resolve/{COMMIT}/"
        if path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/org/name"):
            self.reply(
                200,
                json.dumps(
                    {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
                ).encode(),
            )
        elif path.startswith(prefix) and (name := path.removeprefix(prefix)) in self.files:
            if body and name in self.broken:
                self.reply(404, b"")
                return
            if body:
                self.fetched.append(name)
            self.send_file(name, body=body)
        else:
            self.reply(404, b"")

    def send_file(self, name: str, *, body: bool) -> None:
        content, asked = self.files[name], self.headers.get("Range", "")
        if not body or not name.endswith(".safetensors"):
            self.reply(200, content, body=body)
            return
        first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if asked:
            self.ranges.append(asked)
        end = self.cut_at.pop(0) if self.cut_at else len(content)
        self.reply(206 if asked else 200, content[first:], body=False, whole=content)
        self.wfile.write(content[first:end])
        if end < len(content):
            self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, status: int, content: bytes, *, body: bool = True, whole: bytes | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        whole = content if whole is None else whole
        self.send_header("ETag", f'"{hashlib.sha1(whole).hexdigest()}"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {len(whole) - len(content)}-{len(whole) - 1}/{len(whole)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The repository org/name; the test sets its files."""
    Hub.files, Hub.fetched, Hub.ranges, Hub.broken, Hub.cut_at = {}, [], [], set(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        client = functools.partial(snapshot_download, endpoint=endpoint, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(hub, "snapshot_download", client)
        yield Hub
        server.shutdown()


def contents(names: list[str]) -> dict[str, bytes]:
    return {name: f"of {name}".encode() for name in names}


def test_the_shards_of_the_index_are_fetched_and_no_duplicate(repository: type[Hub]) -> None:
    shards = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}).encode()
    repository.files = contents(SMALL + OTHERS + shards + ["model.fp16.safetensors"]) | {hub.INDEX: index}
    directory = hub.fetch("org/name")
    assert sorted(repository.fetched) == sorted([*SMALL, hub.INDEX, *shards])
    assert [file.name for file in weight_files(directory)] == shards
    assert directory.name == COMMIT
    hub.fetch("org/name")
    assert len(repository.fetched) == len(SMALL) + 3  # the rest was in the cache


def test_a_single_file_is_fetched_and_no_duplicate(repository: type[Hub]) -> None:
    repository.files = contents([*SMALL, *OTHERS, hub.WHOLE])
    directory = hub.fetch("org/name")
    assert sorted(repository.fetched) == sorted([*SMALL, hub.WHOLE])
    assert (directory / hub.WHOLE).read_bytes() == b"of model.safetensors"


def test_weights_of_another_name_are_fetched_where_there_are_no_others(repository: type[Hub]) -> None:
    repository.files = contents([*SMALL, "adapter.safetensors", "onnx/config.json"])
    assert [file.name for file in hub.fetch("org/name").glob("*.safetensors")] == ["adapter.safetensors"]


def test_weights_by_the_names_of_other_code_are_refused_before_they_are_fetched(repository: type[Hub]) -> None:
    repository.files = contents([*SMALL, *OTHERS])
    with pytest.raises(ModelLoadError, match=r"^org/name: its weights are in consolidated\.safetensors, whose tensors"):
        hf.find("org/name")
    assert sorted(repository.fetched) == sorted(SMALL)


def test_weights_of_another_name_are_loaded(repository: type[Hub], tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "llama")
    repository.files = {file.name: file.read_bytes() for file in made.iterdir()}
    repository.files["pytorch_model.safetensors"] = repository.files.pop(hub.WHOLE)
    usual, other = (
        read_weights(directory, read_config(directory), "float32").state_dict()
        for directory in (made, hf.find("org/name"))
    )
    assert usual.keys() == other.keys()
    assert all(torch.equal(usual[name], other[name]) for name in usual)


def test_a_broken_connection_goes_on_where_it_was(repository: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)  # whole chunks are kept: of 10 MB
    content = random.Random(0).randbytes(3_000_000)
    repository.files = contents(SMALL) | {hub.WHOLE: content}
    repository.cut_at = [1_000_000, 2_500_000]
    assert (hub.fetch("org/name") / hub.WHOLE).read_bytes() == content
    starts = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in repository.ranges]
    assert len(starts) == 2
    assert 0 < starts[0] <= 1_000_000 <= starts[1] <= 2_500_000


def test_after_a_failed_download_complete_files_are_not_fetched_again(repository: type[Hub]) -> None:
    shards = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    repository.files = contents([*SMALL, *shards]) | {hub.INDEX: index}
    repository.broken = {shards[1]}
    with pytest.raises(ModelLoadError, match=r"^org/name: no such directory, and not found on the hub: .*404"):
        hf.find("org/name")
    repository.broken, before = set(), list(repository.fetched)
    assert shards[0] in before
    directory = hf.find("org/name")
    assert repository.fetched == [*before, shards[1]]
    assert [(directory / shard).read_bytes() for shard in shards] == [f"of {shard}".encode() for shard in shards]


def test_a_download_logs_how_far_it_is(
    repository: type[Hub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.engine.executor.progress.EVERY_S", 0.0)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 20)
    repository.files = contents(SMALL) | {hub.WHOLE: bytes(300_000_000)}
    with caplog.at_level(logging.INFO, hub.__name__):
        hub.fetch("org/name")
    assert "downloading org/name: 0.1 GB of 0.3 GB" in caplog.messages


def test_a_duplicate_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    for name in (hub.WHOLE, "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == [hub.WHOLE]
