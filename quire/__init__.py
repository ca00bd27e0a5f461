"""Quire: an LLM server that never thrashes and never loses or repeats a token.

    from quire import LLM

    for completion in LLM("./checkpoint").generate(["To be", "or not"], max_tokens=16):
        print(completion.choices[0].text)

`quire.engine` and `quire.service` are the folders of those names beside this one.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` at its first use only: a gateway imports this package and has no torch."""
    if name == "LLM":
        from quire.engine.llm import LLM

        return LLM
    if name == "__version__":
        return metadata.version("quire")
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
