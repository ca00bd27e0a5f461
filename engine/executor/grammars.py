"""Grammars: which tokens each slot with a grammar may sample next.

    store: compile once, on a thread ─ assign: copy ─> matcher ── consume the tokens emitted before ──┐
    a step:  fill: each matcher writes its slot's mask, while the model runs ─ sampling ─┴─ take: the sampled token

On a GPU the model of step N+1 is launched before step N is collected.  Then matchers consume the tokens of step N on
another thread, which writes the masks for the sampling of step N+1.  A slot may have a new owner by then, so a step
keeps its followers from the time of its launch (followers.py).

A matcher consumes tokens that the grammar forces as soon as they are found.  The mask then allows only the next of
them, whether the scheduler jumps over them or has them sampled one by one (engine/core/forced.py):

    tokens     { "name" : | " J o             the matcher has consumed `{ "name` when `{` is sampled:
                 ~~~~~~ forced                [`"name`] is forced, and nothing after it: a space may follow, or `":`

    mask [max_seqs, ceil(V / 32)] i32     row = slot; bit t % 32 of word t / 32: token t is allowed
         tokens past the tokenizer's vocabulary, which a model may pad, are never allowed

Masks and forced tokens are functions of the grammar and of the tokens emitted so far.  So a sequence that resumes,
after a preemption or on another engine, gets the same masks, and with them the same tokens.

llguidance implements the matchers: https://github.com/guidance-ai/llguidance.  They never raise.  A matcher that fails
stays failed and allows only EOS tokens.  Here such a slot allows nothing, so that its request ends with an error.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt

from quire.engine.common import host_resources
from quire.engine.core.plan import Sampler
from quire.engine.executor.followers import Follower, following
from quire.engine.executor.grammar_store import GrammarError, GrammarStore
from quire.engine.executor.grammar_tokenizer import grammar_tokenizer
from quire.engine.wire.messages import Sampling

log = logging.getLogger(__name__)

# Limits of one matcher, which keep the slowest mask at about 10 ms and its memory at some tens of MB.  A request whose
# grammar needs more ends with an error.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
# Sets of tokens that a mask allows or forbids at once: white space, and text inside a JSON string of up to n
# characters. If a string may hold n more characters, the sets up to n are allowed at once, and only tokens of the next
# set are tried one by one.  llguidance's default sets have up to 10, up to 30 and any number of characters.  Computing
# a mask for schemas whose strings have at most 40 characters takes 1.2 ms at p99 with these sets and 1.7 ms with the
# default sets; masks of other schemas take no longer (151,643 tokens).
STRING_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{STRING_TEXT}{{1,{most}}}" for most in (1, 2, 3, 4, 6, 8, 10, 14, 20, 30)),
    f"{STRING_TEXT}+",
]
# Minimum number of matchers for which a separate thread fills the masks while the model computes.  A mask takes about
# 30 us, consuming a token 3 us.
THREADED = 4
FAILED = "the grammar cannot be followed any further"
FAULTY = "this model cannot follow the grammar"
NO_ANSWER = "it allows no answer"
REASON_CHARS = 256  # maximum length of llguidance's reason
KEPT_BYTES = 256 << 20  # compiled grammars that no request holds: the default of `grammar_memory_mib`
# llguidance is asked for forced tokens again after each of them, so that they are the tokens that its masks would
# allow. Each answer has all remaining forced tokens and takes 2 us per token.  MAX_FOUND bounds the sum of tokens of a
# slot's answers in a step: up to 63 forced tokens (63 + 62 + ... + 1) are found in one step, more in several steps.
MAX_FOUND = 2048


def may_jump(sampling: Sampling) -> bool:
    """Return whether forced tokens of a request may be computed without being sampled.

    Log-probabilities need the logits of each position.  Banned sequences, allowed tokens and biases of -inf may forbid
    a token that the grammar forces: sampling finds this and ends the request."""
    return (
        sampling.logprobs < 0
        and not sampling.bad_words
        and not sampling.allowed_token_ids
        and all(added > -math.inf for _, added in sampling.logit_bias)
    )


@dataclass(slots=True)
class _Row:
    """The grammar state of one sequence in its slot."""

    grammar: str
    matcher: llguidance.LLMatcher | None  # None: see `error`, or a jump has handed it to another row
    held: npt.NDArray[np.int32] | None  # mask of the stop tokens that may not end the answer yet
    early: int = 0  # number of next output tokens for which `held` is forbidden, if the grammar allows another token
    error: str = ""
    jumps: bool = False  # forced tokens may be computed without being sampled
    end: int = -1  # the only EOS token; -1: there are several
    taken: list[int] = field(default_factory=list)  # the tokens that the matcher has consumed
    behind: bool = False  # the last of `taken` is not consumed yet: `catch_up` consumes it
    ahead: int = 0  # forced tokens at the end of `taken` that are not sampled yet
    reported: bool = True  # the forced tokens ahead have been reported

    def take(self, token: int) -> None:
        """Record the sampled token; the matcher consumes it before its next use."""
        if self.matcher is None or token < 0:
            return
        self.early -= 1
        if self.ahead:
            self.ahead -= 1
        else:
            self.catch_up()
            self.taken.append(token)
            self.behind = True

    def catch_up(self) -> None:
        """Let the matcher consume the last recorded token, if it has not yet."""
        if self.behind and self.matcher is not None:
            self.matcher.consume_token(self.taken[-1])
        self.behind = False

    def find_forced(self) -> list[int]:
        """Return the tokens that the last token forces, without tokens that were returned before."""
        self.look_ahead()
        if self.matcher is None or self.reported:
            return []
        self.reported = True
        return self.taken[len(self.taken) - self.ahead :]

    def look_ahead(self) -> None:
        """Consume the tokens that are forced next, unless forced tokens are already ahead."""
        matcher = self.matcher
        if matcher is None or not self.jumps or self.ahead:
            return
        self.catch_up()
        found = 0
        while found < MAX_FOUND and (forced := self._forced_next(matcher)):
            matcher.consume_token(forced[0])
            self.taken.append(forced[0])
            self.ahead += 1
            found += len(forced)
        self.reported = not self.ahead

    def _forced_next(self, matcher: llguidance.LLMatcher) -> list[int]:
        """Return the tokens that the grammar forces now; empty if it allows several tokens, or none."""
        if self.taken[-1:] == [self.end]:
            return []
        if forced := matcher.compute_ff_tokens():
            return forced
        return [self.end] if self.end >= 0 and matcher.is_stopped() and matcher.is_accepting() else []


def follows(row: _Row, grammar: str, emitted: list[int]) -> bool:
    """Return whether the matcher of a row fits a sequence that has emitted these tokens.

    It fits if it has consumed these tokens, and after them only tokens that they force."""
    known = len(row.taken) - row.ahead
    return (
        row.matcher is not None
        and not row.error
        and row.grammar == grammar
        and known <= len(emitted) <= len(row.taken)
        and row.taken[: len(emitted)] == emitted
    )


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return why a matcher failed, in one line: the first line names the cause, further lines may quote the answer."""
    lines = matcher.get_error().strip().splitlines()
    return lines[0][:REASON_CHARS] if lines else ""


class Grammars:
    """The matchers of all slots, and the mask that sampling reads.  Not thread-safe: one executor owns it."""

    def __init__(
        self,
        directory: Path,
        *,
        vocab_size: int,
        eos_ids: list[int],
        mask: npt.NDArray[np.int32],
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Read the tokenizer of a checkpoint on a separate thread: 0.6 s for 49,000 tokens.

        The first grammar waits for the tokenizer; `supported` says whether the checkpoint has one.  `mask` [max_seqs,
        ceil(V / 32)] is written by `fill`.  `kept_bytes`: limit of compiled grammars that no request holds."""
        self.mask = mask
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self._rows: dict[int, _Row] = {}
        self.store = GrammarStore(self._compile, max_bytes=kept_bytes)
        self._filler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None
        self._executor = llguidance.LLExecutor(max(1, host_resources.usable_cpus() - 1))
        self._vocabulary: Future[llguidance.LLTokenizer] = Future()
        threading.Thread(target=self._read, args=(directory,), name="grammar tokenizer", daemon=True).start()

    @staticmethod
    def supported(directory: Path, eos_ids: list[int]) -> bool:
        """Return whether answers of this model can follow grammars: it needs a tokenizer.json and an EOS token."""
        return (directory / "tokenizer.json").is_file() and bool(eos_ids)

    def _read(self, directory: Path) -> None:
        try:
            tokenizer = grammar_tokenizer(directory / "tokenizer.json", self._vocab_size, self._eos_ids, SLICES)
        except Exception as error:  # any error that a tokenizer of an unknown kind causes
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            log.warning("requests with a grammar will end with an error: tokenizer.json: %s", reason)
            self._vocabulary.set_exception(GrammarError("this model's tokenizer cannot be used for grammars"))
        else:
            self._vocabulary.set_result(tokenizer)

    @property
    def active(self) -> bool:
        """Whether any slot has a grammar.  Constant time."""
        return bool(self._rows)

    def reset(self) -> None:
        """Free every slot."""
        self._finish_filling()
        for slot in list(self._rows):
            self.free(slot)

    def assign(self, slot: int, sampler: Sampler) -> None:
        """Give a slot the grammar of the sequence that starts or jumps in it, advanced by the tokens emitted before.

        The request holds the grammar in `store`, where it is compiled: this never waits.
        A sequence that jumps keeps its matcher.  Steps in flight keep the slot's old row, now without a matcher."""
        sampling, emitted = sampler.sampling, sampler.history[sampler.prompt_len :]
        held = self._bits(sampler.stop_ids) if sampler.stop_ids else None
        before = self._rows.get(slot)
        early, end = sampling.min_tokens - len(emitted), self._eos_ids[0] if len(set(self._eos_ids)) == 1 else -1
        row = _Row(sampling.grammar, None, held, early, jumps=may_jump(sampling), end=end)
        self._rows[slot] = row
        if before is not None and follows(before, row.grammar, emitted):
            before.catch_up()
            row.matcher, before.matcher, row.taken = before.matcher, None, before.taken
            row.ahead = len(row.taken) - len(emitted)
            row.look_ahead()
            return
        if before is not None:
            self._let_go(before)
        try:
            row.matcher = self._matcher(sampling.grammar)
        except GrammarError as error:
            row.error = str(error)
        else:
            row.matcher.consume_tokens(emitted)
            row.taken = emitted
            row.look_ahead()

    def free(self, slot: int) -> None:
        """Clear the grammar of a slot; harmless when it has none."""
        if (row := self._rows.pop(slot, None)) is not None:
            self._let_go(row)

    def _let_go(self, row: _Row) -> None:
        if row.matcher is not None:
            self.store.used(row.grammar, len(row.taken))

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the start of a grammar.  Raises GrammarError if it is faulty, or if no request
        holds it."""
        matcher = self.store.copy(grammar)
        assert isinstance(matcher, llguidance.LLMatcher)
        return matcher

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        """Compile a grammar; wait for the tokenizer.  Raises GrammarError."""
        matcher = llguidance.LLMatcher(self._vocabulary.result(), grammar, log_level=0, limits=LIMITS)
        # The first mask fills caches, which every copy then shares.
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"{FAULTY}: {_reason(matcher) or 'it is beyond the limits'}")
        if first.count(0) == len(first):
            raise GrammarError(f"{FAULTY}: {NO_ANSWER}")
        return matcher

    def _bits(self, tokens: list[int]) -> npt.NDArray[np.int32]:
        flags = np.zeros(32 * self.mask.shape[1], bool)
        flags[tokens] = True
        return np.packbits(flags, bitorder="little").view(np.int32)

    @staticmethod
    def _check(row: _Row) -> None:
        if row.matcher is not None and row.matcher.is_error():
            row.error = f"{FAILED}: {reason}" if (reason := _reason(row.matcher)) else FAILED

    @property
    def slots(self) -> Iterable[int]:
        """The slots that have a grammar."""
        return self._rows.keys()

    def followers(self, slots: Iterable[int]) -> list[Follower]:
        """Return the followers among a step's slots that have a grammar now."""
        return following(self._rows, slots)

    def begin_fill(self) -> None:
        """Start writing the masks on another thread, if there are enough of them.  Call only `fill` next."""
        if len(self._rows) >= THREADED:
            self._filling = self._filler.submit(self.compute)

    def compute(self) -> None:
        """Let the matchers consume the tokens sampled last, and write the masks of rows without a forced token ahead.

        llguidance releases the interpreter lock meanwhile."""
        sound = [(row.matcher, slot) for slot, row in self._rows.items() if row.matcher is not None and not row.ahead]
        behind = [row for row in self._rows.values() if row.behind and row.matcher is not None]
        if len(behind) >= THREADED:
            self._executor.consume_token_par([(row.matcher, row.taken[-1]) for row in behind if row.matcher])
            for row in behind:
                row.behind = False
        for row in behind:
            row.catch_up()
        if sound:
            count, words = self.mask.shape
            self._executor.unsafe_compute_mask_ptr(sound, self.mask.ctypes.data, words * 4, count)

    def fill_behind(self, slot: int, drafts: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """Write the mask after each draft of a slot, as `fill` would if the drafts were sampled.  Call `fill` before.

        The masks after a forbidden draft or an EOS token stay 0, because no sample of their rows is used."""
        row = self._rows.get(slot)
        if row is None or row.matcher is None or row.error:
            return
        matcher, ahead, taken, mask = row.matcher, list(row.taken[len(row.taken) - row.ahead :]), 0, self.mask[slot]
        for draft, behind in zip(drafts, masks, strict=True):
            if draft in self._eos_ids or not mask.view(np.uint32)[draft // 32] >> draft % 32 & 1:
                break
            if ahead:  # the matcher has consumed it already
                ahead.pop(0)
            else:
                matcher.consume_token(draft)
                taken += 1
            if ahead:
                behind.view(np.uint32)[ahead[0] // 32] = 1 << ahead[0] % 32
            else:
                matcher.unsafe_compute_mask_ptr(behind.ctypes.data, behind.nbytes)
            if matcher.is_error():
                behind[:] = 0
                break
            mask = behind
        if taken:
            matcher.rollback(taken)

    def _finish_filling(self) -> bool:
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()
        return filling is not None

    def fill(self) -> None:
        """Write the mask of every slot that has a grammar, or wait for the thread that writes them."""
        if not self._finish_filling():
            self.compute()
        for slot, row in self._rows.items():
            if row.ahead:
                next_one = row.taken[-row.ahead]
                self.mask[slot] = 0
                self.mask[slot].view(np.uint32)[next_one // 32] = 1 << next_one % 32
                continue
            self._check(row)
            if row.error:
                self.mask[slot] = 0
            elif row.held is not None and row.early > 0:
                others = self.mask[slot] & ~row.held
                if others.any():  # else the grammar allows only the end, and min_tokens cannot forbid it
                    self.mask[slot] = others
