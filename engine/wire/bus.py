"""The old name of link.py, records.py, gateway_side.py and engine_side.py, for imports that still use it."""

from __future__ import annotations

from engine.wire.engine_side import AUDIT_S, EngineSide
from engine.wire.gateway_side import AUDIT_POLL_S, READ_COUNT, READ_DELTAS, GatewaySide
from engine.wire.link import PATIENCE_S, BusDown
from engine.wire.messages import PRIORITIES
from engine.wire.records import (
    Attached,
    DuplicateRequest,
    ExchangeReply,
    Fleet,
    IdempotencyKey,
    Quarantined,
    Queue,
    RetryTerms,
    TenantQueue,
    Usage,
)

__all__ = [
    "AUDIT_POLL_S",
    "AUDIT_S",
    "PATIENCE_S",
    "PRIORITIES",
    "READ_COUNT",
    "READ_DELTAS",
    "Attached",
    "BusDown",
    "DuplicateRequest",
    "EngineSide",
    "ExchangeReply",
    "Fleet",
    "GatewaySide",
    "IdempotencyKey",
    "Quarantined",
    "Queue",
    "RetryTerms",
    "TenantQueue",
    "Usage",
]
