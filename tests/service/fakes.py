"""Real tokenizers trained on the spot, and an engine that computes nothing.

`FakeEngine` sits on the engine's end of the bus and answers from a script, one token a step, so every test decides
what the gateway gets to see, and when.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from aiohttp import ClientSession, web
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.messages import Delta, EngineLoad, Finish, Generate, TokenBatch, TokenLogprob
from quire.service.app import Gateway
from quire.service.delivery.streams import Streams
from tests.pace import until

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Paging keeps the waste in the last block.",
    "def plan(self): return self.rows  # naïve café, Übergröße, žluťoučký kůň, 日本語のテキスト, 한국어, 🙂🙃 👩‍👩‍👧",
    "One request down, one token up; stop strings cross chunk borders. END of story. ###",
] * 4

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# A model that thinks and calls tools, written for these tests: ChatML, with the markers of Hermes and Qwen3.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for d in documents or [] %}[{{ d.text }}]\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'ipython' else m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def with_markers(path: Path, markers: Sequence[str] = ("<think>", "</think>")) -> None:
    """Turn the last tokens of a vocabulary into these texts; by default the markers of reasoning."""
    described = json.loads(path.read_text())
    model = described["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)[-len(markers) :]
    for name, marker in zip(names, markers, strict=True):
        token = model["vocab"][marker] = model["vocab"].pop(name)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described["added_tokens"].append({"id": token, "content": marker, "special": False, **flags})
    replaced = set(names)
    model["merges"] = [pair for pair in model["merges"] if not replaced & {*pair, "".join(pair)}]
    path.write_text(json.dumps(described))


def with_template(folder: Path, chat_template: str, special: Sequence[str] = (), **more: object) -> Path:
    """Give a tokenizer another chat template, and the special tokens that this uses."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": chat_template, **more}))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", *special)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def byte_level(folder: Path) -> Path:
    """A GPT-2-style byte-level BPE tokenizer, trained here."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return save(backend, folder)


def sentencepiece_like(folder: Path) -> Path:
    """A Llama-2-style BPE tokenizer with spaces as U+2581 and a byte for whatever it has not seen, trained here."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
    )
    backend.train_from_iterator([line.replace("🙂", "").replace("日本語", "") for line in CORPUS], trainer)
    described = json.loads(backend.to_str())
    described["added_tokens"] = [entry for entry in described["added_tokens"] if entry["content"] in special]
    backend = Backend.from_str(json.dumps(described))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(backend, folder)


def save(backend: Backend, folder: Path) -> Path:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def a_load(engine: str = "e0", **changes: object) -> EngineLoad:
    """An idle engine with 1,000 blocks of 16 tokens."""
    load = EngineLoad(
        engine=engine,
        model="tiny",
        fingerprint="f" * 32,
        max_model_len=512,
        vocab_size=500,
        block_size=16,
        total_blocks=1000,
        free_blocks=1000,
        cached_blocks=0,
        running=0,
        waiting=0,
        waiting_tokens=0,
        time_ms=int(time.time() * 1000),
    )
    return msgspec.structs.replace(load, **changes)


Script = Callable[[Generate, int], tuple[list[int], Finish | None]]


class FakeEngine:
    """Answers each choice with the tokens its script gives, `burst` of them a step.

    `script(generate, index)` returns the tokens and the Finish after them; None stands for what an engine would say:
    "length" at max_new_tokens, and silence where the tokens run out before."""

    def __init__(self, url: str, namespace: str, script: Script, *, engine: str = "e0", step_s: float = 0.0) -> None:
        self.script, self.step_s, self.burst, self.holding = script, step_s, 1, False
        self.failure: Finish | None = None  # ends every choice whose tokens are sent and whose script gives no end
        self.seen: list[Generate] = []
        self.aborted: list[str] = []
        self.resets = 0  # orders to empty the prefix cache
        self.generated = 0  # output tokens, as an engine counts them
        self.load_changes: dict[str, object] = {}
        self.free_tokens = 100_000
        self._side = EngineSide(url, engine, namespace=namespace)
        self._engine = engine
        self._cancelled: list[tuple[str, int, int]] = []  # (request, choice, position) to be told
        self._running: dict[str, tuple[Generate, list[tuple[list[int], Finish | None]], list[int]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    async def __aenter__(self) -> FakeEngine:
        await self._side.open()
        await self._sync([], [])
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._side.close()

    async def _sync(self, batches: list[tuple[str, TokenBatch]], finished: list[str]) -> None:
        load = a_load(self._engine, **{"running": len(self._running), **self.load_changes})
        claimed = await self._side.sync(batches, finished, load, self.free_tokens, 0 if self.holding else 1000)
        for generate in claimed.generates:
            self.seen.append(generate)
            scripts = [self.script(generate, index) for index in range(generate.n)]
            so_far = claimed.resumed.get(generate.id, [])
            positions = [-1 if said.finish else len(said.token_ids) for said in so_far] or [0] * generate.n
            self._running[generate.id] = (generate, scripts, positions)
        self.resets += claimed.reset_prefix_cache
        for order in claimed.aborts:
            self.aborted.append(order.id if order.index < 0 else f"{order.id} {order.index}")
            if order.id in self._running:
                positions = self._running[order.id][2]
                for index in range(len(positions)) if order.index < 0 else [order.index]:
                    if positions[index] >= 0:  # like an engine's scheduler: every choice ends in one Finish
                        self._cancelled.append((order.id, index, positions[index]))
                        positions[index] = -1

    async def _run(self) -> None:
        while True:
            outgoing: dict[str, list[Delta]] = {}
            finished = []
            for request_id, index, at in self._cancelled:
                end = Delta(request_id, at, [], Finish("cancelled"), index)
                outgoing.setdefault(self._running[request_id][0].gateway, []).append(end)
            self._cancelled.clear()
            for request_id, (generate, scripts, positions) in list(self._running.items()):
                for index, (tokens, finish) in enumerate(scripts):
                    at = positions[index]
                    if at < 0:
                        continue
                    delta = self._delta(generate, index, at, tokens, finish or self.failure)
                    if delta is None:
                        continue
                    positions[index] = -1 if delta.finish else at + len(delta.token_ids)
                    self.generated += len(delta.token_ids)
                    outgoing.setdefault(generate.gateway, []).append(delta)
                if all(at < 0 for at in positions):
                    finished.append(request_id)
                    del self._running[request_id]
            batches = [
                (gateway, TokenBatch(engine=self._engine, deltas=deltas)) for gateway, deltas in outgoing.items()
            ]
            await self._sync(batches, finished)
            await asyncio.sleep(self.step_s if self._running else 0.005)

    def _delta(self, generate: Generate, index: int, at: int, tokens: list[int], finish: Finish | None) -> Delta | None:
        tokens = tokens[: generate.max_new_tokens]
        new = tokens[at : at + self.burst]
        last = at + len(new) >= len(tokens)
        end = finish if last else None
        if last and end is None and len(tokens) == generate.max_new_tokens:
            end = Finish("length")
        if not new and end is None:
            return None
        sampling = generate.sampling

        def logprob(token: int, top: int) -> TokenLogprob:
            """Of the prompt, or of a token whose alternatives are the most probable: alike at all positions."""
            return TokenLogprob(-0.5, [(token, -0.5), *((t, -2.0 - t) for t in range(3, 3 + top - 1))][:top])

        def named(position: int, token: int) -> TokenLogprob:
            """Of logprob_token_ids: floats that only this position has, and that no short decimal stands for."""
            asked = sampling.logprob_token_ids
            return TokenLogprob(-token / 7, [(one, -(one + 1) / (position + 3)) for one in asked])

        if sampling.logprob_token_ids:
            found = [named(at + place, token) for place, token in enumerate(new)]
        else:
            found = [logprob(token, sampling.logprobs) for token in new]
        return Delta(
            id=generate.id,
            first=at,
            token_ids=new,
            finish=end,
            index=index,
            logprobs=found if sampling.logprobs >= 0 else None,
            cached_tokens=len(generate.token_ids) // 16 * 16 if at == 0 else 0,
            prompt_logprobs=[logprob(token, sampling.prompt_logprobs) for token in generate.token_ids[1:]]
            if at == 0 and sampling.prompt_logprobs >= 0
            else None,
        )


class Served:
    """A running gateway, its engine, and a client session with the base URL set."""

    def __init__(
        self, url: str, gateway: Gateway, streams: Streams, session: ClientSession, runner: web.AppRunner
    ) -> None:
        self.url, self.gateway, self.streams, self.session, self._runner = url, gateway, streams, session, runner

    def transports(self) -> list[asyncio.Transport]:
        """Of its clients' connections."""
        assert self._runner.server is not None
        return [one.transport for one in self._runner.server.connections if one.transport is not None]


async def failed_within(session: ClientSession, path: str, body: dict[str, object], engine: FakeEngine) -> bytes:
    """Stream an answer whose engine fails once the client has its first event, and return all events.

    A failure that came with the first tokens would be an HTTP error instead.  The script must give no end."""
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readany()
        engine.failure = Finish("error", message="it broke")
        rest = await response.read()
        engine.failure = None
    return first + rest


async def settled(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition()` holds; a hang fails the test."""
    await until(condition, 100.0, poll_s=0.005)


def with_tools(folder: Path) -> Path:
    """Give a tiny checkpoint a chat template with tool calls and markers of reasoning, and return its directory."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    template = TOOLS_TEMPLATE.replace("<|im_end|>", "<|end|>")  # the EOS token that this vocabulary has
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    with_markers(folder / "tokenizer.json")
    return folder
