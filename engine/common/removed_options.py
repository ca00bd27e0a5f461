"""Options that earlier versions had: a setting that names one is refused with what replaced it."""

from __future__ import annotations

# field of a config -> what to use instead
REMOVED = {
    "flight_log": "--request-log records each request, `python -m quire.engine.tools simulate --trace` runs it again",
    "flight_log_mib": "--request-log-mib bounds the request log",
    "client_template_s": "requests cannot bring a chat template; put it into the checkpoint as chat_template.jinja",
}


def advice(name: str) -> str | None:
    """Return what replaced an option, given as flag, variable or key of a file; None if there was no such option."""
    field = name.lower().removeprefix("--").removeprefix("no-").replace("-", "_").removeprefix("quire_")
    return REMOVED.get(field)
