"""Who asks: tenant, priority, deadline and patience, drawn in the shares that the command line gives."""

from __future__ import annotations

import math
import random
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from loadtest.answers import Retry

PRIORITIES = ("high", "normal", "low")
PRIORITY_RANGE = range(-100, 101)
T = TypeVar("T")
PATIENCE: tuple[Retry, ...] = ("obey", "ignore", "never")


@dataclass(frozen=True)
class ClientProfile:
    """Whose request it is, and what is known of its client.  A field left out is not sent."""

    tenant: str = ""  # its key is sent; "": that of --api-key-env, if any
    priority: str | int | None = None  # of PRIORITIES or PRIORITY_RANGE, lower first
    timeout_s: float | None = None  # seconds from when it is due to when its answer must be complete
    retry: Retry = "obey"  # what a refusal leads to


ANONYMOUS = ClientProfile()


class ProfileError(ValueError):
    """What was given, and what it must be; who gave it says where."""


def parse_priority(text: str) -> str | int:
    """Raises ProfileError."""
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
    """Seconds, or None for "none".  Raises ProfileError."""
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
    """Raises ProfileError."""
    if not text:
        raise ProfileError("''; must have a name")
    return text


def parse_retry(text: str) -> Retry:
    """Raises ProfileError."""
    for kind in PATIENCE:
        if text == kind:
            return kind
    raise ProfileError(f"{text!r}; must be {', '.join(PATIENCE)}")


def parse_shares(text: str, value: Callable[[str], T]) -> dict[T, float]:
    """`loud=10,quiet=1`: each value and its part of the whole; a name alone has part 1.  Raises ProfileError."""
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
    """Shares of each field; an empty one leaves it as it is.  The fields are drawn independently of each other, so
    the arrivals of one tenant are a process of the same kind at its share of the rate."""

    tenants: Mapping[str, float]
    priorities: Mapping[str | int, float]
    timeouts: Mapping[float | None, float]
    retries: Mapping[Retry, float]

    def draw(self, profiles: Sequence[ClientProfile], seed: int) -> list[ClientProfile]:
        """One for each of `profiles`; what a trace says stands.  A field's draws depend on `seed` alone, so that
        another mix of priorities asks in the name of the same tenants."""

        def drawn(field: str, choices: Mapping[Any, float]) -> list[Any]:
            given = [getattr(client, field) for client in profiles]
            if not choices:
                return given
            rng = random.Random(f"{seed}/{field}")
            made = rng.choices(list(choices), list(choices.values()), k=len(profiles))
            said = [value not in ("", None) and field != "retry" for value in given]
            return [old if stands else new for old, new, stands in zip(given, made, said, strict=True)]

        columns = (
            drawn("tenant", self.tenants),
            drawn("priority", self.priorities),
            drawn("timeout_s", self.timeouts),
            drawn("retry", self.retries),
        )
        return [
            replace(client, tenant=t, priority=p, timeout_s=s, retry=r)
            for client, t, p, s, r in zip(profiles, *columns, strict=True)
        ]


def read_keys(path: Path) -> dict[str, str]:
    """A TOML file with a line `tenant = "key"` for each.  Keys stand in a file, not on a command line that everybody on
    the machine can read and results repeat.  Raises ProfileError, OSError."""
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from None
    for name, key in keys.items():
        if not isinstance(key, str) or not key:
            raise ProfileError(f'{path}: {name} must be a key: {name} = "..."')
    return keys


def count_profiles(profiles: Sequence[ClientProfile]) -> dict[str, dict[str, int]]:
    """How many requests each tenant, priority, deadline and kind of client asks, of the fields that anybody has."""
    found: dict[str, dict[str, int]] = {}
    for field in ("tenant", "priority", "timeout_s", "retry"):
        counts = Counter(str(value) for client in profiles if (value := getattr(client, field)) not in ("", None))
        if counts:
            found[field] = dict(sorted(counts.items()))
    return found
