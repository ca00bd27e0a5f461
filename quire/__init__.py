"""Quire: an LLM server that never thrashes and never loses or repeats a token.

    from quire import LLM

    for completion in LLM("./checkpoint").generate(["To be", "or not"], max_new_tokens=16):
        print(completion.outputs[0].text)

In a source checkout, `quire/engine` and its siblings are links to the top-level folders of these names.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.llm import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` only when it is used, because a gateway imports this package and has no torch."""
    if name == "LLM":
        from quire.engine.llm import LLM

        return LLM
    if name == "__version__":
        return metadata.version("quire")
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
