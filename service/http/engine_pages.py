"""Add the engines' `vllm:...` metrics to the gateway's /metrics, so that a dashboard made for vLLM needs one address.

    GET /metrics  -->  this gateway's metrics, then every `vllm:...` family of each page that --engine-metrics lists

Scrape either the gateway or the engines, not both: a sum over both would count everything twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp

log = logging.getLogger("quire.gateway")

PREFIX = "vllm:"
TIMEOUT_S = 2.0  # timeout in seconds per engine page; Prometheus waits 10 s for the gateway
FRESH_S = 1.0  # seconds for which pages are cached, so that frequent scrapes cost engines little
MAX_BYTES = 4 << 20  # maximum size of one page; an engine's page has about 60 KB


class EnginePagesError(ValueError):
    """--engine-metrics is not a list of URLs.  The message is one line."""


class EnginePages:
    """The metrics pages of engines."""

    def __init__(self, urls: str) -> None:
        """`urls`: URLs such as http://10.0.0.7:9100/metrics, separated by commas.  Raises EnginePagesError."""
        self._urls = [url.strip() for url in urls.split(",") if url.strip()]
        for url in self._urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise EnginePagesError(f"--engine-metrics: {url!r} is no http:// or https:// URL of a metrics page")
        self._page, self._read_at = b"", -FRESH_S
        self._reading = asyncio.Lock()
        self._failed: set[str] = set()

    async def families(self) -> bytes:
        """Return all `vllm:...` families in Prometheus' text format.  A page that cannot be read is left out."""
        if not self._urls:
            return b""
        async with self._reading:
            if time.monotonic() - self._read_at >= FRESH_S:
                timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
                async with aiohttp.ClientSession(timeout=timeout) as session:
                    pages = await asyncio.gather(*(self._fetch(session, url) for url in self._urls))
                self._page = await asyncio.to_thread(merge, pages)  # a thousand pages have 60 MB
                self._read_at = time.monotonic()
            return self._page

    async def _fetch(self, session: aiohttp.ClientSession, url: str) -> str:
        """Return the text of a page; "" if it cannot be read.  Repeated failures are logged once."""
        try:
            async with session.get(url, allow_redirects=False) as response:
                response.raise_for_status()
                page = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    page += chunk
                    if len(page) > MAX_BYTES:
                        raise ValueError(f"it has more than {MAX_BYTES} bytes")
                self._failed.discard(url)
                return page.decode()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if url not in self._failed:
                self._failed.add(url)
                why = str(error) or type(error).__name__
                log.warning("cannot read the engine's metrics at %s: %s; /metrics is without them", url, why)
            return ""


def merge(pages: Sequence[str]) -> bytes:
    """Merge the `vllm:...` families of all pages: HELP and TYPE once per family, then the samples of every page.

    The text format requires the lines of a family to stand together, after its HELP and TYPE."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for page in pages:
        family, headed = "", set(heads)
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if family.startswith(PREFIX) and family not in headed:
                    heads.setdefault(family, []).append(line)
            elif family.startswith(PREFIX) and line.startswith(family):
                samples.setdefault(family, []).append(line)
    lines = (line for name, head in heads.items() for line in (*head, *samples.get(name, [])))
    return "".join(f"{line}\n" for line in lines).encode()
