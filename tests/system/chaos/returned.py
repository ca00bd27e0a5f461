"""Answers sent back as history: any text of a model becomes an answer that Quire accepts as history.

    python -m tests.system.chaos returned [--answers 20000] [--seed 1] [--first 0]

Answers as models of each notation write them, cut, broken and mixed, on every stand-in of a published chat template,
in this process, through the formats of all three endpoints.  Each is sent back as its endpoint gave it, with results of
its calls and a further turn.  What must hold: the history is rendered and encoded, and no word of the content, of a
call's name or of its arguments is missing.  Exit status 1 otherwise, with the number of each answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.wire.messages import Finish
from quire.service.api.anthropic.messages import MessageFormat
from quire.service.api.format import Format, Prompted
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal
from quire.service.text.tokenizer import Tokenizer
from tests.service.chat_templates.published import TEMPLATES, tokenizer_in
from tests.service.output.cuts import pieces_of
from tests.service.output.test_regions import ANSWERS
from tests.system.chaos.histories import command, parsed

ENDPOINTS = ("chat", "messages", "responses")
ESCAPES = ("\\ud83d", "\\ude00 ", "é🙂", "\\n", '"', "}", "<|im_end|>", "</think>", "\x00", " ")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["object", "array"]}}}
ASK, THEN, RESULT = "wordask", "wordthen", "wordresult"


def asking(endpoint: str, turns: list[dict[str, Any]], *, tools: bool) -> bytes:
    """Return a body with a conversation."""
    functions = [{"name": name, "parameters": SCHEMA} for name in ("f", "g")]
    if endpoint == "messages":
        body: dict[str, Any] = {"max_tokens": 99, "messages": turns}
        given: list[dict[str, Any]] = [{"name": one["name"], "input_schema": SCHEMA} for one in functions]
    elif endpoint == "responses":
        body, given = {"input": turns}, [{"type": "function", **one} for one in functions]
    else:
        body, given = {"messages": turns}, [{"type": "function", "function": one} for one in functions]
    return json.dumps(body | ({"tools": given} if tools else {})).encode()


def answered(tokenizer: Tokenizer, endpoint: str, valid: ValidRequest, text: str, finish: Finish) -> dict[str, Any]:
    """Return the answer of an endpoint to what a model wrote, as a client gets it."""
    ids = tokenizer._encode_chat(valid.messages, None, valid.options)
    valid = msgspec.structs.replace(valid, reading=tokenizer.rules.reading(valid, ids))
    prompt, name = Prompted(ids), f"{random.Random(text).getrandbits(128):032x}"
    forms: dict[str, Any] = {
        "chat": lambda: Format(
            valid, request_id=name, model="m", created=1, fingerprint=None, prompts=[prompt], vocabulary=[]
        ),
        "messages": lambda: MessageFormat(valid, request_id=f"msg_{name}", model="m", prompt=prompt),
        "responses": lambda: ResponseFormat(
            valid, request_id=f"resp_{name}", model="m", created=1, prompt=prompt, vocabulary=[]
        ),
    }
    form = forms[endpoint]()
    tokens = tokenizer._encode(text, special=False) or [0]
    pieces = pieces_of(tokenizer, valid, tokens, finish, [], each_token=form.each_token)
    found: dict[str, Any] = json.loads(b"".join(asyncio.run(form.whole(pieces, Pacer()))))
    return found


def sent_back(endpoint: str, answer: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the turns of an answer and of the results of its calls, and all text of it that must not be lost."""
    if endpoint == "chat":
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
        said = [call["function"]["name"] + " " + call["function"]["arguments"] for call in calls]
        return [message, *results], "\n".join([message["content"] or "", *said])
    if endpoint == "messages":
        blocks = answer["content"]
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": RESULT}
            for one in blocks
            if one["type"] == "tool_use"
        ]
        said = [f"{one.get('text', '')} {one.get('name', '')} {json.dumps(one.get('input', ''))}" for one in blocks]
        turn = {"role": "assistant", "content": blocks}
        return [turn, *([{"role": "user", "content": results}] if results else [])], "\n".join(said)
    items = answer["output"]
    called = [one for one in items if one["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": RESULT} for one in called]
    said = [one["name"] + " " + one["arguments"] for one in called]
    said += [part["text"] for one in items if one["type"] == "message" for part in one["content"]]
    return [*items, *results], "\n".join(said)


class Answers:
    """Answers by number, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def answer(self, number: int, notation: str | None) -> tuple[str, bool, Finish]:
        """Return what a model wrote, whether it had tools, and how it ended."""
        dice = random.Random(f"{self._seed} {number}")
        chosen = notation if notation in ANSWERS and dice.random() < 0.8 else dice.choice(sorted(ANSWERS))
        parts: list[str] = []
        for at in range(dice.randint(1, 5)):
            text = dice.choice(ANSWERS[chosen])[0]
            first, last = (0, len(text)) if dice.random() < 0.5 else sorted(dice.choices(range(len(text) + 1), k=2))
            parts.append(text[first:last])
            if dice.random() < 0.6:
                parts += [dice.choice(("", " ", "\n")), f"word{number % 997}x{at}"]
            if dice.random() < 0.3:
                parts.append(dice.choice(ESCAPES))
        whole = "".join(parts)
        return whole, dice.random() < 0.8, Finish(dice.choice(("stop", "length")))


def outcome(tokenizer: Tokenizer, endpoint: str, text: str, finish: Finish, *, tools: bool) -> str:
    """Return "fits", or what is wrong with an answer that is sent back."""
    ask, then = {"role": "user", "content": ASK}, {"role": "user", "content": THEN}
    try:
        valid = parsed(endpoint, asking(endpoint, [ask], tools=tools))
        answer = answered(tokenizer, endpoint, valid, text, finish)
        turns, said = sent_back(endpoint, answer)
        again = parsed(endpoint, asking(endpoint, [ask, *turns, then], tools=tools))
        ids = tokenizer._encode_chat(again.messages, None, again.options)
    except Refusal as refusal:
        return f"failed: status {refusal.status}: {refusal.message}"
    except Exception:  # what the gateway would answer with a 500
        return f"failed: {traceback.format_exc()}"
    prompt = tokenizer.text_of(ids, skip_special=False)
    words = [ASK, THEN, *re.findall(r"word\d+x\d+", said)]
    lost = [word for word in words if word not in prompt]
    return f"failed: {lost} lost, in {said!r}" if lost else "fits"


def returned(folder: Path, *, answers: int, seed: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Send answers back; return how many had each outcome, and what failed."""
    made, tokenizers = Answers(seed), {name: tokenizer_in(folder, name) for name in TEMPLATES}
    found: Counter[str] = Counter()
    failures = []
    for number in range(first, first + answers):
        name = sorted(TEMPLATES)[number % len(TEMPLATES)]
        tokenizer, endpoint = tokenizers[name], ENDPOINTS[number // len(TEMPLATES) % 3]
        notation = tokenizer.chat.responses.name if tokenizer.chat.responses is not None else None
        text, tools, finish = made.answer(number, notation)
        what = outcome(tokenizer, endpoint, text, finish, tools=tools and tokenizer.chat.knows_tools)
        found[what.partition(":")[0]] += 1
        if what != "fits":
            failures.append(f"answer {number}, {name}, {endpoint}, {text!r}: {what}")
    return found, failures


def main(words: list[str]) -> int:
    """Run the command."""
    return command("returned", __doc__, "answers", 20_000, returned, words)
