"""The request log: one line for each request that ends here, without text, and the simulator reads it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.commands import Command, LocalBox, Resume
from quire.engine.config import EngineConfig
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.loop import Engine
from quire.engine.observers.log_file import LogFile
from quire.engine.observers.request_log import RequestLog
from quire.engine.tools import simulate
from quire.engine.tools.trace import read_trace
from quire.engine.wire.clock import steady_ms
from quire.engine.wire.messages import Abort, Generate, Sampling
from tests.pace import patience, wait_until

INFO = ModelInfo("scripted", "f00d", 1000, 512, [0], 64)
CONFIG = EngineConfig(max_seqs=8, step_tokens=64, check_accounting=True, admission="threshold", admit_threshold=1.0)


def a_request(name: str, prompt: int = 40, tokens: int = 5, **fields: Any) -> Generate:
    return Generate(name, "g", [5] * prompt, tokens, Sampling(ignore_eos=True, seed=3), 2**60, **fields)


def run(path: Path, *rounds: list[Command], max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    """Run the commands of each round to their ends; the lines of the log."""
    box, log = LocalBox(lambda delta: None), RequestLog(path, max_bytes)
    engine = Engine(CONFIG, ScriptedExecutor(INFO, 256, step_seconds=0.001), box, box, observers=[log])
    for commands in rounds:
        box.commands += commands
        while box.commands or not engine.core.idle:
            engine.turn()
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_lengths_times_and_outcome(tmp_path: Path) -> None:
    queued_ms = steady_ms() - 2000
    first = a_request("secret-id", n=2, priority=3, tenant="a tenant's name", queued_ms=queued_ms)
    begun = Resume(a_request("begun", 10, 6), [[1, 2, 3]])
    lines = run(tmp_path / "log", [first], [a_request("again", tokens=9)], [begun], [a_request("gone"), Abort("gone")])
    assert [line["outcome"] for line in lines] == ["length"] * 3 + ["cancelled"]
    one, again, begun_line, gone = lines
    assert (one["prompt_len"], one["output_len"], one["max_tokens"], one["n"]) == (40, 5, 5, 2)
    assert (one["priority"], one["cached_tokens"], one["unix_s"]) == (3, 0, queued_ms / 1000)
    assert 2.0 <= one["queue_s"] <= one["ttft_s"] <= one["e2e_s"] < 60.0
    assert one["at_s"] <= -1.9
    assert len(one["tenant"]) == 16
    assert (again["cached_tokens"], again["output_len"], again["tenant"]) == (32, 9, "")
    assert (begun_line["output_len"], begun_line["ttft_s"]) == (6, None)
    assert (gone["output_len"], gone["queue_s"]) == (0, None)
    assert not {"secret-id", "a tenant's name"} & set((tmp_path / "log").read_text().split('"'))


def test_a_request_that_moves_to_another_engine_is_logged_there(tmp_path: Path) -> None:
    assert run(tmp_path / "log", [a_request("r", n=2), Abort("r", reassigned=True)]) == []


def test_the_simulator_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    commands = [a_request(f"r{i}", 10 + i, 4 + i, tenant="t") for i in range(5)]
    run(path, list(commands), [a_request("gone", tokens=50), Abort("gone")], [a_request("long", prompt=600)])
    jobs = read_trace(path)
    assert [(job.prompt_len, job.output_len, job.max_tokens) for job in jobs[:5]] == [
        (10 + i, 4 + i, 4 + i) for i in range(5)
    ]
    assert [job.leaves_s > 0 for job in jobs] == [False] * 5 + [True]  # what failed computed nothing
    assert simulate.main(["--trace", str(path), "--mode", "forecast"]) == 2
    assert "too few complete answers" in capsys.readouterr().err
    path.write_text('{"unix_s": 1.0, "at_s": 2.0}\n')
    assert simulate.main(["--trace", str(path)]) == 2
    assert "line 1: " in capsys.readouterr().err


def test_it_stays_in_its_bounds_and_keeps_the_file_before(tmp_path: Path) -> None:
    path, most = tmp_path / "log", 8000
    for _ in range(2):
        run(path, [a_request(f"r{i}", 5, 1) for i in range(60)], max_bytes=most)
        sizes = [file.stat().st_size for file in (path, tmp_path / "log.1")]
        assert sum(sizes) <= most + 600  # a line may pass the half
    assert all(json.loads(line)["outcome"] == "length" for line in (tmp_path / "log.1").read_text().splitlines())
    (tmp_path / "log").write_text("of an earlier engine")
    run(path, [])
    assert (tmp_path / "log.1").read_text() == "of an earlier engine"


def test_a_slow_disk_drops_lines_and_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.observers.log_file.QUEUE", 3)
    file, disk = LogFile(tmp_path / "log", 1 << 20), threading.Event()

    def slow() -> bytes:
        assert disk.wait(patience(60))
        return b"x"

    for _ in range(10):  # a write that waited for the disk would wait for the end of this test
        file.write(slow, 1)
    assert file.dropped >= 6  # three wait, and one is being written
    disk.set()
    file.close()
    assert (tmp_path / "log").read_bytes() == b"x" * (10 - file.dropped)


def test_records_that_wait_for_the_disk_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of any size is written when it waits alone."""
    monkeypatch.setattr("quire.engine.observers.log_file.QUEUE_BYTES", 1000)
    file, busy, disk = LogFile(tmp_path / "log", 1 << 20), threading.Event(), threading.Event()

    def slow() -> bytes:
        busy.set()
        assert disk.wait(patience(60))
        return b"s"

    file.write(slow, 5000)
    assert busy.wait(patience(60))
    file.write(b"lost".strip, 1)  # 5,000 bytes are not written yet
    assert file.dropped == 1
    disk.set()
    wait_until(lambda: file._taken_bytes == 5000, 60)
    disk.clear()
    file.write(slow, 400)
    file.write(b"a".strip, 300)
    file.write(b"lost".strip, 301)
    file.write(b"b".strip, 300)
    assert file.dropped == 2
    disk.set()
    file.close()
    assert (tmp_path / "log").read_bytes() == b"ssab"


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_the_log_goes_on_when_a_full_disk_has_space_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended for good.  A line that the disk took in part is not left in the file."""
    caplog.set_level("WARNING")
    full, write = threading.Event(), os.write

    def filling(number: int, data: bytes) -> int:
        return write(number, data[: len(data) // 2] if full.is_set() else data)

    monkeypatch.setattr("quire.engine.observers.log_file.os.write", filling)
    file = LogFile(tmp_path / "log", 1 << 20)
    for text, disk_full in ((b"one", False), (b"two", True), (b"three", True), (b"four", False)):
        (full.set if disk_full else full.clear)()
        file.write(lambda text=text: text + b"\n", 1)  # type: ignore[misc]
        wait_until(lambda: file._queued_bytes == file._taken_bytes)
    file.close()
    assert lines(tmp_path / "log") == [b"one", b"four"]
    assert file.dropped == 2
    assert "lacks records from here on: [Errno 28] No space left on device" in caplog.text
    assert "takes records again, 2 are missing" in caplog.text


def test_another_program_may_rename_or_truncate_the_log(tmp_path: Path) -> None:
    """After a rename, lines went to the renamed file; after copytruncate, the file began with zeros."""
    path = tmp_path / "log"
    file = LogFile(path, 1 << 20)
    for text in (b"one\n", b"two\n", b"three\n", b"four\n"):
        file.write(text.upper, 1)
        wait_until(lambda: file._queued_bytes == file._taken_bytes)
        if text == b"one\n":
            path.rename(tmp_path / "log.old")
        elif text == b"two\n":
            os.truncate(path, 0)
    file.close()
    assert lines(tmp_path / "log.old") == [b"ONE"]
    assert lines(path) == [b"THREE", b"FOUR"]


def test_a_full_disk_ends_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quire.engine.observers.log_file.open_private",
        lambda _, empty: open("/dev/full", "wb"),  # noqa: SIM115
    )
    file = LogFile(tmp_path / "log", 1 << 20)
    for _ in range(3):
        file.write(b"x".strip, 1)
    file.close()
    assert "log lacks records from here on: [Errno 28] No space left on device" in caplog.text


def test_its_options_are_checked() -> None:
    with pytest.raises(msgspec.ValidationError, match="request_log_mib"):
        msgspec.convert({"request_log_mib": 0}, EngineConfig)
