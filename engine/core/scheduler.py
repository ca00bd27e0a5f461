"""The scheduler: which tokens of which sequences are computed in the next step.

START HERE: `plan()` is the whole policy.  Everything obeys one rule, *computed catches up with known*: a prompt, a
chunk of it, a cache hit, a decode and a resume after preemption differ only in how far the two are apart.

Cost: a row that simply decodes is not looked at again until it needs a block, or reaches its length.  Both are known
in advance, so they stand in a calendar (`_due`); a steady step costs O(rows that changed) to plan.  Committing costs
O(tokens), since every token has to be delivered.

Pure: no clock, no randomness, no I/O.  Time comes in as an argument, tokens come in as results, and what has to be
told to clients comes out as `Outputs`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import takewhile

from engine.core.accounting import Auditor
from engine.core.blocks import AccountingError, BlockPool, HostPool
from engine.core.isolation import FAILED_TWICE, Isolation
from engine.core.limits import Event, Limits, Milestone, Outputs, Totals
from engine.core.plan import Fork, Sampler, Slice, Start, StepPlan, StepResult
from engine.core.policy.admission_forecast import AdmissionForecast
from engine.core.policy.fairness import Shares, Tenants
from engine.core.policy.growth import GrowthPolicy
from engine.core.policy.step_cost import FIRST, StepCostModel
from engine.core.sequence import Sequence, State
from engine.core.swapping import Swapping
from engine.wire.messages import Delta, Finish, FinishReason, Generate, TokenLogprob

WATERMARK = 0.05  # of the pool stays free after a start in mode "watermark"
FAVOUR_ROWS = 64  # where nobody could be favoured it is asked again after 1 + running / FAVOUR_ROWS steps
UNPRESSED = 4  # with 1/UNPRESSED of the pool available everybody may grow
PRESSURE_ROWS = 64  # who may grow in a full pool is sorted out again each 1 + running / PRESSURE_ROWS steps


class Scheduler:
    """Owns every sequence from accept() to its Finish.  Not thread-safe: the engine loop owns it."""

    def __init__(
        self, pool: BlockPool, limits: Limits, host: HostPool | None = None, costs: StepCostModel | None = None
    ) -> None:
        """`host`: where preempted sequences may leave what they computed; none: everything is computed again.

        Raises ValueError: static allocation shares nothing, so its pool must not cache."""
        if limits.allocation == "static" and pool.caching:
            raise ValueError("static allocation needs a pool without a prefix cache")
        self.pool = pool
        self.limits = limits
        self.costs = costs or StepCostModel()
        self.outlook = AdmissionForecast(pool, limits)
        self.swapping = Swapping(pool, host or HostPool(), self.costs, limits.preempt, limits.block_bytes)
        self.step = 0  # of the last plan issued
        self.committed = 0  # the last step whose result is in
        self.auditor = Auditor(self)
        self.isolation = Isolation()
        self.totals = Totals()
        self.waiting: deque[Sequence] = deque()  # preempted ones before all that never ran, then by rank
        self.reserved_blocks = 0  # that static allocation holds, or would hold, for what is seated
        self.waiting_tokens = 0  # of the sequences in `waiting`, as they were when they joined it
        self._prefilling: list[Sequence] = []  # by rank
        self._paused: list[Sequence] = []  # by rank
        self._reassigned: list[Sequence] = []  # begun by an earlier engine, and not caught up with when last looked at
        self._decoding = 0  # rows that compute one token each step without being named
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # step -> decoding rows to look at
        self._requests: dict[str, list[Sequence]] = {}  # id -> its unfinished continuations
        self._deadlines: list[tuple[int, str]] = []  # heap of (deadline_ms, request id); ended requests drop out lazily
        self._arrivals = 0
        self._seats: list[Sequence | None] = [None] * limits.max_seqs  # row -> whose tokens it reports
        self._free_rows = list(range(limits.max_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []  # to be told in the next plan
        self._cooling: deque[tuple[int, int]] = deque()  # (last step that may report it, row): then it can be reused
        self._growth: list[tuple[Sequence, int, int]] = []  # this plan's edits: (sequence, table index, block)
        self._copies: list[tuple[Sequence, int, int]] = []  # this plan's copies: (sequence, from, to)
        self._sources: Counter[int] = Counter()  # references that this plan's copies hold on their sources
        # Plans without a result: rows, prompt tokens, with swaps, blocks sealed before they are written.
        self._issued: deque[tuple[int, int, bool, list[int]]] = deque()
        self._sealed: list[int] = []  # the last of these for the plan that is being made
        self._deltas: defaultdict[str, list[Delta]] = defaultdict(list)
        self._finished: list[str] = []
        self._events: list[Event] = []
        self._pressure, self._pressure_step = GrowthPolicy(()), 0  # on the pool, and the step to look at it again
        self._tenants = Tenants()
        self._favour_step = 0  # the step to look again for somebody to favour
        self._advanced: set[int] = set()  # ids of the sequences that this plan names: they can't leave in the same one
        self._row_awaited = False  # somebody has yielded a row that has to cool: until then nobody else starts

    # ------------------------------------------------------------------------------------------------ coming and going

    def accept(self, request: Generate, outputs: list[list[int] | None] | None = None) -> None:
        """Queue a request.  One that can never run is finished with an error naming limit and value.

        `outputs`: what an earlier engine has said of it, one entry for each continuation.  They stand here as if they
        had been preempted: what they know is computed again, and what they say next follows it.  None: that one is
        over."""
        if request.id in self._requests:  # delivered twice: it is running already
            return
        limits, prompt = self.limits, request.token_ids
        room = min(limits.max_model_len, self.pool.total * self.pool.block_size)
        stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= limits.eos_ids
        limit = min(len(prompt) + request.max_new_tokens, room)
        order = self._arrivals = self._arrivals + 1
        group = [
            Sequence(
                request,
                i,
                (order, i),
                stops,
                limit,
                prompt + output,
                seated_before=bool(output),
                lost=len(prompt + output) - 1 if output else 0,
                reassigned=bool(output),
            )
            for i, output in enumerate(outputs or [[]] * request.n)
            if output is not None
        ]
        if not group:
            self._finished.append(request.id)
            return
        self._requests[request.id] = list(group)
        self._tenants.came(request.tenant)
        tokens = [prompt, *(output for output in outputs or () if output)]
        if len(prompt) >= room:
            refusal = f"the prompt has {len(prompt)} tokens; this engine holds {room}, output included"
        elif not prompt or max(map(max, tokens)) >= limits.vocab_size or min(map(min, tokens)) < 0:
            refusal = f"the prompt must hold token ids from 0 to {limits.vocab_size - 1}, at least one"
        elif request.n > limits.max_seqs:
            refusal = f"n is {request.n}; this engine runs at most {limits.max_seqs} sequences"
        else:
            heapq.heappush(self._deadlines, (request.deadline_ms, request.id))
            self._reassigned += [seq for seq in group if seq.reassigned]
            self._enqueue_group(group)
            return
        self._end_request(request.id, "error", refusal)

    def _enqueue_group(self, group: list[Sequence]) -> None:
        """Those that have said nothing share one prefill, led by the first (with static allocation each has its own);
        the others have forked already."""
        fresh = [seq for seq in group if seq.known == seq.prompt_len and self.limits.allocation == "paged"]
        if fresh:
            leader, *leader.siblings = fresh
            self._enqueue(leader)
        for seq in group:
            if seq.known >= seq.limit:  # it comes from an engine that could hold more
                self._say(seq, Finish("length"))
                self._end(seq, "length")
            elif seq not in fresh:
                self._enqueue(seq)

    def abort(self, request_id: str, index: int = -1) -> None:
        """End one continuation of a request now, or every one (-1); unknown and finished ones are ignored."""
        if index < 0:
            self._end_request(request_id, "cancelled")
            return
        group = self._requests.get(request_id, ())
        for seq in [seq for seq in group if seq.index == index]:
            for leader in group:
                if seq in leader.siblings:
                    leader.siblings.remove(seq)
            self._say(seq, Finish("cancelled"))
            self._end(seq, "cancelled")
            if seq.siblings:  # it led, and none has forked yet: the next one leads
                heir, *heir.siblings = seq.siblings
                heir.seated_before, heir.cached_tokens = seq.seated_before, seq.cached_tokens
                self._enqueue(heir)

    def drop(self, request_id: str) -> None:
        """Forget a request without a word: another engine answers it now.  Unknown ids are ignored."""
        group = list(self._requests.get(request_id, ()))
        for seq in group:
            self._end(seq, None)
        if group:
            self._finished.remove(request_id)

    def step_failed(self) -> tuple[int, str | None]:
        """The executor lost every step in flight and freed all rows.  Put back what was seated, as after a preemption:
        tokens stay, blocks go.  Returns how many sequences were put back, and the id of the request that ended because
        it failed twice at the same position (None: no request did).

        Cached blocks that finished steps wrote stay: a step writes only to blocks that no other sequence can find."""
        lost = [seq for seq in self.live() if self._in_flight(seq)]
        back = [seq for seq in self.live() if seq.state not in (State.WAITING, State.FINISHED)]
        for seq in back:
            self._note("requeued", seq)
            self._unseat(seq)
            seq.lost = min(seq.computed, seq.known - 1)
            self._release(seq)
            self._enqueue(seq)
        for seq in self.waiting:  # a copy to the host may have been in a step that never ran
            if seq.host:
                seq.lost = seq.computed
                self._release(seq)
        for *_, sealed in self._issued:
            self.pool.forget(sealed)
        self.committed = self.step
        self._issued.clear()
        self._freed_rows = []
        self._cooling.clear()
        self._seats = [None] * self.limits.max_seqs
        self._free_rows = list(range(self.limits.max_seqs - 1, -1, -1))
        if (guilty := self.isolation.failed(lost)) is not None:
            self._end_request(guilty, "error", FAILED_TWICE)
        return len(back), guilty

    def _in_flight(self, seq: Sequence) -> bool:
        """A step without a result computes it, or samples its next token."""
        return (seq.row >= 0 and seq.state is not State.WAITING) or seq.sampled_in > self.committed

    # ------------------------------------------------------------------------------------------------------- the step

    def plan(self, now_ms: int) -> StepPlan | None:
        """The next step, or None when there is nothing to compute.  May be called before earlier results are in."""
        self._expire(now_ms)
        self._advanced = set()
        step = self.step + 1
        starts: list[Start] = []
        slices: list[Slice] = []
        forks: list[Fork] = []

        for seq in sorted(self._due.pop(step, ()), key=lambda s: s.rank):  # the last in rank yields
            if seq.due == step:
                self._attend(seq, step)
        budget, decoding, started = self._prompt_budget(), self._decoding, list(self._prefilling)
        self._reclaim_rows()
        while budget > 0 and (favoured := self._make_way()) is not None:
            self._dequeue(favoured)
            starts.append(self._seat(favoured))
            budget -= self._advance(favoured, budget, step, slices, forks)
        for seq in started:
            if seq.state is State.PREFILLING:  # another one may just have taken its blocks
                budget -= self._advance(seq, budget, step, slices, forks)
        self.outlook.begin()
        for seq in self._resumable():
            if budget <= 0 or self._row_awaited:
                break
            starts.append(self._resume(seq))
            budget -= self._advance(seq, budget, step, slices, forks)
        while budget > 0 and (head := self._next_to_start()) is not None:
            seq = head
            self._dequeue(seq)
            starts.append(self._seat(seq))
            budget -= self._advance(seq, budget, step, slices, forks)

        self.outlook.watch(self._holders(), step, self._late)

        # Who was given a block and preempted afterwards, in this same plan, no longer has a row to edit.
        copies = [(source, target) for seq, source, target in self._copies if seq.row >= 0]
        edits = [(seq.row, index, block) for seq, index, block in self._growth if seq.row >= 0]
        poison, self.pool.discarded = self.pool.discarded, []  # not the sources: they are read by this plan
        self.pool.release(list(self._sources.elements()))
        self._growth, self._copies, self._sources = [], [], Counter()
        if not slices and not self._decoding and not self.swapping.planned:
            self.pool.discarded += poison
            return None
        self.step = step
        prompt_tokens = sum(len(piece.token_ids) for piece in slices)
        self._issued.append((decoding, prompt_tokens, self.swapping.planned, self._sealed))
        self._sealed = []
        swaps = self.swapping.take()
        plan = StepPlan(step, self._freed_rows, copies, starts, edits, slices, forks, poison, *swaps)
        self._freed_rows = []
        return plan

    def commit(self, result: StepResult) -> None:
        """Take a step's tokens.  Results come in the order of their plans."""
        if result.step != self.committed + 1:
            raise AccountingError(f"result of step {result.step} after step {self.committed}")
        self.committed = result.step
        self._measure(result)
        seats, deltas, block_size, generated = self._seats, self._deltas, self.pool.block_size, 0
        for row, logprobs in result.prompt_logprobs.items():
            if (seq := seats[row]) is not None:
                seq.prompt_logprobs.extend(logprobs)
        for row, message in result.failed.items():
            if (seq := seats[row]) is not None:
                self.pool.forget(seq.table)  # what it computed is not to be trusted, and nobody shall find it
                self._end_request(seq.request.id, "error", message)
        for row, message in result.impossible.items():  # the cache keeps what it computed: others share its prefix
            if (seq := seats[row]) is not None:
                self._end_request(seq.request.id, "error", message)
        for row, token in zip(result.rows, result.tokens, strict=True):
            seq = seats[row]
            if seq is None or seq.state is State.FINISHED:  # it ended while this step ran
                continue
            tokens = seq.tokens
            tokens.append(token)
            known = len(tokens)
            if token in seq.stops:
                finish = Finish("stop", token)
            elif known == seq.limit:
                finish = Finish("length")
            else:
                finish = None
            request = seq.request
            first = known - 1 - len(request.token_ids)
            if first == 0:
                self._note("first", seq)
            if first == 0 or row in result.logprobs:
                delta = self._full_delta(seq, first, finish, result.logprobs.get(row))
            else:
                delta = Delta(request.id, first, [token], finish, seq.index)
            deltas[request.gateway].append(delta)
            generated += 1
            if (known - 1) % block_size == 0 and seq.table:
                self._seal(seq, known - 1)
            if finish is not None:
                self.outlook.learn(seq, ended=finish.reason == "stop")
                self._end(seq, finish.reason)
        self.totals.generated_tokens += generated
        self._reclaim_rows()

    def outputs(self) -> Outputs:
        """Everything said since the last call: deltas by gateway, the requests that are over, and the milestones."""
        out = Outputs(dict(self._deltas), self._finished, self._events)
        self._deltas, self._finished, self._events = defaultdict(list), [], []
        return out

    # --------------------------------------------------------------------------------------------------- what is held

    @property
    def running(self) -> int:
        """Sequences with a seat."""
        return self._decoding + len(self._prefilling)

    @property
    def paused(self) -> int:
        """Sequences that hold blocks and have no seat until others have ended."""
        return len(self._paused)

    @property
    def behind(self) -> int:
        """Sequences that an earlier engine began and that are not computed again yet."""
        if self._reassigned:
            behind = (State.WAITING, State.PREFILLING)
            self._reassigned = [seq for seq in self._reassigned if seq.state in behind]
        return len(self._reassigned)

    @property
    def idle(self) -> bool:
        """Nothing seated, nothing waiting, nothing on the way."""
        return not self._requests and self.committed == self.step

    def room(self) -> tuple[int, int]:
        """(prompt tokens, requests) the engine could start soon: what to claim from the shared queue."""
        rows = len(self._free_rows) - len(self.waiting)
        if not self._requests:
            return self.pool.total * self.pool.block_size, rows
        if self.swapping.sequences or self.isolation.active:  # until they are back, or cleared, nothing new starts
            return 0, 0
        if self.limits.allocation == "static":
            return 0 if self.waiting else self.pool.available * self.pool.block_size, max(0, rows)
        if self._paused:
            return 0, max(0, rows)
        # The head was refused, and who comes now stands behind it.
        if self.waiting and self.outlook.ask_again > self.step:
            return 0, max(0, rows)
        waiting_blocks = self.waiting_tokens // self.pool.block_size + len(self.waiting)
        spare = self._spare()
        if self.limits.admission in ("forecast", "reserve"):
            spare = min(spare, self.pool.total - self.predicted_peak())
        return max(0, spare - waiting_blocks) * self.pool.block_size, max(0, rows)

    def yielding(self) -> tuple[list[str], int]:
        """(tenants that hold their share or more, prompt tokens of others that could start all the same, because the
        newest of theirs would yield).  A few steps old when many run."""
        if not self._requests or self.limits.allocation == "static" or self.isolation.active:
            return [], 0
        self._tenants.look(self._holders(), self.running, self.step)
        room = self._tenants.room(self.waiting, self.pool.block_size)  # shared blocks count as often as they are held
        return self._tenants.crowd, min(room, self.pool.total * self.pool.block_size)

    def predicted_peak(self) -> int:
        """Blocks that what runs now will stay within, but for unusual luck (in mode "reserve": at worst), if nothing
        joins.  A few steps old when many run."""
        if not self._requests:
            return 0
        if self.limits.allocation == "static":
            return self.pool.total - self.pool.available
        return self.outlook.peak(self._holders(), self.step, self._late)

    def used_slots(self) -> tuple[int, int]:
        """(slots holding tokens, slots allocated) over all tables, shared blocks counted once."""
        filled: dict[int, int] = {}
        size = self.pool.block_size
        for seq in self.live():
            computed = seq.computed_before(self.step + 1)
            for i, block in enumerate(seq.table):
                filled[block] = max(filled.get(block, 0), min(size, computed - i * size))
        return sum(filled.values()), len(filled) * size

    def wasted_slots(self) -> int:
        """Slots allocated that hold no token, all of them in last blocks; one that a fork shares counts once.
        O(sequences)."""
        size, step, open_ends = self.pool.block_size, self.step + 1, {}
        for seq in self.live():
            if seq.table:
                open_ends[seq.table[-1]] = len(seq.table) * size - seq.computed_before(step)
        return sum(open_ends.values())

    # ------------------------------------------------------------------------------------------------ inside one plan

    def _next_to_start(self) -> Sequence | None:
        if not self.waiting or self._paused or self._row_awaited:
            return None
        head = self.isolation.first(self.waiting)
        return head if head is not None and self._may_start(head) else None

    def _may_start(self, seq: Sequence) -> bool:
        """Whether the head of the queue fits: rows for all its continuations, blocks for all it knows and one more."""
        if seq.sampled_in > self.committed:  # preempted while its last token is still on the way
            return False
        if len(self._free_rows) < 1 + len(seq.siblings):
            return False
        if self.limits.allocation == "static":
            return self.pool.has_run(self.outlook.greatest(seq))
        need = self._blocks_to_start(seq)
        if self.running == 0:  # alone it may pass the threshold, and siblings may take turns
            return need <= self.pool.available
        if need + len(seq.siblings) > self._spare():
            return False
        if self.limits.admission not in ("forecast", "reserve"):
            return True
        return self.outlook.fits(seq, self._lookup(seq), self._holders(), self.step + 1, self._late)

    def _make_way(self) -> Sequence | None:
        """Who starts before all others, because its tenant holds less than its share; others have yielded as far as it
        needs that.  None: nobody, or nobody yet.  See engine/core/policy/fairness.py."""
        self._row_awaited = False
        if not self._tenants.contend or not self.waiting or self.limits.allocation == "static":
            return None
        if self.isolation.active:
            return None
        if self.step < self._favour_step:
            return None
        self._tenants.look(self._holders(), self.running, self.step)
        asked = set(self._tenants.crowd)
        for seq in list(self.waiting):
            # Who was swapped out, perhaps in this very plan, comes back when it is first in the queue.
            if seq.request.tenant not in asked and seq.sampled_in <= self.committed and not seq.host:
                if self._favours(seq):
                    self._row_awaited = len(self._free_rows) <= len(seq.siblings)
                    return None if self._row_awaited else seq
                self._favour_step = self.step + self.running // FAVOUR_ROWS
            asked.add(seq.request.tenant)
        return None

    def _favours(self, seq: Sequence) -> bool:
        """Whether others have yielded what `seq` needs to start: as few as will do."""
        need = self._blocks_to_start(seq) + len(seq.siblings)
        rows = 1 + len(seq.siblings) - len(self._free_rows) - len(self._cooling)
        candidates = Shares(self._holders()).yielding_to(seq, need)
        yielding = list(takewhile(lambda s: id(s) not in self._advanced, candidates))

        def enough(count: int) -> bool:
            return count >= rows and self._fits_without(seq, need, yielding[:count])

        if not enough(len(yielding)):
            return False
        for victim in yielding[: bisect_left(range(len(yielding)), True, key=enough)]:
            victim.yielded = True
            self.totals.yields += 1
            self._preempt(victim, swap=False)  # the newest have little to compute again
        return True

    def _fits_without(self, seq: Sequence, need: int, gone: list[Sequence]) -> bool:
        """Whether `seq` could start with `need` blocks if those were gone."""
        promised = sum(self._yet_to_take(s) for s in gone if s.state is State.PREFILLING)
        hits = self._lookup(seq)  # of these none becomes available, whoever has them now
        if need > self._spare() + promised + self.pool.held_only_by([s.table for s in gone], hits):
            return False
        if self.limits.admission not in ("forecast", "reserve"):
            return True
        names = set(map(id, gone))
        left = [s for s in self._holders() if id(s) not in names]
        return self.outlook.would_fit(seq, hits, left, self.step + 1, self._late)

    def _prompt_budget(self) -> int:
        """Prompt tokens that the step may have beside the rows that decode (A29)."""
        budget = self.limits.step_tokens - self._decoding
        if self.limits.step_target_s:
            within = self.costs.tokens_within(self._decoding, self.limits.step_target_s)
            if within is None and not self.committed:
                within = FIRST
            budget = budget if within is None else min(budget, within)
        if not self._decoding or not self.limits.itl_stretch:
            return budget
        if not (exposed := self._exposed()):
            return budget
        pending = len(self._prefilling) + len(self.waiting)
        fair = self.costs.prompt_tokens(self._decoding, pending, self.limits.itl_stretch, exposed)
        return budget if fair is None else min(budget, fair)

    def _exposed(self) -> int:
        """Rows that a prompt must not delay for long: all that decode.

        While reassigned sequences still have tokens to recompute, the ones that resumed first do not count.  All of
        them paused together, and the last one resumes sooner where no recompute is held back for the first ones."""
        if not self.behind:
            return self._decoding
        return sum(seq is not None and seq.state is State.DECODING and not seq.reassigned for seq in self._seats)

    def _measure(self, result: StepResult) -> None:
        rows, prompt_tokens, swaps, _ = self._issued.popleft()
        if result.step_s and not swaps:
            self.costs.step(result.step_s, rows, prompt_tokens)
        if result.swap_s:
            self.costs.swapped(result.swapped_bytes, result.swap_s)

    @property
    def _late(self) -> int:
        """Steps that a result takes to come back."""
        return self.step - self.committed

    def _holders(self) -> Iterator[Sequence]:
        """Those who hold blocks, or are about to: not siblings that have yet to fork, for whom their leader speaks."""
        for row, seq in enumerate(self._seats):
            if seq is None or seq.state is State.WAITING:
                continue
            if seq.row == row or seq.state is State.ENDING:  # others have left a row that still reports for them
                yield seq
        yield from self._paused

    def _blocks_to_start(self, seq: Sequence) -> int:
        """What starting would take out of `available`: new blocks, and cached ones that are idle now."""
        hits = self._lookup(seq)
        blocks = -(-(seq.known + 1) // self.pool.block_size)
        return blocks - len(hits) + self.pool.idle_among(hits)

    def _spare(self) -> int:
        """Blocks that new work may take now: less what the mode keeps free and started prompts have yet to take."""
        if self.limits.admission == "threshold":
            kept = self.pool.total - int(self.limits.admit_threshold * self.pool.total)
        elif self.limits.admission == "watermark":
            kept = -int(-WATERMARK * self.pool.total // 1)
        else:
            kept = 0
        return self.pool.available - kept - self._promised()

    def _promised(self) -> int:
        """Blocks that started prompts have yet to take."""
        return sum(map(self._yet_to_take, self._prefilling))

    def _yet_to_take(self, seq: Sequence) -> int:
        """Blocks that its prompt has yet to take."""
        return -(-(seq.known + 1) // self.pool.block_size) - len(seq.table) + len(seq.siblings)

    def _lookup(self, seq: Sequence) -> list[int]:
        """Cached blocks of its longest prefix, short of its last token: computing that one gives the first logits."""
        if not self.pool.caching or seq.request.sampling.prompt_logprobs >= 0:
            return []
        size, fingerprint = self.pool.block_size, self.limits.fingerprint
        return self.pool.lookup(seq.digest(i, fingerprint, size) for i in range((seq.known - 1) // size))

    def _seat(self, seq: Sequence) -> Start:
        if self.limits.allocation == "static":
            hits, seq.table = [], self.pool.allocate_run(self.outlook.greatest(seq))
        else:
            hits = self._lookup(seq)
            self.pool.acquire(hits)
            seq.table = list(hits)
        seq.state = State.PREFILLING
        if seq.host:
            self.totals.swapped_in_blocks += self.swapping.back(seq)
            for full in range(len(hits) + 1, seq.computed // self.pool.block_size + 1):
                self._seal(seq, full * self.pool.block_size, ahead=True)
        else:
            seq.computed = len(hits) * self.pool.block_size
            seq.prompt_logprobs = []
            self.totals.recomputed_tokens += max(0, seq.lost - seq.computed)
            seq.lost = 0
        if seq.seated_before:
            self._note("resumed", seq, seq.known - seq.computed)
        else:
            seq.seated_before = True
            seq.cached_tokens = seq.computed
            self.totals.prompt_tokens += seq.prompt_len
            self.totals.cached_prompt_tokens += seq.computed
            for member in (seq, *seq.siblings):
                self.outlook.foretell(member)
            self._note("started", seq, seq.computed)
        for member in (seq, *seq.siblings):
            self._take_seat(member)
        insort(self._prefilling, seq, key=lambda s: s.rank)
        return Start(seq.row, list(seq.table))

    def _advance(self, seq: Sequence, budget: int, step: int, slices: list[Slice], forks: list[Fork]) -> int:
        """Let computed catch up with known, as far as the budget goes.  Returns the tokens taken from it."""
        start, known = seq.computed, seq.known
        count = min(known - start, budget, self.limits.chunk_tokens)
        if count <= 0:
            return 0
        end, size = start + count, self.pool.block_size
        if not self._grow(seq, -(-end // size) - len(seq.table)):
            return 0
        sampling = seq.request.sampling
        targets = seq.tokens[start + 1 : end + 1] if sampling.prompt_logprobs >= 0 and known == seq.prompt_len else []
        sampler = self._sampler(seq) if end == known else None
        slices.append(
            Slice(
                seq.row,
                start,
                seq.tokens[start:end],
                sampler,
                targets,
                max(0, sampling.prompt_logprobs) if targets else 0,
            )
        )
        self._advanced.update(map(id, (seq, *seq.siblings)))
        seq.computed = end
        for full in range(start // size + 1, end // size + 1):
            self._seal(seq, full * size, ahead=True)
        if sampler is not None:
            self._prefilling.remove(seq)
            for sibling in seq.siblings:
                self.pool.acquire(seq.table)
                sibling.table, sibling.computed = list(seq.table), end
                sibling.digests = list(seq.digests)
                sibling.prompt_logprobs = seq.prompt_logprobs  # one list, which commit() fills
                sibling.seated_before = True
                forks.append(Fork(sibling.row, seq.row, list(seq.table), self._sampler(sibling)))
                self._decode_from(sibling, step + 1, forked=True)
            self._decode_from(seq, step + 1, forked=bool(seq.siblings))
            seq.siblings = []
        return count

    def _decode_from(self, seq: Sequence, step: int, *, forked: bool) -> None:
        """From `step` on the row computes one token each step by itself; enter the step it needs us in the calendar."""
        seq.state = State.DECODING
        seq.since = step
        self._decoding += 1
        self._schedule(seq, step, now=forked)

    def _schedule(self, seq: Sequence, step: int, *, now: bool = False) -> None:
        """The next step to look at a decoding row: when its table is full, or its last token has been sampled."""
        full = step + len(seq.table) * self.pool.block_size - seq.computed
        last = step + seq.limit - seq.computed - 1
        seq.due = step if now else min(full, last)
        self._due[seq.due].append(seq)

    def _attend(self, seq: Sequence, step: int) -> None:
        """A decoding row's date has come: stop it at its length, else make the next slot writable."""
        seq.computed += step - seq.since
        seq.since = step
        if seq.computed + 1 == seq.limit:
            self._unseat(seq)
            seq.state = State.ENDING
            return
        index = seq.computed // self.pool.block_size
        if index == len(seq.table):
            if not self._may_grow(seq):
                self._pause(seq)
                return
            if not self._grow(seq, 1):
                return
        elif self._is_shared(seq.table[index]) and not self._copy_on_write(seq, index):
            return
        self._schedule(seq, step)

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Append blocks to a table, preempting the newest if need be.  False: the sequence itself had to yield."""
        if count <= 0:
            return True
        if not self._make_room(seq, count):
            return False
        for block in self.pool.allocate(count):
            self._growth.append((seq, len(seq.table), block))
            seq.table.append(block)
        return True

    def _may_grow(self, seq: Sequence) -> bool:
        """Whether a decoding row takes its next block now, or pauses until others have ended.  One whose end is known
        was admitted with every block that it will take."""
        if self.limits.admission != "forecast" or not seq.stops:
            return True
        left = self.pool.available - self._promised() - 1
        if left >= self.pool.total // UNPRESSED:
            return True
        if self._pressure_step <= self.step:
            rows = [s for s in self._holders() if s.stops]
            self._pressure = GrowthPolicy((len(s.table), self.outlook.greatest(s) - len(s.table)) for s in rows)
            self._pressure_step = self.step + 1 + len(rows) // PRESSURE_ROWS
        return left >= 0 and self._pressure.may_take(len(seq.table), left)

    def _pause(self, seq: Sequence) -> None:
        """Leave the row, keep the blocks: all of its tokens but the one sampled last are computed."""
        self.totals.pauses += 1
        self._note("paused", seq)
        self._unseat(seq)
        seq.state = State.PAUSED
        self.reserved_blocks += self.outlook.greatest(seq)
        insort(self._paused, seq, key=lambda s: s.rank)

    def _resumable(self) -> Iterator[Sequence]:
        """Paused ones that may go on in this step, oldest first.  Where everybody waits for everybody, the newest give
        up their blocks."""
        if self._paused and not self.running and self.committed == self.step:
            while not self.pool.available:
                self._preempt(self._paused[-1])
            self._pressure_step = 0  # who has ended since must not stand in the way of the largest that is left
        for seq in list(self._paused):
            if self._free_rows and seq.sampled_in <= self.committed and self._may_grow(seq):
                yield seq

    def _resume(self, seq: Sequence) -> Start:
        """Seat it again, with the table it has."""
        self._note("continued", seq)
        self._unseat(seq)
        seq.state = State.PREFILLING
        self._take_seat(seq)
        insort(self._prefilling, seq, key=lambda s: s.rank)
        return Start(seq.row, list(seq.table))

    def _take_seat(self, seq: Sequence) -> None:
        seq.row = self._free_rows.pop()
        self._seats[seq.row] = seq
        self.reserved_blocks += self.outlook.greatest(seq)

    def _copy_on_write(self, seq: Sequence, index: int) -> bool:
        """Give the sequence its own copy of a shared, partly filled block before it writes there.

        The table's reference to the source passes to `_sources` until the plan is out: a block freed and taken again
        within one plan could otherwise be source and target of the same batch of copies."""
        if not self._make_room(seq, 1):
            return False
        block = seq.table[index]
        if self._is_shared(block):  # making room may have ended the sharing
            (seq.table[index],) = self.pool.allocate(1)
            self._sources[block] += 1
            self._copies.append((seq, block, seq.table[index]))
            self._growth.append((seq, index, seq.table[index]))
            self.totals.copied_blocks += 1
        return True

    def _is_shared(self, block: int) -> bool:
        return self.pool.refs(block) - self._sources[block] > 1

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Preempt until `count` blocks are available.  False: the one to yield was `seq` itself.

        Who yields: where tenants contend, somebody of those that hold their share or more; of the least urgent class,
        whoever came last.  It has had the least done for it, so least is lost, and the others keep the order in which
        they were promised service: with the same rank deciding who is planned first and who returns first, a victim is
        never in the way of one that yielded before it, and cannot drive out whoever drove it out."""
        while self.pool.available < count:
            states = (State.PREFILLING, State.DECODING, State.PAUSED)
            holders = [s for s in self.live() if s.state in states and id(s) not in self._advanced]
            if self._tenants.contend:
                self._tenants.look(self._holders(), self.running, self.step)
                crowd = self._tenants.crowd
                holders = [s for s in holders if s.request.tenant in crowd] or holders
            victim = max(holders, key=lambda s: s.rank)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, *, swap: bool = True) -> None:
        """All or nothing: take every block and the seat.  What it knows stays; what it has computed is copied to the
        host's memory first (swap) or computed again later (recompute)."""
        self.totals.preemptions += 1
        self._note("preempted", seq)
        self._unseat(seq)
        if swap and self.swapping.pays(seq):
            # A private copy that this plan was to make for it will not be made: what it stands for goes instead.
            planned = {target: source for owner, source, target in self._copies if owner is seq}
            self.totals.swap_preemptions += 1
            self.totals.swapped_out_blocks += self.swapping.away(seq, planned)
        else:
            seq.lost = seq.computed
            self._release(seq)
        self._enqueue(seq)

    def _sampler(self, seq: Sequence) -> Sampler:
        sampling = seq.request.sampling
        reads_history = (
            sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        )
        return Sampler(
            sampling,
            seq.prompt_len,
            sorted(seq.stops) if seq.known - seq.prompt_len < sampling.min_tokens else [],
            list(seq.tokens) if reads_history else [],
            seq.index,
        )

    def _full_delta(self, seq: Sequence, first: int, finish: Finish | None, logprob: TokenLogprob | None) -> Delta:
        """A delta with everything a client may have asked for beyond the token."""
        return Delta(
            seq.request.id,
            first,
            [seq.tokens[-1]],
            finish,
            seq.index,
            None if logprob is None else [logprob],
            seq.cached_tokens if first == 0 else 0,
            seq.prompt_logprobs or None if first == 0 else None,
        )

    def _seal(self, seq: Sequence, end: int, *, ahead: bool = False) -> None:
        """Its tokens up to `end`, a multiple of the block size, are known and computed: let others find that block.
        `ahead`: the plan that is being made computes them."""
        if self.pool.caching:
            block = end // self.pool.block_size - 1
            self.pool.seal(seq.table[block], seq.digest(block, self.limits.fingerprint, self.pool.block_size))
            if ahead:
                self._sealed.append(seq.table[block])

    # ---------------------------------------------------------------------------------------------------- the endings

    def _note(self, kind: Milestone, seq: Sequence, tokens: int = 0, reason: FinishReason | None = None) -> None:
        step = self.step + (kind not in ("first", "ended"))
        if kind == "started":
            digests = seq.digests[: tokens // self.pool.block_size]
        else:
            digests = list(seq.digests) if kind == "ended" else []
        self._events.append(Event(kind, seq.request, seq.index, tokens, reason, step, digests))

    def _expire(self, now_ms: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            self._end_request(heapq.heappop(self._deadlines)[1], "deadline")

    def _end_request(self, request_id: str, reason: FinishReason, message: str = "") -> None:
        """End every continuation that is still open, with a Finish each."""
        for seq in list(self._requests.get(request_id, ())):
            self._say(seq, Finish(reason, message=message))
            self._end(seq, reason)

    def _say(self, seq: Sequence, finish: Finish) -> None:
        """Tell whoever asked that nothing more will come, though it might have gone on."""
        self.outlook.learn(seq, ended=False)
        delta = Delta(seq.request.id, seq.known - seq.prompt_len, [], finish, seq.index)
        self._deltas[seq.request.gateway].append(delta)

    def _end(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Its Finish is said (or is another engine's to say, without a reason): give back the seat and every block."""
        self._note("ended", seq, seq.known - seq.prompt_len, reason)
        if seq.queued_tokens:
            self._dequeue(seq)
        self._unseat(seq)
        self.totals.released_blocks += len(seq.table)
        self._release(seq)
        seq.state = State.FINISHED
        group = self._requests[seq.request.id]
        group.remove(seq)
        if not group:
            del self._requests[seq.request.id]
            self._tenants.left(seq.request.tenant)
            self._finished.append(seq.request.id)

    def _enqueue(self, seq: Sequence) -> None:
        """Join the queue where its rank says; what was preempted stands before all that never ran, whatever their rank:
        while somebody waits to go on, nothing new takes the room (A26)."""

        def place(s: Sequence) -> tuple[bool, tuple[int, tuple[int, int]]]:
            return not s.seated_before, s.rank

        seq.state = State.WAITING
        seq.queued_tokens = seq.known
        self.waiting_tokens += seq.known
        if not self.waiting or place(self.waiting[-1]) < place(seq):
            self.waiting.append(seq)
        else:
            self.waiting.insert(next(i for i, s in enumerate(self.waiting) if place(s) > place(seq)), seq)

    def _dequeue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.waiting_tokens -= seq.queued_tokens
        seq.queued_tokens = 0

    def _unseat(self, seq: Sequence) -> None:
        """Leave the row, if there is one.  The row still reports for `seq` until its last step has been committed."""
        if seq.state is State.PAUSED:
            self._paused.remove(seq)
            self.reserved_blocks -= self.outlook.greatest(seq)
        if seq.row < 0:
            return
        self.reserved_blocks -= self.outlook.greatest(seq)
        if seq.state is State.WAITING:  # a sibling that has not forked yet: the executor never heard of its row
            self._seats[seq.row] = None
            self._free_rows.append(seq.row)
        else:
            self._freed_rows.append(seq.row)
            self._cooling.append((self.step, seq.row))
        if seq.state is State.PREFILLING:
            self._prefilling.remove(seq)
            for sibling in seq.siblings:
                self._unseat(sibling)
        elif seq.state is State.DECODING:
            seq.computed = seq.computed_before(self.step + 1)
            seq.sampled_in = self.step
            seq.due = 0
            self._decoding -= 1
        seq.row = -1

    def _reclaim_rows(self) -> None:
        """Rows that no step in flight can report any more are free; the plan that reuses one frees it first."""
        while self._cooling and self._cooling[0][0] <= self.committed:
            _, row = self._cooling.popleft()
            self._seats[row] = None
            self._free_rows.append(row)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.table)
        self.swapping.forget(seq)
        seq.table, seq.computed = [], 0

    def live(self) -> Iterator[Sequence]:
        """Every sequence between accept() and its Finish."""
        for group in self._requests.values():
            yield from group
