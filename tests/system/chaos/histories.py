"""Random histories on every stand-in of a published chat template, through the formats of all three endpoints.

    python -m tests.system.chaos histories [--requests 100000] [--seed 1] [--first 0]

Roles, parts, calls, ids and half surrogates of any order and kind, in this process: each is parsed, rendered and
encoded as the gateway does.  What must hold: tokens or a refusal of status 400, never another exception.  Each text of
content, of a call's arguments or of a tool has a word of its own, and every word is in the prompt.  Exit status 1
otherwise, with the number of each request that failed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.service.api import api
from quire.service.api.anthropic import messages
from quire.service.api.openai_responses import responses
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.service.chat_templates.published import TEMPLATES, tokenizer_in

CONFIG = GatewayConfig()
TEXTS = (
    "",
    " ",
    "a",
    "Hi there",
    "x</think>y",
    "<tool_response>z</tool_response>",
    "<|im_end|>",
    "[INST]",
    "\ud83d",
    "é🙂",
)
ARGUMENTS = (  # WORD: a word of its own
    "{}",
    "",
    "null",
    '["WORD"]',
    '{"a": "WORD',
    '{"a": {"b": [null, "\\ud83d WORD"]}}',
    '"WORD"',
    "5",
    "\ude00 WORD",
    '{"<|im_end|> WORD": 1}',
    '{"a": "WORD", "a": "b"} WORD',
)
WORD = re.compile(r"word\d+w")
ROLES = ("system", "developer", *["user", "assistant", "tool"] * 3, "function")
OTHER_ROLES = ("ipython", "judge")


class Histories:
    """Requests by number, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words = 0

    def request(self, number: int) -> tuple[str, str, bytes]:
        """Return a template's name, an endpoint and a body."""
        rng = random.Random(self._seed * 1_000_003 + number)
        self._words = 0
        name = rng.choice(list(TEMPLATES))
        endpoint = rng.choice(("chat", "chat", "messages", "responses"))
        made = {"chat": self._chat, "messages": self._messages, "responses": self._responses}[endpoint](rng)
        return name, endpoint, json.dumps(made).encode()

    def _word(self) -> str:
        self._words += 1
        return f"word{self._words}w"

    def _text(self, rng: random.Random) -> str:
        """Return a text that the model must see, or an empty one."""
        parts = [rng.choice(TEXTS) for _ in range(rng.randint(0, 3))]
        if any(parts):
            parts.insert(rng.randint(0, len(parts)), self._word())
        return "".join(parts)

    def _unseen(self, rng: random.Random) -> str:
        """Return a text that a template need not show: reasoning, or a name."""
        return "".join(rng.choice(TEXTS) for _ in range(rng.randint(0, 3)))

    def _arguments(self, rng: random.Random) -> str:
        return rng.choice(ARGUMENTS).replace("WORD", self._word())

    def _content(self, rng: random.Random, kind: str = "text") -> Any:
        made = rng.random()
        if made < 0.1:
            return None
        if made < 0.7:
            return self._text(rng)
        return [{"type": kind, "text": self._text(rng)} for _ in range(rng.randint(0, 3))]

    def _call(self, rng: random.Random) -> dict[str, Any]:
        function: dict[str, Any] = {"name": rng.choice(("f", "g.h", "<|im_end|>", "")), "arguments": ""}
        if rng.random() < 0.1:
            function["arguments"] = rng.choice(({"a": [1, {"b": "\ud83d" + self._word()}]}, None, [1], 5, "x" * 50))
        else:
            function["arguments"] = self._arguments(rng)
        call = {"id": rng.choice(("a", "call_1", "abcdefghi", "", 5)), "type": "function", "function": function}
        if rng.random() < 0.05:
            call.pop(rng.choice(list(call)))
        return call

    def _tools(self, rng: random.Random) -> dict[str, Any]:
        if rng.random() < 0.6:
            return {}
        schema = {"type": "object", "properties": {self._text(rng): {"type": "string", "enum": [self._text(rng)]}}}
        function = {"name": "f", "description": self._text(rng), "parameters": schema}
        return {"tools": [{"type": "function", "function": function}]}

    def _chat(self, rng: random.Random) -> dict[str, Any]:
        said: list[dict[str, Any]] = []
        roles = ROLES + OTHER_ROLES if rng.random() < 0.1 else ROLES
        for _ in range(rng.randint(1, 8)):
            message: dict[str, Any] = {"role": rng.choice(roles), "content": self._content(rng)}
            if message["role"] == "assistant":
                if rng.random() < 0.5:
                    message["tool_calls"] = [self._call(rng) for _ in range(rng.randint(0, 3))]
                if rng.random() < 0.1:
                    message["function_call"] = self._call(rng).get("function")
                if rng.random() < 0.3:
                    message[rng.choice(("reasoning_content", "reasoning"))] = self._unseen(rng)
                if rng.random() < 0.1:
                    message["refusal"] = self._text(rng)
            if message["role"] in ("tool", "function") and rng.random() < 0.8:
                message["tool_call_id"] = rng.choice(("a", "call_1", "abcdefghi", ""))
            if rng.random() < 0.1:
                message["name"] = self._unseen(rng)
            said.append(message)
        more = {"continue_final_message": True} if said[-1]["role"] == "assistant" and rng.random() < 0.2 else {}
        return {"messages": said, **self._tools(rng), **more}

    def _messages(self, rng: random.Random) -> dict[str, Any]:
        turns = []
        for _ in range(rng.randint(1, 8)):
            role = rng.choice(("user", "assistant", "system"))
            blocks: list[dict[str, Any]] = [{"type": "text", "text": self._text(rng)} for _ in range(rng.randint(0, 2))]
            call = f"toolu_{rng.randint(0, 3)}"
            if role == "assistant" and rng.random() < 0.6:
                blocks += [
                    {"type": "tool_use", "id": call, "name": "f", "input": {self._text(rng): self._text(rng)}},
                    {"type": "thinking", "thinking": "hm"},
                ]
            if role == "assistant" and rng.random() < 0.1:
                blocks.append({"type": "mcp_tool_use", "id": call, "name": "g", "input": {"a": self._text(rng)}})
                blocks.append({"type": "mcp_tool_result", "tool_use_id": call, "content": self._content(rng)})
            if role == "user" and rng.random() < 0.5:
                blocks.append({"type": "tool_result", "tool_use_id": call, "content": self._content(rng)})
            if role == "user" and rng.random() < 0.1:
                data = {"type": "text", "media_type": "text/plain", "data": self._text(rng)}
                blocks.append({"type": "document", "source": data, "title": self._text(rng)})
            rng.shuffle(blocks)
            turns.append({"role": role, "content": blocks if rng.random() < 0.8 else self._text(rng)})
        return {"max_tokens": 5, "messages": turns, "system": self._text(rng)}

    def _responses(self, rng: random.Random) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 8)):
            call = f"call_{rng.randint(0, 3)}"
            role = rng.choice(("user", "system", "developer", "assistant"))
            thought = [{"type": "reasoning_text", "text": self._unseen(rng)}]
            ran = [{"stdout": self._text(rng), "stderr": self._text(rng)}]
            output = self._text(rng) if rng.random() < 0.8 else [{"type": "input_text", "text": self._text(rng)}]
            made: dict[str, dict[str, Any]] = {
                "message": {"role": role, "content": self._text(rng)},
                "function_call": {"call_id": call, "name": "f", "arguments": self._arguments(rng)},
                "function_call_output": {"call_id": call, "output": output},
                "reasoning": {"content": thought, "summary": []},
                "custom_tool_call": {"call_id": call, "name": "p", "input": self._text(rng)},
                "custom_tool_call_output": {"call_id": call, "output": output},
                "shell_call": {"call_id": call, "action": {"commands": [self._text(rng)]}},
                "shell_call_output": {"call_id": call, "output": ran},
                "mcp_call": {"id": call, "name": "m", "arguments": self._arguments(rng), "output": self._text(rng)},
            }
            kind = rng.choice(["message"] * 6 + ["function_call", "function_call_output"] * 2 + list(made))
            items.append({"type": kind, **made[kind]})
        return {"input": items, "instructions": self._text(rng)}


def parsed(endpoint: str, body: bytes) -> ValidRequest:
    """Return the request of a body.  Raises Refusal."""
    if endpoint == "messages":
        return messages.parse(body, CONFIG, "m", 600.0, api.NO_DEFAULTS)
    parse = {"chat": api.parse_chat, "responses": responses.parse}[endpoint]
    return parse(body, CONFIG, "m", 600.0)


def outcome(tokenizer: Tokenizer, endpoint: str, body: bytes) -> str:
    """Return "tokens", the code of a refusal, or what is wrong: another exception, or words that are lost."""
    try:
        valid = parsed(endpoint, body)
        ids = tokenizer._encode_chat(valid.messages, None, valid.options)
        tokenizer.rules.reading(valid, ids)
    except Refusal as refusal:
        return refusal.code if refusal.status == 400 else f"failed: status {refusal.status}, code {refusal.code}"
    except Exception:  # what the gateway would answer with a 500
        return f"failed: {traceback.format_exc()}"
    lost = set(WORD.findall(body.decode())) - set(WORD.findall(tokenizer.text_of(ids, skip_special=False)))
    return f"failed: lost {sorted(lost)}" if lost else "tokens"


Run = Callable[..., tuple[Counter[str], list[str]]]  # returns how many had each outcome, and what failed


def histories(folder: Path, *, requests: int, seed: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Send requests; return how many had each outcome, and what failed."""
    made, tokenizers = Histories(seed), {name: tokenizer_in(folder, name) for name in TEMPLATES}
    found: Counter[str] = Counter()
    failures = []
    for number in range(first, first + requests):
        name, endpoint, body = made.request(number)
        what = outcome(tokenizers[name], endpoint, body)
        found[what.partition(":")[0]] += 1
        if what.startswith("failed"):
            failures.append(f"request {number}, {name}, {endpoint}: {what}")
    return found, failures


def command(name: str, text: str | None, counted: str, many: int, run: Run, words: list[str]) -> int:
    """Run a corpus from the command line: `--COUNTED` requests, `many` unless given.  1: one of them failed."""
    parser = argparse.ArgumentParser(prog=name, description=text)
    for option, default in ((counted, many), ("seed", 1), ("first", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    with tempfile.TemporaryDirectory() as folder:
        found, failures = run(Path(folder), **vars(parser.parse_args(words)))
    print(*(f"{count:7} {what}" for what, count in found.most_common()), *failures[:20], sep="\n")
    return 1 if failures else 0


def main(words: list[str]) -> int:
    """Run the command."""
    return command("histories", __doc__, "requests", 100_000, histories, words)
