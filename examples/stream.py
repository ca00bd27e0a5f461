"""Stream a chat with the official OpenAI client.

python examples/stream.py "Tell me about paging."
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(prompt: str) -> None:
    url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
    with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("QUIRE_API_KEY", "none")) as client:
        model = next(iter(client.models.list())).id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_completion_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:  # the last chunk, which has no choices
                print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Hello")
