"""Headers of Kubernetes' gateway API inference extension: an objective becomes a priority, a fairness id a tenant.

    x-gateway-inference-objective    --objectives NAME=PRIORITY,...--> priority, instead of the body's
    x-gateway-inference-fairness-id  -----------------------------> tenant `fairness:ID` of weight 1,
                                                                     if the API key belongs to no tenant

Clients can send these headers, too.  So they are ignored without `--inference-headers`, by which the operator states
that the inference gateway in front sets or removes them on every request.

Source: gateway-api-inference-extension.sigs.k8s.io, "Flow control" and "InferenceObjective".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from multidict import CIMultiDictProxy

from quire.engine.common.errors import OperatorError
from quire.engine.wire.messages import PRIORITIES
from quire.service.api.api import CLASSES
from quire.service.api.tenants import Tenant
from quire.service.common.limits import shown
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig

OBJECTIVE, FAIRNESS_ID = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"
PREFIX = "fairness:"  # names in a tenants file have no colon, so no fairness id can name one of those tenants
_NAME = r"[A-Za-z0-9_.-]{1,64}"


class ObjectivesError(OperatorError):
    """--objectives is invalid.  The message is one line that names the entry."""

    exit_status = 2


class Placed(NamedTuple):
    """Tenant and priority of a request, as the headers set them."""

    tenant: Tenant
    priority: int | None  # None: the body's priority counts


class InferenceHeaders:
    """Reads the headers of one gateway's requests."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ObjectivesError."""
        self._believed = config.inference_headers
        self._priorities = dict(_objective(entry) for entry in config.objectives)
        if self._priorities and not self._believed:
            raise ObjectivesError("--objectives has an effect only with --inference-headers")

    def place(self, headers: CIMultiDictProxy[str], tenant: Tenant) -> Placed:
        """Return tenant and priority of a request.  `tenant`: tenant of its API key.

        Raises Refusal(400) for an objective that is not in `--objectives`, and for a malformed fairness id."""
        if not self._believed:
            return Placed(tenant, None)
        priority = None
        if (objective := headers.get("x-gateway-inference-objective")) is not None:
            if objective not in self._priorities:
                limit, given = ", ".join(self._priorities) or "none", str(shown(objective))
                message = f"{OBJECTIVE}: must be one of {limit} (--objectives), got {given!r}"
                raise Refusal(400, "invalid_value", message, param=OBJECTIVE, limit=limit, given=given)
            priority = self._priorities[objective]
        if (fairness_id := headers.get("x-gateway-inference-fairness-id")) is not None and not tenant.name:
            if not re.fullmatch(_NAME, fairness_id):
                limit, given = "1 to 64 of a-z, A-Z, 0-9, '_', '-' and '.'", str(shown(fairness_id))
                message = f"{FAIRNESS_ID}: must be {limit}, got {given!r}"
                raise Refusal(400, "invalid_value", message, param=FAIRNESS_ID, limit=limit, given=given)
            tenant = Tenant(PREFIX + fairness_id, highest_priority=tenant.highest_priority)
        return Placed(tenant, priority)


def _objective(entry: str) -> tuple[str, int]:
    """Parse an entry of `--objectives` to (name, priority).  Raises ObjectivesError."""
    first, last = PRIORITIES
    name, _, given = entry.partition("=")
    priority = CLASSES.get(given, int(given) if re.fullmatch("-?[0-9]{1,3}", given) else last + 1)
    if not re.fullmatch(_NAME, name) or not first <= priority <= last:
        form = f"NAME=PRIORITY, with a priority of {', '.join(CLASSES)} or {first} (first) to {last}"
        raise ObjectivesError(f"--objectives: {entry[:80]!r} must be {form}")
    return name, priority
