"""The fairness run: its results for one tenant's requests."""

from __future__ import annotations

from quire.loadtest.clients import ClientProfile
from quire.loadtest.stats import Attempt, Record
from quire.loadtest.studies.fairness import of_tenant


def asked(
    tenant: str, due: float, statuses: list[int], times: list[float], outcome: str = "ok", lane: str = ""
) -> Record:
    attempts = [Attempt(due + i, status) for i, status in enumerate(statuses)]
    client = ClientProfile(tenant)
    return Record(due, "x", 5, len(times), 0.0, attempts, times, due + 9, len(times), outcome, client=client, lane=lane)


def test_refusals_first_tokens_and_gaps_are_the_tenants_own() -> None:
    records = [
        asked("quiet", 0.0, [200], [0.1, 0.2, 0.5]),
        asked("quiet", 1.0, [429, 200], [3.0]),
        asked("quiet", 2.0, [429], [], "refused"),
        asked("loud", 0.0, [200], [9.0, 30.0], lane="late"),
        asked("loud", 0.0, [200], [0.5, 1.0], lane="on_time"),
    ]
    found = of_tenant(records, "quiet")
    assert (found["requests"], found["completed"], found["refused_at_first"]) == (3, 2, 2)
    assert found["ttft_s"]["max"] == 2.0  # from when it was due, refusals included
    assert found["longest_gap_s"] == 0.3
    assert (found["late"], of_tenant(records, "loud")["late"]) == (0, 1)
