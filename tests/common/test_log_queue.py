"""A log whose reader stopped: it blocks no caller, drops are counted and reported, the process ends in bounded time."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.common import log_queue, logs
from quire.engine.common.log_queue import QueuedStream, QueuedWriter
from quire.service.common.metrics import Telemetry
from tests.pace import patience, wait_until

ROOT = Path(__file__).resolve().parents[2]


class Pipe:
    """A pipe and the lines that its reader has got."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.text = b""
        self._reader: threading.Thread | None = None

    def fill(self) -> None:
        """Write to it until it takes no more."""
        os.set_blocking(self.write_end, False)
        try:
            while True:
                os.write(self.write_end, b"-" * 1023 + b"\n")
        except BlockingIOError:
            os.set_blocking(self.write_end, True)

    def start_reading(self) -> None:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while data := os.read(self.read_end, 1 << 16):
            self.text += data

    def lines_at_end(self) -> list[str]:
        """Close the write end, and return all lines."""
        assert self._reader is not None
        os.close(self.write_end)
        self._reader.join()
        os.close(self.read_end)
        return self.text.decode().splitlines()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "MAX_LINES", 100)


def fill(writer: QueuedWriter, lines: int, size: int = 100) -> None:
    for number in range(lines):
        writer.write(f"{number:0{size - 1}}\n".encode())


@pytest.mark.usefixtures("small")
def test_a_reader_that_stops_costs_lines_and_no_caller() -> None:
    pipe = Pipe()
    writer = QueuedWriter(pipe.write_end)
    pipe.fill()
    writer.write(b"first\n")
    wait_until(lambda: writer._writing, 60)  # the thread waits for the reader from now on
    total = 1_000
    fill(writer, total)  # more than the queue holds: this call returns all the same
    dropped = writer.dropped
    assert 0 < dropped < total
    assert not writer.drain(0.01)
    pipe.start_reading()
    assert writer.drain(200)
    writer.write(b"later\n")
    assert writer.drain(200)
    lines = pipe.lines_at_end()
    notices = [line for line in lines if "were dropped" in line]
    assert notices == [f"{dropped} log lines were dropped: the reader of this log was too slow, or had stopped"]
    assert lines.index(notices[0]) == len(lines) - 2  # where the lines are missing
    kept = [int(line) for line in lines if line.isdigit()]
    assert kept == list(range(total - dropped))
    assert writer.dropped == dropped


def test_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "MAX_BYTES", 10_000)
    pipe = Pipe()
    writer = QueuedWriter(pipe.write_end)
    pipe.fill()
    fill(writer, 100, 1000)
    assert writer.dropped > 0
    assert writer._bytes <= 10_000
    pipe.start_reading()
    assert writer.drain(200)
    pipe.lines_at_end()


def test_a_line_that_no_queue_can_hold_is_dropped_and_later_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "MAX_BYTES", 1_000)
    pipe = Pipe()
    pipe.start_reading()
    writer = QueuedWriter(pipe.write_end)
    writer.write(b"x" * 2_000 + b"\n")
    writer.write(b"short\n")
    assert writer.drain(200)
    assert [line for line in pipe.lines_at_end() if line == "short"]


def test_a_reader_that_is_gone_raises_nothing() -> None:
    pipe = Pipe()
    os.close(pipe.read_end)
    writer = QueuedWriter(pipe.write_end)
    fill(writer, 3)
    assert writer.drain(200)
    fill(writer, 2)
    assert writer.drain(200)
    assert writer.dropped == 5
    os.close(pipe.write_end)


@pytest.fixture
def stream() -> Iterator[tuple[Pipe, QueuedStream]]:
    pipe = Pipe()
    with io.TextIOWrapper(os.fdopen(pipe.write_end, "wb", closefd=False), encoding="utf-8") as original:
        yield pipe, QueuedStream(original)


def test_print_logging_and_progress_bars_write_whole_lines(stream: tuple[Pipe, QueuedStream]) -> None:
    pipe, queued = stream
    pipe.start_reading()
    print("one", "zürich", file=queued)
    print("bar", end="\r", file=queued, flush=True)
    logging.StreamHandler(queued).emit(logging.makeLogRecord({"msg": "two"}))
    assert queued.queue.drain(200)
    assert pipe.lines_at_end() == ["one zürich", "bar", "two"]
    assert queued.encoding == "utf-8"
    assert not queued.isatty()
    assert queued.fileno() == pipe.write_end


def test_the_notice_is_a_record_in_the_format_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[log_queue.Notice] = []
    monkeypatch.setattr(log_queue, "install", notices.append)
    monkeypatch.setattr(logging, "root", logging.Logger("root"))
    logs.start("json")
    line = json.loads(notices[0](17))
    assert line["level"] == "warning"
    assert line["message"].startswith("17 log lines were dropped")


def test_a_gateway_counts_dropped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, dropped = Telemetry("g"), [3]
    monkeypatch.setattr(log_queue, "dropped_lines", lambda: dropped[0])
    assert b'quire_gateway_log_lines_dropped_total{gateway="g"} 3.0' in telemetry.expose()
    dropped[0] = 5
    telemetry.expose()
    assert b'quire_gateway_log_lines_dropped_total{gateway="g"} 5.0' in telemetry.expose()


@pytest.mark.parametrize("end", ["sys.exit(3)", "logging.shutdown(); os._exit(3)", "raise SystemExit(3)"])
def test_a_process_ends_though_its_log_is_not_read(end: str) -> None:
    code = (
        "import logging, os, sys\nfrom quire.engine.common import logs\nlogs.start('text')\n"
        f"for _ in range(20_000): logging.warning('x' * 100); print('y' * 100)\n{end}"
    )
    read_end, write_end = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=write_end, stderr=write_end, check=False)
        assert done.returncode == 3
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("end", ["sys.exit(3)", "logging.shutdown(); os._exit(3)", "raise ValueError('last')"])
def test_a_process_that_ends_loses_no_line(end: str) -> None:
    code = (
        "import logging, os, sys\nfrom quire.engine.common import logs\nlogs.start('text')\n"
        f"for i in range(1000): logging.warning('line %d', i)\n{end}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 3)
    lines = done.stderr.splitlines()
    assert [line.rpartition(" ")[2] for line in lines[:1000]] == [str(i) for i in range(1000)]
    assert not end.startswith("raise") or lines[-1] == "ValueError: last"


def test_a_deadline_ends_a_process_whose_log_is_not_read() -> None:
    code = (
        "import os, time\nfrom quire.engine.common.deadline import ends_process\n"
        "os.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: os.set_blocking(2, True)\n"
        "with ends_process(0.01): time.sleep(600)\n"
    )
    read_end, write_end = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=write_end, check=False)
        assert done.returncode == 1
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_line_that_never_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that prints without line ends gathers no more than the limit."""
    monkeypatch.setattr(log_queue, "MAX_LINE_CHARS", 1000)
    read_end, write_end = os.pipe()
    stream = QueuedStream(os.fdopen(write_end, "w"))
    for _ in range(50):
        stream.write("x" * 99)
        assert len(stream._rest) <= 1000
    stream.flush()
    assert stream.queue.drain(patience(60))
    assert os.read(read_end, 10_000) == b"x" * 50 * 99
    os.close(read_end)
    stream.original.close()
