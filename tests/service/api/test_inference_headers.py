"""Headers of Kubernetes' inference gateways: believed only where the operator says so; what they change, for whom."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.wire.messages import Generate
from quire.service.api.inference_headers import FAIRNESS_ID, OBJECTIVE, InferenceHeaders, ObjectivesError
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
BELIEVED = {"inference_headers": True, "objectives": ["critical=high", "batch=50"]}


async def ask(served: Served, fake: FakeEngine, headers: dict[str, str], **more: Any) -> Generate:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, **more}
    async with served.session.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
    return fake.seen[-1]


async def test_a_fairness_id_is_a_tenant_and_an_objective_a_priority(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served, unbelieving = await serve(**BELIEVED), await serve()
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: all(one.streams.fleet.engines for one in (served, unbelieving)))
        plain = await ask(served, fake, {})
        assert (plain.tenant, plain.priority, plain.cache_salt) == ("", 0, "")
        found = await ask(served, fake, {FAIRNESS_ID: "team-7", OBJECTIVE: "batch"})
        assert (found.tenant, found.weight, found.priority) == ("fairness:team-7", 1.0, 50)
        other = await ask(served, fake, {FAIRNESS_ID: "team-8", OBJECTIVE: "critical"}, priority="low")
        assert (other.tenant, other.priority) == ("fairness:team-8", -1)  # the header wins
        assert len({plain.cache_salt, found.cache_salt, other.cache_salt}) == 3  # no prefix is shared
        assert (await ask(served, fake, {FAIRNESS_ID: "team-8"}, priority="low")).priority == 1
        ignored = await ask(unbelieving, fake, {FAIRNESS_ID: "team-7", OBJECTIVE: "batch"})
        assert (ignored.tenant, ignored.priority) == ("", 0)
    async with served.session.get("/metrics") as response:
        assert 'quire_tenant_requests_total{gateway="g0",outcome="ok",tenant="fairness:team-8"} 2.0' in (
            await response.text()
        )


async def test_a_key_s_tenant_is_never_replaced(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"acme-key").hexdigest()
    (tmp_path / "tenants").write_text(f'[acme]\nweight = 2.0\nkey_sha256 = ["{digest}"]\n')
    served = await serve(**BELIEVED, tenants=str(tmp_path / "tenants"), api_keys=["plain"])
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        headers = {FAIRNESS_ID: "acme", OBJECTIVE: "batch"}
        named = await ask(served, fake, {**headers, "Authorization": "Bearer acme-key"})
        assert (named.tenant, named.weight, named.priority) == ("acme", 2.0, 50)
        nameless = await ask(served, fake, {**headers, "Authorization": "Bearer plain"})
        assert (nameless.tenant, nameless.weight) == ("fairness:acme", 1.0)
        assert named.cache_salt != nameless.cache_salt


@pytest.mark.parametrize(
    ("header", "value"), [(OBJECTIVE, "unknown"), (OBJECTIVE, ""), (FAIRNESS_ID, "a b"), (FAIRNESS_ID, "x" * 65)]
)
async def test_what_no_option_names_is_refused_by_name(serve: Serve, header: str, value: str) -> None:
    served = await serve(**BELIEVED)
    body = {"model": "tiny", "prompt": "a"}
    async with served.session.post("/v1/completions", json=body, headers={header: value}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "invalid_value", header)
        assert "critical, batch" in error["limit"] or header == FAIRNESS_ID


@pytest.mark.parametrize("entry", ["critical", "=high", "a b=high", "a=urgent", "a=101", "a=-101", "a=", "x=1.5"])
def test_an_unreadable_objective_stops_the_start(entry: str) -> None:
    with pytest.raises(ObjectivesError, match="--objectives"):
        InferenceHeaders(GatewayConfig(inference_headers=True, objectives=[entry]))


def test_objectives_without_belief_stop_the_start() -> None:
    with pytest.raises(ObjectivesError, match="--inference-headers"):
        InferenceHeaders(GatewayConfig(objectives=["a=high"]))
