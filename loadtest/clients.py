"""Client profiles: tenant, priority, deadline and retry behaviour, drawn in the shares that the command line gives."""

from __future__ import annotations

import math
import random
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from quire.loadtest.answers import Retry

PRIORITIES = ("high", "normal", "low")
PRIORITY_RANGE = range(-100, 101)
T = TypeVar("T")
RETRIES: tuple[Retry, ...] = ("obey", "ignore", "never")
FIELDS = ("tenant", "priority", "timeout_s", "retry")


@dataclass(frozen=True)
class ClientProfile:
    """Fields that a request's client sends besides its prompt.  Empty fields are not sent."""

    tenant: str = ""  # selects the API key; "": the key of --api-key-env, if any
    priority: str | int | None = None  # one of PRIORITIES or PRIORITY_RANGE, lower first
    timeout_s: float | None = None  # seconds from when the request is due to when its answer must be complete
    retry: Retry = "obey"  # the reaction to a refusal


ANONYMOUS = ClientProfile()


class ProfileError(ValueError):
    """An invalid value.  The message has the value and the valid values; the caller adds the option or field."""


def parse_priority(text: str) -> str | int:
    """Return a name of PRIORITIES or a number of PRIORITY_RANGE.  Raises ProfileError."""
    if text in PRIORITIES:
        return text
    try:
        value = int(text)
    except ValueError:
        value = PRIORITY_RANGE.stop
    if value not in PRIORITY_RANGE:
        raise ProfileError(f"{text!r}; must be {', '.join(PRIORITIES)} or a whole number from -100 to 100")
    return value


def parse_deadline(text: str) -> float | None:
    """Return seconds, or None for "none".  Raises ProfileError."""
    if text == "none":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ProfileError(f"{text!r}; must be a number of seconds > 0, or none")
    return seconds


def parse_tenant(text: str) -> str:
    """Return a name that is not empty.  Raises ProfileError."""
    if not text:
        raise ProfileError("''; must have a name")
    return text


def parse_retry(text: str) -> Retry:
    """Return one of RETRIES.  Raises ProfileError."""
    for kind in RETRIES:
        if text == kind:
            return kind
    raise ProfileError(f"{text!r}; must be {', '.join(RETRIES)}")


def parse_shares(text: str, value: Callable[[str], T]) -> dict[T, float]:
    """Parse `loud=10,quiet=1` into each value and its weight; a name alone weighs 1.  Raises ProfileError."""
    found: dict[T, float] = {}
    for part in text.split(","):
        name, given, number = part.strip().partition("=")
        try:
            weight = float(number) if given else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ProfileError(f"{part.strip()!r}; its share must be a number > 0")
        if (key := value(name)) in found:
            raise ProfileError(f"{text!r}; must not name {name} twice")
        found[key] = weight
    return found


@dataclass(frozen=True)
class Mix:
    """Weights of each field's values; an empty mapping leaves the field as it is.

    Fields are drawn independently of each other.  So one tenant's arrivals are a process of the same kind as all
    arrivals, at that tenant's share of the rate."""

    tenants: Mapping[str, float]
    priorities: Mapping[str | int, float]
    timeouts: Mapping[float | None, float]
    retries: Mapping[Retry, float]

    def draw(self, profiles: Sequence[ClientProfile], seed: int) -> list[ClientProfile]:
        """Return the profiles with drawn values in their empty fields; values from a trace stay.

        Each field's draws depend on `seed` alone: a different mix of priorities keeps every request's tenant."""

        def drawn(field: str, choices: Mapping[Any, float]) -> list[Any]:
            given = [getattr(profile, field) for profile in profiles]
            if not choices:
                return given
            rng = random.Random(f"{seed}/{field}")
            made = rng.choices(list(choices), list(choices.values()), k=len(profiles))
            keep = [value not in ("", None) and field != "retry" for value in given]
            return [old if kept else new for old, new, kept in zip(given, made, keep, strict=True)]

        columns = (
            drawn("tenant", self.tenants),
            drawn("priority", self.priorities),
            drawn("timeout_s", self.timeouts),
            drawn("retry", self.retries),
        )
        return [
            replace(profile, tenant=t, priority=p, timeout_s=s, retry=r)
            for profile, t, p, s, r in zip(profiles, *columns, strict=True)
        ]


def read_keys(path: Path) -> dict[str, str]:
    """Read a TOML file with a line `tenant = "key"` for each tenant.  Raises ProfileError, OSError.

    Keys are read from a file because other users of the machine can read a command line, and results contain it."""
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from None
    for name, key in keys.items():
        if not isinstance(key, str) or not key:
            raise ProfileError(f'{path}: {name} must be a key: {name} = "..."')
    return keys


def count_profiles(profiles: Sequence[ClientProfile]) -> dict[str, dict[str, int]]:
    """Return the number of requests of each value, for each of FIELDS that any request sets."""
    found: dict[str, dict[str, int]] = {}
    for field in FIELDS:
        counts = Counter(str(value) for profile in profiles if (value := getattr(profile, field)) not in ("", None))
        if counts:
            found[field] = dict(sorted(counts.items()))
    return found
