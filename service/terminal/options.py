"""Options of `quire top`, `quire chat` and `quire bench`.

Of these, only API keys can be set by environment variables."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")  # names of environment variables; the first one that is set wins


class ClientEnvironment(msgspec.Struct, frozen=True):
    """The environment variable of these commands; servers ignore it."""

    api_key: str = ""


class TopConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire top`."""

    urls: Annotated[list[str], Meta(min_length=1)]
    """Gateways, separated by commas: host:port or a URL. Their API port, or their --metrics-port if they have API
    keys."""
    once: bool = False
    """Print the values once, as plain text, and end. Implied if the output is a pipe."""
    interval_s: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    """Time between two samples of the metrics."""
    window_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """Time over which rates and percentiles are computed. With --once it is --interval-s."""


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that `quire chat` and `quire bench` share."""

    url: str
    """Server: host:port or http(s)://host:port, with a path prefix if it has one."""
    model: str = ""
    """Model to ask. Empty: the first that the server lists."""
    api_key: str = ""
    """API key of the server. Empty: the variable QUIRE_API_KEY, else OPENAI_API_KEY. Prefer the variable: other users
    of the machine can read a command line."""


class ChatConfig(ClientConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire chat`."""

    system: str = ""
    """System prompt. Empty: none."""
    max_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Longest answer in tokens. 0: what the server allows."""
    temperature: Annotated[float, Meta(ge=-1, le=2)] = -1.0
    """Sampling temperature. 0: always the most probable token. -1: the server's default."""
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Keep the most probable tokens up to this probability. 0: the server's default."""
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """Sample from the N most probable tokens. -1: the server's default."""
    min_p: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    """Drop tokens below this fraction of the maximum probability. -1: the server's default."""
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Repetition penalty; above 1 tokens repeat less. 0: the server's default."""
    seed: Annotated[int, Meta(ge=-1)] = -1
    """Seed of sampling. -1: random."""


class BenchConfig(ClientConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire bench`."""

    rate: Annotated[float, Meta(gt=0, le=10_000)] = 2.0
    """Requests per second, sent when due even if the server is busy."""
    requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Number of requests. 0: as many as arrive in --seconds."""
    seconds: Annotated[float, Meta(gt=0, le=86_400)] = 10.0
    """Time in which requests arrive, without --requests."""
    prompt_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    """Length of each prompt in tokens."""
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Length of each answer in tokens."""
    text: bool = False
    """Send words, and let answers end early: for servers that accept neither token ids nor ignore_eos. Implied if
    the model list names a server other than Quire, vLLM or SGLang."""
    seed: Annotated[int, Meta(ge=-1)] = 0
    """Seed of arrivals and prompts. -1: random."""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """Longest silence of a stream."""


def heed_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, even if the parent made this process ignore it, as scripts do with `&`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the settings: only the API key, under the name of its option."""
    found = next((environ[name] for name in KEY_VARIABLES if environ.get(name)), "")
    return {KEY_VARIABLES[0]: found} if found else {}
