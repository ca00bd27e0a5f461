"""Options and values of earlier versions: a setting that uses one is refused with its replacement."""

from __future__ import annotations

# field of a config -> the replacement
REMOVED = {
    "bad_books": "--on-accounting-error is its name",
    "check_books": "--check-accounting is its name",
    "queue_wait_s": "--late-wait-s is its name",
    "flight_log": "--request-log records each request, `python -m quire.engine.tools simulate --trace` runs it again",
    "flight_log_mib": "--request-log-mib bounds the request log",
    "client_template_s": "requests cannot bring a chat template; put it into the checkpoint as chat_template.jinja",
    "allocation": "KV blocks are always paged; `python -m quire.loadtest.studies baselines` has static allocation",
}
# (field of a config, value) -> the replacement
REMOVED_VALUES = {
    ("admission", "watermark"): "--admission threshold --admit-threshold 0.95 does the same",
    ("admission", "none"): "--admission threshold --admit-threshold 1 does the same",
    ("admission", "reserve"): "--admission forecast, the default, takes its place",
}


def advice(name: str) -> str | None:
    """Return the replacement of a removed option; None: no such option was removed.  `name`: flag, variable or key."""
    return REMOVED.get(_field(name))


def value_advice(name: str, value: object) -> str | None:
    """Return the replacement of a removed value of an option; None: no such value was removed."""
    return REMOVED_VALUES.get((_field(name), value)) if isinstance(value, str) else None


def _field(name: str) -> str:
    return name.lower().removeprefix("--").removeprefix("no-").replace("-", "_").removeprefix("quire_")
