"""The gateways of tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service import gateways
from tests.service.gateways import MeasuredGateway, settings


def test_a_gateway_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise OSError("no Redis")

    monkeypatch.setattr(gateways, "served", broken)
    tokenizer: Any = None
    gateway = MeasuredGateway(settings(), tokenizer)
    with pytest.raises(RuntimeError, match="did not start") as caught:
        gateway.__enter__()
    gateway.loop.close()
    assert str(caught.value.__cause__) == "no Redis"
