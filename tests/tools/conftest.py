"""What several tools read."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of some thousand tokens."""
    file = tmp_path / "text"
    file.write_text(" ".join(f"word {i} of a text" for i in range(200)))
    return file
