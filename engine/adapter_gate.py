"""Holds requests back until their LoRA adapter is in host memory (gate.py): no step waits for a file."""

from __future__ import annotations

from quire.engine.gate import Gate
from quire.engine.wire.messages import Generate


class AdapterGate(Gate):
    """Its store reads adapters: AdapterStore."""

    def need(self, request: Generate) -> str:
        return f"{request.adapter}={request.adapter_path}" if request.adapter else ""
