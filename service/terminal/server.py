"""Addresses, API keys and error messages of a server, for the commands that talk to one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import ssl
import unicodedata
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from quire.engine.common.errors import OperatorError

CONNECT_S = 10.0  # timeout in seconds for a connection
ANSWER_S = 30.0  # timeout in seconds for a short answer, such as the list of models
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)  # what aiohttp raises for a request that gets no answer
KEY_HINT = "set --api-key, QUIRE_API_KEY or OPENAI_API_KEY"


class ServerError(OperatorError):
    """The server cannot be reached, or refuses the request; the message is one line."""


class AddressError(OperatorError):
    """The address is invalid; the message is one line."""

    exit_status = 2


def base_url(text: str) -> str:
    """Return the address without a slash or /v1 at its end: host:port becomes http://host:port.

    Raises AddressError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
        raise AddressError(f"{text!r} is no address of a server; give host:port or http(s)://host:port/prefix")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def headers(api_key: str) -> dict[str, str]:
    """Return the headers of all requests.  Raises AddressError if the key has a character that no header can carry."""
    if any(not 32 < ord(char) < 127 for char in api_key):
        raise AddressError("the API key has a character that no header can carry")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def session(api_key: str) -> aiohttp.ClientSession:
    """Return a client session that lets an answer take any time."""
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(timeout=limits, headers=headers(api_key))


def reason(error: BaseException) -> str:
    """Return why a request failed, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLError | aiohttp.ClientConnectorSSLError):
        return f"TLS failed: {error}"
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, OSError) and inner.strerror:
        return os.strerror(inner.errno) if inner.errno and inner.errno in errno.errorcode else inner.strerror
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def unreachable(url: str, error: BaseException) -> ServerError:
    """Return the error of a request that got no answer."""
    return ServerError(printable(f"cannot reach {url}: {reason(error)}"))


def error_text(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, else the first characters of the body."""
    try:
        error = json.loads(body)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (ValueError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
    return printable(" ".join(text.split()))


def refused(url: str, status: int, body: bytes) -> ServerError:
    """Return the error of an answer with a status other than 200."""
    text = error_text(body)
    if status in (401, 403):
        return ServerError(f"{url} refuses the API key ({status}: {text}); {KEY_HINT}")
    return ServerError(f"{url} answered {status}: {text}")


async def model_cards(client: aiohttp.ClientSession, base: str) -> list[Mapping[str, Any]]:
    """Return the models that the server lists.  Raises ServerError, also if the server is not OpenAI-compatible."""
    url = f"{base}/v1/models"
    try:
        async with asyncio.timeout(ANSWER_S), client.get(url) as response:
            status, body = response.status, await response.read()
    except FAILURES as error:
        raise unreachable(base, error) from None
    if status in (401, 403) or status >= 500:
        raise refused(base, status, body)
    try:
        cards: list[Mapping[str, Any]] = [card for card in json.loads(body)["data"] if isinstance(card["id"], str)]
    except (ValueError, LookupError, TypeError):
        cards = []
    if status != 200 or not cards:
        raise ServerError(
            f"{base} is no OpenAI-compatible server: GET /v1/models answered {status} and no list of models"
        )
    return cards


def choose_model(base: str, cards: list[Mapping[str, Any]], wanted: str) -> Mapping[str, Any]:
    """Return the wanted model, or the first for "".  Raises ServerError."""
    for card in cards:
        if wanted in ("", card["id"]):
            return card
    names = ", ".join(str(card["id"]) for card in cards[:8])
    raise ServerError(printable(f"--model: {base} does not serve {wanted!r}; it serves {names}"))


def printable(text: str) -> str:
    """Return the text in a form that cannot move the terminal's cursor or set its title.

    Control characters, and characters that reverse the direction of writing, become U+FFFD. Line ends and tabs stay."""
    return "".join(
        char if char in "\n\t" or (unicodedata.category(char) not in ("Cc", "Cs") and char not in BIDI) else "\ufffd"
        for char in text
    )


BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
