"""Retry a request without computing it twice.

python examples/idempotent_retry.py [PROMPT]

A request with an `Idempotency-Key` can be sent again, to any gateway, with the same body. The answer is that of the
first request, running or finished. In this example the client drops the first answer on purpose and asks again.
"""

from __future__ import annotations

import os
import sys
import uuid

from openai import ConflictError, OpenAI


def main(prompt: str) -> None:
    url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
    with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUIRE_API_KEY", "none")) as client:
        model = next(iter(client.models.list())).id
        key = {"Idempotency-Key": f"order-{uuid.uuid4()}"}  # one key per answer to compute

        lost = client.completions.create(model=model, prompt=prompt, max_tokens=32, stream=True, extra_headers=key)
        first = next(iter(lost))
        lost.close()  # the connection breaks
        print(f"lost:    {first.id}")

        again = client.completions.create(model=model, prompt=prompt, max_tokens=32, stream=True, extra_headers=key)
        chunks = list(again)
        print(f"retried: {chunks[0].id}")
        print("".join(choice.text for chunk in chunks for choice in chunk.choices))

        try:
            client.completions.create(model=model, prompt="another body", max_tokens=32, extra_headers=key)
        except ConflictError as error:
            print(f"another body under the same key: {error.code}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "To be")
