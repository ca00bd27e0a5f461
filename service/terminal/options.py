"""Options of `quire top`, `quire chat` and `quire bench`.  Of the environment these commands read only API keys."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")  # names of environment variables; the first one that is set wins

ApiKey = Annotated[
    str,
    Meta(
        description="API key of the server. Empty: the variable QUIRE_API_KEY, else OPENAI_API_KEY. Prefer the "
        "variable: other users of the machine can read a command line."
    ),
]
Url = Annotated[str, Meta(description="Server: host:port or http(s)://host:port, with a path prefix if it has one.")]


class ClientEnvironment(msgspec.Struct, frozen=True):
    """Environment variable of clients; a server ignores it."""

    api_key: str = ""


class TopConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire top`."""

    urls: Annotated[
        list[str],
        Meta(
            min_length=1,
            description="Gateways, separated by commas: host:port or a URL. Their API port, or their --metrics-port if "
            "they have API keys.",
        ),
    ]
    once: Annotated[
        bool, Meta(description="Print the values once, as plain text, and end. Implied if the output is a pipe.")
    ] = False
    interval_s: Annotated[float, Meta(ge=0.1, le=60, description="Time between two samples of the metrics.")] = 1.0
    window_s: Annotated[
        float,
        Meta(
            gt=0,
            le=600,
            description="Time over which rates and percentiles are computed. With --once it is --interval-s.",
        ),
    ] = 10.0


class ChatConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire chat`."""

    url: Url
    model: Annotated[str, Meta(description="Model to ask. Empty: the first that the server lists.")] = ""
    system: Annotated[str, Meta(description="System prompt. Empty: none.")] = ""
    api_key: ApiKey = ""
    max_tokens: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Longest answer in tokens. 0: what the server allows.")
    ] = 0
    temperature: Annotated[
        float,
        Meta(
            ge=-1,
            le=2,
            description="Sampling temperature. 0: always the most probable token. -1: the server's default.",
        ),
    ] = -1.0
    top_p: Annotated[
        float,
        Meta(ge=0, le=1, description="Keep the most probable tokens up to this probability. 0: the server's default."),
    ] = 0.0
    top_k: Annotated[
        int, Meta(ge=-1, description="Sample from the N most probable tokens. -1: the server's default.")
    ] = -1
    min_p: Annotated[
        float,
        Meta(
            ge=-1,
            le=1,
            description="Drop tokens below this fraction of the maximum probability. -1: the server's default.",
        ),
    ] = -1.0
    repetition_penalty: Annotated[
        float,
        Meta(ge=0, le=100, description="Repetition penalty; above 1 tokens repeat less. 0: the server's default."),
    ] = 0.0
    seed: Annotated[int, Meta(ge=-1, description="Seed of sampling. -1: random.")] = -1


class BenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire bench`."""

    url: Url
    model: Annotated[str, Meta(description="Model to ask. Empty: the first that the server lists.")] = ""
    api_key: ApiKey = ""
    rate: Annotated[
        float, Meta(gt=0, le=10_000, description="Requests per second, sent when due even if the server is busy.")
    ] = 2.0
    requests: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Number of requests. 0: as many as arrive in --seconds.")
    ] = 0
    seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="Time in which requests arrive, without --requests.")
    ] = 10.0
    prompt_tokens: Annotated[int, Meta(ge=1, le=1_000_000, description="Length of each prompt in tokens.")] = 128
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000, description="Length of each answer in tokens.")] = 64
    text: Annotated[
        bool,
        Meta(
            description="Send words, and let answers end early: for servers that accept neither token ids nor "
            "ignore_eos. Implied if the model list names a server other than Quire, vLLM or SGLang."
        ),
    ] = False
    seed: Annotated[int, Meta(ge=-1, description="Seed of arrivals and prompts. -1: random.")] = 0
    timeout_s: Annotated[float, Meta(gt=0, le=86_400, description="Longest silence of a stream.")] = 120.0


def heed_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, also if the parent ignores it, as scripts do with `&`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the settings: only the API key, under the name of its option."""
    found = next((environ[name] for name in KEY_VARIABLES if environ.get(name)), "")
    return {KEY_VARIABLES[0]: found} if found else {}
