"""Folders of code have READMEs, and these name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ("common", "chat_templates", "output", "grammar", "api", "delivery", "text", "http", "terminal")
ENGINE = ("core", "wire", "executor", "executor/ranks", "executor/models", "observers", "process")
PARENTS = ("service", "engine", "csrc", "loadtest", "tests", "grafana", "helm", "examples")
FOLDERS = (*PARENTS, *(f"service/{name}" for name in SERVICE), *(f"engine/{name}" for name in ENGINE))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_a_readme_of_files_that_exist(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    if folder.split("/")[0] not in ("service", "engine"):
        return
    for name in set(re.findall(r"(?<![\w./*-])\w[\w/]*\.(?:py|lua)\b", text)):
        at = [base / name for base in (ROOT / folder, ROOT, ROOT / folder.split("/")[0])]
        inside = list((ROOT / folder).rglob(name)) or list((ROOT / folder.split("/")[0]).rglob(name))
        assert any(path.exists() for path in at) or inside, name


@pytest.mark.parametrize("parent", ["service", "engine"])
def test_a_parent_links_the_readmes_of_its_folders(parent: str) -> None:
    text = (ROOT / parent / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / parent).glob("*/README.md"):
        assert f"]({page.parent.name}/README.md)" in text, page
