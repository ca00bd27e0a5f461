"""Continue a stream after its connection was lost, with the standard library alone.

python examples/resume.py [PROMPT]

`X-Resumable: 1` asks for an id with every event, and keeps the request running when its client leaves.
A client that sends the last id as `Last-Event-ID`, to any gateway, gets the rest of the answer: nothing is lost or
repeated.
This program cuts its own connection once, after five events.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("QUIRE_API_KEY", "none")
CUT_AFTER = 5  # events, on the first connection
TRIES = 10


def events(body: dict[str, Any], last_id: str | None) -> Iterator[tuple[str, str]]:
    """Yields (id, data) of each event of a new answer, or of the events of an earlier answer after `last_id`."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Resumable": "1"}
    if last_id is not None:
        headers["Last-Event-ID"] = last_id
    request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        event_id = data = ""
        for raw in answer:
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                data = value
            elif not name and data:  # a blank line ends an event; a line that starts with a colon is a keep-alive
                yield event_id, data
                data = ""


def text(body: dict[str, Any]) -> Iterator[str]:
    """Yields an answer's text in chunks. Reconnects until the stream ends with [DONE]."""
    last_id: str | None = None
    for attempt in range(TRIES):
        try:
            for count, (event_id, data) in enumerate(events(body, last_id)):
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                last_id = event_id
                yield from (choice["text"] for choice in chunk["choices"])
                if attempt == 0 and count + 1 == CUT_AFTER:
                    break
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise
            time.sleep(float(error.headers.get("Retry-After", "1")))
            error.close()
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
        print(f"\n[connection lost, resuming after {last_id}]", file=sys.stderr)
    raise RuntimeError(f"the stream did not end after {TRIES} connections")


def main(prompt: str) -> None:
    listing = urllib.request.Request(f"{URL}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(listing, timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    for piece in text({"model": model, "prompt": prompt, "max_tokens": 64, "seed": 1, "stream": True}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "To be")
