"""`make images`: build the Dockerfile's images without a daemon or a registry, start them, and ask for an answer.

    python -m tests.system.images [--folder DIRECTORY]

    apt's mirror ─ debootstrap ─> a Debian with Python, tagged as the Dockerfile's base image
    Dockerfile ─ buildah build --isolation chroot ─> one image for each of TARGETS
    image ─ buildah run ─> its own root filesystem, user, entry point and command; Redis is this machine's
                           └ a chat request, then SIGTERM

The stage `engine` is not built: its CUDA image cannot be had without a registry.  In the build pip is configured as on
this machine.  Needs root, and Debian's packages buildah and debootstrap.  Exit status 1: a step failed; 2: this machine
lacks something.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from quire.engine.common.embedded_redis import server_binary
from quire.engine.common.errors import OperatorError
from quire.engine.executor.models.sources import demo
from tests.pace import patience
from tests.ports import free_port
from tests.system.processes import ROOT, Process, ending, wait_until_ready

TARGETS = ("gateway", "engine-cpu")  # stages of the Dockerfile
TOOLS = ("buildah", "debootstrap", "apt-get", "redis-server")
NEEDED_GB = 20  # disk: a layer is a full copy, because the storage is plain directories
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
# As in the base image: buildah takes $PATH of the Dockerfile from it.
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = 10001  # user id in the images
MODEL = f"/opt/quire/models/{demo.NAME}"
QUESTION = "What is the capital of France?"
GB = 1e9
MB = 1e6


class ImagesError(OperatorError):
    """A step failed or cannot be made here; the text names it, then the last lines of its output."""


class MissingError(ImagesError):
    """This machine lacks something."""

    exit_status = 2


def require(folder: Path) -> None:
    """Raise MissingError, one line, unless this machine has the rights, the programs and the disk."""
    if os.geteuid() != 0:
        raise MissingError("make images needs root: debootstrap and buildah's chroot isolation change their root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise MissingError(
            f"make images needs {', '.join(missing)} on PATH: apt-get install buildah debootstrap redis-server"
        )
    if (free := shutil.disk_usage(folder).free / GB) < NEEDED_GB:
        raise MissingError(
            f"make images needs {NEEDED_GB} GB in {folder}, which has {free:.0f}: set TMPDIR or --folder"
        )


def base_image(dockerfile: str) -> tuple[str, str]:
    """Return the name of the base image, as python:3.11-slim-bookworm, and its Debian release."""
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    (name,) = re.findall(r"^FROM (\S+) AS base$", dockerfile, re.MULTILINE)
    name = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], name)
    return name, name.rpartition("-")[2]


def pip_settings(listed: str) -> dict[str, str]:
    """Return pip's settings from the output of `pip config list`; the environment beats the files."""
    found: dict[str, str] = {}
    pairs = [re.fullmatch(r"(:env:|\w+)\.([\w-]+)=(.*)", line) for line in listed.splitlines()]
    for pair in sorted(filter(None, pairs), key=lambda pair: pair[1] == ":env:"):
        if pair[1] in ("global", ":env:"):
            found[pair[2]] = ast.literal_eval(pair[3])
    return found


def pip_file(settings: dict[str, str]) -> str:
    """Return `settings` as a pip.conf."""
    parser = configparser.RawConfigParser()
    parser["global"] = {name: "\n".join(value.split()) for name, value in settings.items()}
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def local_paths(settings: dict[str, str]) -> list[Path]:
    """Return the folders and files of this machine that `settings` name, outermost first; each is mounted in the build.

    Of an index of files it is the folder above: pages of an index link to files next to it."""
    found = set()
    for name, value in settings.items():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                found.add(path.parent if name.endswith("index-url") else path)
    return sorted(path for path in found if not found & set(path.parents))


@dataclass
class Buildah:
    """Buildah with storage of its own below `folder`; every output goes to folder/NAME.log."""

    folder: Path
    command: list[str] = field(init=False)
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("storage", "run", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        places = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        self.command = ["buildah", *places, "--storage-driver", "vfs"]
        self.env = {**os.environ, "TMPDIR": str(self.folder / "tmp")}

    def __call__(self, *words: str, log: str = "buildah") -> str:
        """Return stdout.  Raises ImagesError."""
        return run([*self.command, *words], self.folder / f"{log}.log", self.env)

    def has(self, image: str) -> bool:
        found = [*self.command, "inspect", "--type", "image", image]
        return subprocess.run(found, env=self.env, capture_output=True, check=False).returncode == 0


def run(command: Sequence[str], log: Path, env: dict[str, str]) -> str:
    """Run to the end with all output in `log` as it comes, and return stdout.  Raises ImagesError."""
    said = []
    with (
        log.open("a", buffering=1) as file,
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            said.append(line)
    if process.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()[-20:]
        raise ImagesError("\n".join([f"{command[0]} failed with status {process.returncode}:", *lines]))
    return "".join(said).strip()


def mirror(release: str) -> str:
    """Return the mirror that apt takes packages of `release` from.  Raises MissingError."""
    words = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(SITE)", "Created-By: Packages"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if line.startswith(f"{release} main "):
            return line.split()[2]
    raise MissingError(f"make images needs a Debian mirror of {release}, and apt's sources name none")


def make_base(buildah: Buildah, name: str, release: str) -> None:
    """Make the stand-in for the base image, unless `folder` has it."""
    if buildah.has(name):
        return
    root = buildah.folder / "base"
    shutil.rmtree(root, ignore_errors=True)  # left by an interrupted run
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(root), mirror(release)]
    run(command, buildah.folder / "debootstrap.log", buildah.env)
    container = buildah("from", "scratch")
    buildah("copy", container, str(root), "/")
    buildah("config", "--env", f"PATH={PATH}", container)
    buildah("commit", "--quiet", container, name)
    buildah("rm", container)
    shutil.rmtree(root)


def build_command(target: str, secret: Path, mounts: Iterable[Path]) -> list[str]:
    """Return the words after `buildah` that build one stage; no image is pulled."""
    mounted = [word for path in mounts for word in ("--volume", f"{path}:{path}:ro")]
    options = ["--layers", "--isolation=chroot", "--pull=never", f"--secret=id=pip,src={secret}"]
    return ["build", *options, *mounted, "--target", target, "--tag", image_name(target), str(ROOT)]


def image_name(target: str) -> str:
    return f"localhost/quire-{target}:tried"


def build(buildah: Buildah) -> None:
    """Build the images of TARGETS."""
    listed = run([sys.executable, "-m", "pip", "config", "list"], buildah.folder / "pip.log", buildah.env)
    settings = pip_settings(listed)
    secret = buildah.folder / "pip.conf"
    secret.write_text(pip_file(settings))
    for target in TARGETS:
        with timed(f"building the image {target}"):
            buildah(*build_command(target, secret, local_paths(settings)), log=target)


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"images: {what} ...", flush=True)
    yield
    print(f"images: {what}: {time.monotonic() - began:.0f} s", flush=True)


class Container:
    """An image's program on its own root filesystem, with the image's user, entry point, command and environment."""

    def __init__(self, buildah: Buildah, target: str, settings: dict[str, str]) -> None:
        name = buildah("from", "--pull-never", image_name(target))
        self.root = Path(buildah("mount", name))
        config = json.loads(buildah("inspect", name))["OCIv1"]["config"]
        assert config["User"] == f"{USER}:{USER}", config
        options = [word for pair in settings.items() for word in ("--env", "=".join(pair))]
        command = [*buildah.command, "run", "--isolation=chroot", *options, name, "--"]
        words = config["Entrypoint"] + config["Cmd"]
        self.process = Process(buildah.folder / f"run-{target}.log", *words, command=command, env=buildah.env)

    def pids(self) -> list[int]:
        """Return the program's processes, the first one first: all with this root directory but buildah's own."""
        wanted, found = self.root.stat(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                inside = os.path.samestat((entry / "root").stat(), wanted)
                if inside and not (entry / "cmdline").read_bytes().startswith(b"buildah-"):
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return sorted(found)

    def terminate(self, seconds: float = 60.0) -> int:
        """Send SIGTERM to the program, as `docker stop` does, and return its exit status.

        Buildah itself would pass on SIGKILL."""
        os.kill(self.pids()[0], signal.SIGTERM)
        return self.process.popen.wait(patience(seconds))

    def kill(self) -> None:
        """Kill what is left."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def written(self) -> list[str]:
        """Return the files of the image's user outside /tmp: the image brings none, and programs may write none."""
        found = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if Path(folder, name) != self.root / "tmp"]
            found += [str(path) for name in folders + files if (path := Path(folder, name)).lstat().st_uid == USER]
        return found


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """This machine's redis-server at a TCP port of localhost: other users cannot open the socket of EmbeddedRedis."""
    port, password = free_port(), os.urandom(16).hex()
    (folder / "redis.conf").write_text(f"port {port}\nbind 127.0.0.1\nrequirepass {password}\nsave ''\n")
    with (folder / "redis.log").open("w") as log:
        server = subprocess.Popen([server_binary(), folder / "redis.conf"], cwd=folder, stdout=log, stderr=log)
    url = f"redis://:{password}@127.0.0.1:{port}"
    try:
        with redis.Redis.from_url(url, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), 100)) as client:
            client.ping()
        yield url
    finally:
        server.terminate()
        server.wait(patience(20))


def serve_and_ask(buildah: Buildah) -> str:
    """Start a gateway and an engine from their images, and return the answer to QUESTION."""
    port = free_port()
    with redis_server(buildah.folder) as url:
        shared = {"QUIRE_REDIS_URL": url, "QUIRE_MODEL": MODEL}
        containers: list[Container] = []
        try:
            with ending([]) as processes:
                for target, settings in (
                    ("gateway", {"QUIRE_PORT": str(port)}),
                    ("engine-cpu", {"QUIRE_KV_BLOCKS": "256"}),
                ):
                    containers.append(Container(buildah, target, {**shared, **settings}))
                    processes.append(containers[-1].process)
                wait_until_ready(f"http://127.0.0.1:{port}")
                answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions")
                for container in reversed(containers):
                    if status := container.terminate():
                        raise ImagesError(f"SIGTERM gave exit status {status}:\n{container.process.said()}")
                    if written := container.written():
                        raise ImagesError(f"written outside /tmp: {', '.join(written)}")
        finally:
            for container in containers:
                container.kill()
    return answer


def ask(url: str) -> str:
    body: dict[str, Any] = {"model": demo.NAME, "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience(120)) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def size(folder: Path) -> int:
    """Return the bytes of the files below `folder`."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def sizes(buildah: Buildah) -> None:
    """Print each image's size, and how much of it the Dockerfile added to the stand-in of its base image."""
    for target in TARGETS:
        container = buildah("from", "--pull-never", image_name(target))
        root = Path(buildah("mount", container))
        print(
            f"images: {target}: {size(root) / MB:,.0f} MB, of it {size(root / 'opt/quire') / MB:,.0f} MB in /opt/quire"
        )
        buildah("rm", container)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end, unless something of this machine is still mounted in it."""
    folder = Path(tempfile.mkdtemp(prefix="quire-images-"))
    try:
        yield folder
    finally:
        if f" {folder}/" in Path("/proc/self/mounts").read_text():
            print(f"images: not removed, because something is mounted in it: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def make_images(folder: Path) -> None:
    """Build, measure, start, ask.  Raises ImagesError."""
    require(folder)
    buildah = Buildah(folder)
    name, release = base_image((ROOT / "Dockerfile").read_text())
    with timed(f"debootstrap of {release} as {name}"):
        make_base(buildah, name, release)
    try:
        build(buildah)
        sizes(buildah)
        with timed("starting both images, one chat request, SIGTERM"):
            answer = serve_and_ask(buildah)
    finally:
        buildah("rm", "--all")
    print(f"images: {QUESTION} {answer}")
    if "Paris" not in answer:
        raise ImagesError("the answer does not name Paris")
    print("images: not built: the stage `engine`, whose CUDA image needs a registry")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep images, layers and logs here; they are used the next time")
    folder: Path | None = parser.parse_args().folder
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            make_images(folder.resolve())
        else:
            with temporary_folder() as temporary:
                make_images(temporary)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
