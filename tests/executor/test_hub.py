"""Which files of a repository are fetched, from a hub on this machine."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import snapshot_download

from engine.executor.models import hub
from engine.executor.models.weights import weight_files

COMMIT = "c" * 40
SMALL = ["config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
OTHERS = ["consolidated.safetensors", "original/model.safetensors", "onnx/config.json", "pytorch_model.bin", "a.png"]


class Hub(BaseHTTPRequestHandler):
    """A repository by the hub's HTTP interface, as far as its client uses that for a snapshot."""

    files: ClassVar[dict[str, bytes]] = {}
    fetched: ClassVar[list[str]] = []

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
            if body:
                self.fetched.append(name)
            self.reply(200, self.files[name], body=body)
        else:
            self.reply(404, b"")

    def reply(self, status: int, content: bytes, *, body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The repository org/name; the test sets its files."""
    Hub.files, Hub.fetched = {}, []
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


def test_a_duplicate_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    for name in (hub.WHOLE, "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == [hub.WHOLE]
