"""StepPlan -> StepTensors, through a mirror of every row's block table and position.

The mirror is what lets a plan list only changes.  For each row (seat) it keeps, on the device:

    tables   [max_seqs, max_blocks] i32   block ids; entries past a row's length are stale and never read
    position [max_seqs]             i64   position of the token that a decoding row computes next
    token    [max_seqs]             i64   that token: the one sampled last, fed back without passing through Python

A steady decode step is a handful of vectorised operations over the decoding rows, whatever their number:
gather token and position, look the slot up in the table.  Python touches only rows that the plan names.

Tokens of a step lie one sequence after another:   | one for each decoding row | slice | slice | ...
Step tensors are views into buffers allocated once, so that their addresses never change (CUDA graphs need that).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.plan import Slice, StepPlan
from engine.executor.kv_cache import Caches


@dataclass(frozen=True, slots=True)
class Targets:
    """Prompt logprobs asked of one slice: of ids[i], read from logits row `at` + i."""

    row: int
    at: int
    ids: list[int]
    top: int


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, ready to compute.  T tokens of S sequences; L logits rows are wanted; N rows sample."""

    input_ids: Tensor  # [1, T] i64
    position_ids: Tensor  # [1, T] i64
    slots: Tensor  # [T] i64: where each token's key and value go
    tables: Tensor  # [max_seqs, max_blocks] i32: the whole mirror, indexed by `rows`
    rows: Tensor  # [S] i32: the table of each sequence
    q_start: Tensor  # [S + 1] i32: its first token; the last entry is T
    lens: Tensor  # [S] i32: its length with this step's tokens
    caches: Caches
    logits_at: Tensor | None  # [L] i64: tokens whose logits are wanted; None: all T
    sample_rows: tuple[int, ...]  # N rows; the same object as long as the set does not change
    sample_seats: Tensor  # [N] i64: the same rows, on the device
    sample_at: Tensor | None  # [N] i64: the logits row each samples from; None: row i from logits i
    known: Tensor  # [N] i64: tokens before the one sampled now
    targets: list[Targets]


class Batch:
    """The mirror.  One plan at a time: `begin`, compute, `finish`."""

    def __init__(self, *, max_seqs: int, max_model_len: int, step_tokens: int, block_size: int, caches: Caches) -> None:
        device = caches[0][0].device
        self._caches = caches
        self._shift = block_size.bit_length() - 1  # block sizes are powers of two
        self._mask = block_size - 1
        self._device = device
        most = max(step_tokens, max_seqs)
        self.tables = torch.zeros(max_seqs, -(-max_model_len // block_size), dtype=torch.int32, device=device)
        self.position = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.token = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._seat_of = torch.zeros(most, dtype=torch.int64, device=device)  # the row each token belongs to
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._q_start = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._one_each = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)  # q_start of pure decode
        self._reset_rows()

    def _reset_rows(self) -> None:
        self._decoding: dict[int, None] = {}  # an ordered set
        self._changed = True
        self._order: tuple[int, ...] = ()
        self._seats = torch.zeros(0, dtype=torch.int64, device=self._device)

    def reset(self) -> None:
        """Free every row."""
        self._reset_rows()

    def begin(self, plan: StepPlan) -> StepTensors | None:
        """Apply the plan to the mirror and lay out its tokens.  None: nothing to compute.

        Raises ValueError, with the mirror in an undefined state, when the plan does not fit the buffers.
        """
        for row in plan.freed_rows:
            self._changed |= row in self._decoding
            self._decoding.pop(row, None)
        for start in plan.starts:
            self._set_table(start.row, start.table)
        if plan.edits:
            edits = torch.tensor(plan.edits, dtype=torch.int64, device=self._device)
            self.tables[edits[:, 0], edits[:, 1]] = edits[:, 2].int()
        if self._changed:
            self._order = tuple(self._decoding)
            self._seats = torch.tensor(self._order, dtype=torch.int64, device=self._device)
            self._rows[: len(self._order)] = self._seats
            self._changed = False
        if not plan.slices:
            return self._decode_only() if self._order else None
        step = self._mixed(plan)
        for fork in plan.forks:
            self._set_table(fork.row, fork.table)
        joined = [piece.row for piece in plan.slices if piece.sampler] + [fork.row for fork in plan.forks]
        if joined:
            self._decoding.update(dict.fromkeys(joined))
            self._changed = True
        return step

    def finish(self, step: StepTensors, tokens: Tensor) -> None:
        """Remember the tokens [N] i64 that this step sampled: they are the next step's input."""
        self.token[step.sample_seats] = tokens
        self.position[step.sample_seats] = step.known

    def _set_table(self, row: int, table: list[int]) -> None:
        if len(table) > self.tables.shape[1]:
            raise ValueError(f"row {row}: a table of {len(table)} blocks, the mirror holds {self.tables.shape[1]}")
        self.tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32, device=self._device)

    def _fill_decoding(self) -> int:
        n = len(self._order)
        torch.index_select(self.token, 0, self._seats, out=self._ids[:n])
        torch.index_select(self.position, 0, self._seats, out=self._positions[:n])
        return n

    def _find_slots(self, seats: Tensor, tokens: int) -> Tensor:
        position = self._positions[:tokens]
        block = self.tables[seats, position >> self._shift]
        slots = self._slots[:tokens]
        torch.add(block.long() << self._shift, position & self._mask, out=slots)
        return slots

    def _decode_only(self) -> StepTensors:
        n = self._fill_decoding()
        known = self._positions[:n] + 1
        self._lens[:n] = known
        return StepTensors(
            input_ids=self._ids[None, :n],
            position_ids=self._positions[None, :n],
            slots=self._find_slots(self._seats, n),
            tables=self.tables,
            rows=self._rows[:n],
            q_start=self._one_each[: n + 1],
            lens=self._lens[:n],
            caches=self._caches,
            logits_at=None,
            sample_rows=self._order,
            sample_seats=self._seats,
            sample_at=None,
            known=known,
            targets=[],
        )

    def _mixed(self, plan: StepPlan) -> StepTensors:
        slices = plan.slices
        decoding = self._fill_decoding()
        total = decoding + sum(len(piece.token_ids) for piece in slices)
        sequences = decoding + len(slices)
        if total > len(self._ids) or sequences > len(self._rows):
            raise ValueError(
                f"a step of {total} tokens in {sequences} rows, the buffers hold {len(self._ids)} in {len(self._rows)}"
            )
        fresh = [token for piece in slices for token in piece.token_ids]
        self._ids[decoding:total] = torch.tensor(fresh, dtype=torch.int64)
        self._seat_of[:decoding] = self._seats
        ends = self._lay_out(slices, decoding)
        self._rows[decoding:sequences] = torch.tensor([piece.row for piece in slices], dtype=torch.int32)
        self._q_start[: decoding + 1] = self._one_each[: decoding + 1]
        self._q_start[decoding + 1 : sequences + 1] = torch.tensor(ends, dtype=torch.int32)
        last = self._q_start[1 : sequences + 1].long() - 1  # the last token of each sequence
        self._lens[:sequences] = self._positions[last] + 1

        # Logits are wanted of every decoding row, of every token with a target, and of the last token of a slice that
        # samples.  A fork reads the logits of its parent.
        wanted = list(range(decoding))
        rows, sample_at, parents = list(self._order), list(range(decoding)), {}
        targets = []
        for piece, end in zip(slices, ends, strict=True):
            first = end - len(piece.token_ids)
            if piece.targets:
                targets.append(Targets(piece.row, len(wanted), piece.targets, piece.top))
                wanted += range(first, first + len(piece.targets))
            if piece.sampler:
                if not wanted or wanted[-1] != end - 1:
                    wanted.append(end - 1)
                parents[piece.row] = len(wanted) - 1
                rows.append(piece.row)
                sample_at.append(len(wanted) - 1)
        for fork in plan.forks:
            rows.append(fork.row)
            sample_at.append(parents[fork.parent])
        logits_at = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        # Mostly every wanted row samples, once: then there is nothing to pick, and the logits need no copy.
        pick = sample_at != list(range(len(wanted)))
        at = torch.tensor(sample_at, dtype=torch.int64, device=self._device) if pick else None
        return StepTensors(
            input_ids=self._ids[None, :total],
            position_ids=self._positions[None, :total],
            slots=self._find_slots(self._seat_of[:total], total),
            tables=self.tables,
            rows=self._rows[:sequences],
            q_start=self._q_start[: sequences + 1],
            lens=self._lens[:sequences],
            caches=self._caches,
            logits_at=logits_at,
            sample_rows=tuple(rows),
            sample_seats=torch.tensor(rows, dtype=torch.int64, device=self._device),
            sample_at=at,
            known=self._positions[logits_at if at is None else logits_at[at]] + 1,
            targets=targets,
        )

    def _lay_out(self, slices: list[Slice], offset: int) -> list[int]:
        """Write position and row of every token of the slices, from `offset` on.  Returns where each slice ends."""
        ends = []
        for piece in slices:
            end = offset + len(piece.token_ids)
            torch.arange(piece.start, piece.start + len(piece.token_ids), out=self._positions[offset:end])
            self._seat_of[offset:end] = piece.row
            ends.append(offset := end)
        return ends
