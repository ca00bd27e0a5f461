"""The Executor protocol, which the loop requires of any code that runs a StepPlan, and an executor without a model."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Drafter, Sampler, Slice, StepPlan, StepResult, WindowGroup
from quire.engine.executor.constraints import IMPOSSIBLE, Constraints
from quire.engine.executor.followers import Follower, advance, forced_tokens
from quire.engine.executor.grammar_store import GrammarStore, HeldAdapters, HeldGrammars
from quire.engine.executor.grammars import Grammars


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about the loaded model for the rest of the engine."""

    name: str
    fingerprint: str  # digest of weights, dtype and config
    vocab_size: int
    max_model_len: int  # tokens
    eos_ids: list[int]
    kv_bytes_per_token: int  # keys and values of all layers except those of `windows`, summed over the ranks
    grammars: bool = False  # supports Sampling.grammar
    beams: bool = False  # supports Slice.candidates
    adapters: bool = False  # supports Start.adapter
    state_bytes: int = 0  # bytes of recurrent state per sequence; 0: no layer has any
    checkpoints: int = 0  # state slots for copies of recurrent states
    draft_tokens: int = 0  # maximum draft tokens of a step; 0: limited by the step's token budget only
    tile_tokens: int = 1  # tokens per row tile of the GEMMs: adding tokens to a partly filled tile takes little time
    windows: list[WindowGroup] = []  # layers that release blocks before their sliding window
    # Whether other sequences of a step may change a token's logits by more than rounding: if two router scores are
    # nearly equal, rounding may choose another expert.
    near_ties: bool = False


class StepError(Exception):
    """A step failed.  The executor has freed all slots and cleared all block tables.  Blocks written by finished steps
    keep their content.  The message is for the log only: clients never see it."""


class ExecutorLost(Exception):
    """The device no longer answers, so this process cannot serve.  One line for the operator."""


class Executor(Protocol):
    """Runs plans strictly in order.  Not thread-safe: one loop owns it."""

    info: ModelInfo
    max_seqs: int  # slots of the batch: configured, or the default of the device
    step_tokens: int  # maximum tokens of a step: configured, or the default of the device
    blocks: int  # KV blocks in the pool, fixed at start
    host_blocks: int  # blocks in host memory for the KV of preempted sequences; 0: none
    swap_bytes_per_s: float  # bandwidth between KV blocks and host blocks, measured at start; 0: not known
    start_parts: dict[str, float]  # seconds that the parts of loading took, by name
    memory_parts: dict[str, int]  # bytes on the device that the parts of the engine take, all ranks together, by name
    drafter: Drafter | None  # finds drafts for the sequences in its slots; None: no drafts
    depth: int  # maximum plans in flight; 1: collect before the next submit

    @property
    def grammar_store(self) -> HeldGrammars | None:
        """The store of the requests' grammars, each compiled before its first plan; None: grammars are not
        supported."""

    @property
    def adapter_store(self) -> HeldAdapters | None:
        """LoRA adapters that requests hold, each loaded before its first plan; None: adapters are not supported."""

    def submit(self, plan: StepPlan) -> None:
        """Start one step.  If `depth` > 1, returns before the step has run."""

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight.  Raises StepError if it failed; every step in flight is then void.

        Raises ExecutorLost when no further step can run."""

    def catch_up(self) -> bool:
        """Do one deferred item of the start's work, while there are no requests.  Returns whether items are left."""

    def close(self) -> None:
        """Free everything; harmless when called twice."""


def scripted_token(seed: int, sibling: int, position: int, vocab_size: int) -> int:
    """Return the token that ScriptedExecutor samples at an output position; never 0 or 1, which may be EOS tokens."""
    return 2 + (seed * 31 + sibling * 7 + position) % (vocab_size - 2)


def _mask(max_seqs: int, vocab_size: int) -> npt.NDArray[np.int32]:
    return np.zeros((max_seqs, -(-vocab_size // 32)), np.int32)


class ScriptedExecutor:
    """Generates a known text with a fixed time per step, without model and torch: for tests and load tests of an
    engine's other parts.

    If a grammar or bad_words forbid the next token of that text, it generates the first allowed token instead."""

    depth = 2
    max_seqs, step_tokens = 256, 1024
    swap_bytes_per_s = 0.0
    drafter: Drafter | None = None

    def __init__(
        self,
        info: ModelInfo,
        blocks: int,
        *,
        step_seconds: float = 0.0,
        host_blocks: int = 0,
        constraints: Constraints | None = None,
    ) -> None:
        """`constraints`: None if no request has a grammar and `max_seqs` is at most the class's default."""
        self.info = info
        self._constraints = constraints  # the first request with bad_words creates it if it is None
        self.blocks = blocks
        self.host_blocks = host_blocks
        self.start_parts: dict[str, float] = {}
        self.memory_parts: dict[str, int] = {}
        self.step_seconds = step_seconds  # duration of a step
        self._plans: deque[StepPlan] = deque()
        self._decoding: dict[int, tuple[Sampler, int]] = {}  # slot -> (sampler, next output position)

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Take the sizes of vocabulary and context from the checkpoint's config.json, if there is one: its tokenizer
        can then decode the scripted tokens."""
        directory = Path(config.model)
        path = directory / "config.json"
        shape = msgspec.json.decode(path.read_bytes()) if config.model and path.is_file() else {}
        eos_ids, vocab_size = [0], shape.get("vocab_size", 1000)
        grammars, mask = None, _mask(config.max_seqs or cls.max_seqs, vocab_size)
        if config.model and Grammars.supported(directory, eos_ids):
            kept_bytes = config.grammar_memory_mib << 20
            grammars = Grammars(directory, vocab_size=vocab_size, eos_ids=eos_ids, mask=mask, kept_bytes=kept_bytes)
        info = ModelInfo(
            name=config.served_name.partition(",")[0].strip() or config.model or "scripted",
            fingerprint="scripted",
            vocab_size=vocab_size,
            max_model_len=config.max_model_len or shape.get("max_position_embeddings", 4096),
            eos_ids=eos_ids,
            kv_bytes_per_token=0,
            grammars=grammars is not None,
        )
        blocks = config.kv_blocks or 4096
        host_blocks = blocks if config.swap_memory_gib > 0 else 0  # blocks take no memory here, so all fit
        step_seconds = config.scripted_step_ms / 1000
        constraints = Constraints(mask, vocab_size, grammars)
        return cls(info, blocks, step_seconds=step_seconds, host_blocks=host_blocks, constraints=constraints)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        for slot in plan.freed_slots:
            self._decoding.pop(slot, None)
            if self._constraints is not None:
                self._constraints.free(slot)
        accepted = {piece.slot: self._accept(piece) for piece in plan.slices if piece.drafts}
        for piece in plan.slices:
            if piece.sampler is not None:
                end = piece.start + len(piece.token_ids)
                self._begin(piece.slot, piece.sampler, end - piece.sampler.prompt_len)
        for fork in plan.forks:
            self._begin(fork.slot, fork.sampler, self._decoding[fork.parent][1])
        slots, tokens = [], []
        for slot, (sampler, position) in self._decoding.items():
            slots.append(slot)
            tokens.append(self.token(sampler, position))
            self._decoding[slot] = sampler, position + 1
        constraints = self._constraints
        impossible: dict[int, str] = {}
        forced: dict[int, list[int]] = {}
        if constraints and constraints.active:
            impossible, followers = self._constrain(constraints, slots, tokens)
            forced = forced_tokens(followers) if plan.look_ahead else {}
        return StepResult(
            plan.step,
            slots,
            tokens,
            device_s=self.step_seconds,
            impossible=impossible,
            forced=forced,
            accepted=accepted,
        )

    def _accept(self, piece: Slice) -> int:
        """Accept a slice's leading drafts that equal the slot's scripted tokens.  Returns their number.

        A slot with a mask accepts no draft, because its tokens then depend on the mask."""
        sampler, position = self._decoding[piece.slot]
        count = 0
        if not Constraints.wanted(sampler.sampling):
            said = (self.token(sampler, position + at) for at in range(piece.drafts))
            right = [draft == token for draft, token in zip(piece.token_ids[-piece.drafts :], said, strict=True)]
            count = (*right, False).index(False)
        self._decoding[piece.slot] = sampler, position + count
        return count

    def _begin(self, slot: int, sampler: Sampler, position: int) -> None:
        self._decoding[slot] = sampler, position
        if Constraints.wanted(sampler.sampling):
            vocab_size = self.info.vocab_size
            self._constraints = self._constraints or Constraints(_mask(self.max_seqs, vocab_size), vocab_size)
            self._constraints.assign(slot, sampler)
        elif self._constraints is not None:
            self._constraints.free(slot)

    @staticmethod
    def _constrain(
        constraints: Constraints, slots: list[int], tokens: list[int]
    ) -> tuple[dict[int, str], list[Follower]]:
        """Replace tokens that a mask forbids.  Returns (slots for which no token is allowed -> reason, the followers of
        the step)."""
        impossible = {}
        constraints.fill()
        followers = constraints.followers(slots)
        for at, slot in {follower.at: follower.slot for follower in followers}.items():
            tokens[at] = constraints.choose(slot, tokens[at])
            if tokens[at] < 0:
                tokens[at], impossible[slot] = 0, IMPOSSIBLE
        return impossible | advance(followers, tokens), followers

    def token(self, sampler: Sampler, position: int) -> int:
        """Return the token of a slot at an output position."""
        return scripted_token(sampler.sampling.seed, sampler.sibling, position, self.info.vocab_size)

    @property
    def grammar_store(self) -> GrammarStore | None:
        grammars = self._constraints.grammars if self._constraints is not None else None
        return None if grammars is None else grammars.store

    @property
    def adapter_store(self) -> None:
        return None

    def catch_up(self) -> bool:
        return False

    def close(self) -> None:
        self._plans.clear()
        if (store := self.grammar_store) is not None:
            store.close()
