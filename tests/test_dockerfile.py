"""The Dockerfile, the script of its steps, and what `make images` does before buildah runs."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.engine.config import EngineConfig
from quire.engine.executor import kernels_build
from quire.engine.executor.models.sources import demo
from tests.system import images

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SCRIPT = ROOT / ".ci" / "image.sh"
ENGINES = ("engine", "engine-cpu")


@dataclass(frozen=True)
class Stage:
    """One FROM of the Dockerfile and the lines below it."""

    parent: str
    text: str


def stages() -> dict[str, Stage]:
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {name: Stage(parent, text) for parent, name, text in zip(*[iter(parts)] * 3, strict=True)}


STAGES = stages()


def line_of(name: str) -> Iterator[Stage]:
    """The stage, its parent and so on, as far as the file has them."""
    while name in STAGES:
        yield STAGES[name]
        name = STAGES[name].parent


def needed(name: str) -> set[str]:
    """Every stage and image that `name` is built from."""
    if name not in STAGES:
        return {name}
    found = {name}
    for other in (STAGES[name].parent, *re.findall(r"--from=(\S+)", STAGES[name].text)):
        found |= needed(other)
    return found


def test_the_dockerfile_says_nothing_that_is_not_so() -> None:
    script = SCRIPT.read_text()
    for part in re.findall(r"/src/\.ci/image\.sh (\w+)", DOCKERFILE):
        assert re.search(rf"^  {part}\)", script, re.MULTILINE), part
    assert list(STAGES)[-1] == "engine", "what `docker build` makes without --target"
    (gpus,) = re.findall(r'^ARG GPUS="(.*)"', DOCKERFILE, re.MULTILINE)
    assert tuple(gpus.split()) == kernels_build.AHEAD_GPUS
    for name in re.findall(r"QUIRE_(\w+)=", DOCKERFILE):
        assert name.lower() in EngineConfig.__struct_fields__
    values = (ROOT / "helm" / "values.yaml").read_text()
    assert f"/models/{demo.NAME}/" in DOCKERFILE
    assert f'models.sources.demo "$prefix/models/{demo.NAME}"' in script
    assert f"  name: /opt/quire/models/{demo.NAME}\n" in values
    assert kernels_build.LIBRARY in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in re.findall(r"cp -r (.*) \"", script)[0].split():
        assert f"!{name}" in ignored


@pytest.mark.parametrize("name", ["gateway", *ENGINES])
def test_an_image_runs_quire_as_its_user(name: str) -> None:
    texts = "\n".join(stage.text for stage in line_of(name))
    assert re.findall(r"^(?:USER|ENTRYPOINT) (.*)$", texts, re.MULTILINE) == ["10001:10001", '["quire"]']
    (command,) = re.findall(r'^CMD \["(\w+)"', texts, re.MULTILINE)
    assert command == name.removesuffix("-cpu")
    assert ("QUIRE_KERNELS=" in texts) is (name in ENGINES)
    # Its kernels are those of CPUs, so a GPU that torch finds must not be used.
    assert ("QUIRE_DEVICE=cpu" in texts) is (name == "engine-cpu")


def test_what_make_images_builds_needs_no_image_but_the_stand_in() -> None:
    base, release = images.base_image(DOCKERFILE)
    assert (base, release) == ("python:3.11-slim-bookworm", "bookworm")
    for target in images.TARGETS:
        assert needed(target) - STAGES.keys() == {STAGES["base"].parent}
    assert any("nvidia/cuda" in name for name in needed("engine"))  # so the one that is not built is this one


def test_every_step_that_installs_may_be_given_a_package_index() -> None:
    for line, part in re.findall(r"^(RUN .*image\.sh (\w+) .*)$", DOCKERFILE, re.MULTILINE):
        assert ("--mount=type=secret,id=pip,target=/etc/pip.conf" in line) is (part != "kernels"), line


def kernels_step(folder: Path, **more: str) -> tuple[int, str, str]:
    """Run the step on a machine without nvcc, with a python that only writes down what it was asked for."""
    python, asked = folder / "prefix/bin/python", folder / "asked"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >> {asked}\nmkdir -p {folder}/prefix/kernels/build\n')
    python.chmod(0o755)
    (folder / "bin").mkdir(exist_ok=True)
    for tool in ("dirname", "rm", "mkdir"):
        if not (folder / "bin" / tool).exists():
            (folder / "bin" / tool).symlink_to(shutil.which(tool) or "")
    bash = shutil.which("bash") or ""
    env = {"PATH": str(folder / "bin"), **more}
    command = [bash, str(SCRIPT), "kernels", str(folder / "prefix")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, asked.read_text() if asked.exists() else ""


def test_kernels_of_cpus_need_no_nvcc_and_those_of_gpus_do(tmp_path: Path) -> None:
    status, says, asked = kernels_step(tmp_path, GPUS="")
    assert (status, says) == (0, "")
    assert asked == f"-m|quire.engine.executor.ops|--ahead|{tmp_path}/prefix/kernels|--gpus||"
    for more in ({}, {"GPUS": "9.0"}):
        status, says, still = kernels_step(tmp_path, **more)
        assert (status, still) == (127, asked)
        assert "nvcc: command not found" in says


def test_pip_is_configured_in_the_build_as_on_this_machine(tmp_path: Path) -> None:
    index, wheels, cert = tmp_path / "index", tmp_path / "wheels", tmp_path / "ca.crt"
    for folder in (index / "simple", wheels / "inner"):
        folder.mkdir(parents=True)
    cert.write_text("")
    listed = (
        f":env:.cert='{cert}'\n:env:.timeout='9'\n"
        f"global.timeout='5'\nglobal.index-url='https://example.com/simple'\n"
        f"global.extra-index-url='file://{index}/simple file:///not/here/simple'\n"
        f"global.find-links='{wheels} {wheels}/inner'\ndownload.timeout='7'\n"
    )
    settings = images.pip_settings(listed)
    assert settings["timeout"] == "9", "the environment beats the files"
    assert images.local_paths(settings) == sorted([cert, index, wheels]), "what pip reads besides the network"
    read = configparser.RawConfigParser()
    read.read_string(images.pip_file(settings))
    assert {name: " ".join(value.split()) for name, value in read["global"].items()} == settings


def test_no_image_is_pulled_and_pips_file_is_in_no_layer(tmp_path: Path) -> None:
    words = images.build_command("gateway", tmp_path / "pip.conf", [tmp_path])
    assert words[0] == "build"
    assert "--pull=never" in words
    assert f"--secret=id=pip,src={tmp_path}/pip.conf" in words
    assert f"{tmp_path}:{tmp_path}:ro" in words
    assert words[words.index("--target") + 1] == "gateway"


def test_what_the_machine_lacks_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["images", f"--folder={tmp_path}"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert images.main() == 2
    assert "needs root" in one_line(capsys)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("buildah", "debootstrap") else f"/bin/{name}")
    assert images.main() == 2
    assert "needs buildah, debootstrap on PATH" in one_line(capsys)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(images, "NEEDED_GB", 1e9)
    assert images.main() == 2
    assert f"GB in {tmp_path}" in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err
