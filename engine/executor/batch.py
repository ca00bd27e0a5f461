"""StepPlan -> StepTensors, through a device copy of every slot's block table and position.

The device copy is what lets a plan list only changes.  For each slot it keeps, on the device:

    tables   [max_seqs, max_blocks] i32   block ids; entries past a sequence's length are stale, never read (host too)
    position [max_seqs]             i64   position of the token that a decoding slot computes next
    token    [max_seqs]             i64   the token at `position`: sampled last, fed back without passing through Python
    slots    [max_seqs]             i32   slots that decode, in the order of the step; then, if every slice of the step
                                          is one token with candidates, the slots of the slices; then -1

A decode step without changes takes two operators over all slots: `decode_inputs` gathers tokens, positions and
`kv_indices`, `decode_outputs` stores the sampled tokens.  Python touches only slots that the plan names.

Tokens of a step are ordered by sequence:   | one for each decoding slot | slice | slice | ...
The tensors of a step without slices are views into buffers allocated once: a CUDA graph reads the same addresses again.
The tensors of a step with slices are built on the host, in one page of memory; the device fills in the entries of
decoding slots.

Calls per plan, one plan at a time: `stage` (host, and one copy to the device); `apply` (device only); `decode_step` and
`gather`, or `mixed_step`; after the computation, `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.plan import Slice, StepPlan
from quire.engine.executor import ops
from quire.engine.executor.drafts import DraftRows
from quire.engine.executor.kv_cache import Caches
from quire.engine.executor.lora.bank import AdapterBank
from quire.engine.executor.shapes import Shape, Shapes
from quire.engine.executor.staged_plan import DecodeBuffers, Mixed, Page, SingleRows, Staged, blank
from quire.engine.executor.staging import Array, Staging
from quire.engine.executor.step_tensors import AttentionPlans, StepTensors, Targets
from quire.engine.executor.window_tables import GroupPlaces, WindowTables


class Batch:
    """The device copy of the block tables, and the staging of plans that update it."""

    def __init__(
        self,
        *,
        max_seqs: int,
        max_model_len: int,
        step_tokens: int,
        block_size: int,
        caches: Caches,
        staging: Staging,
        adapters: AdapterBank | None = None,
        windows: Sequence[range] = (),
    ) -> None:
        """`adapters`: None if no sequence has an adapter.  `windows`: range of block ids of each window group."""
        device = caches[0][0].device
        self._caches, self._staging, self._adapters = caches, staging, adapters
        self._block_size = block_size
        self._max_tokens = max(step_tokens, max_seqs)
        self._plans = AttentionPlans(max_seqs=max_seqs, max_tokens=self._max_tokens, device=device)
        self.tables = torch.zeros(max_seqs, -(-max_model_len // block_size), dtype=torch.int32, device=device)
        self.position = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.token = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.slots = torch.full((max_seqs,), -1, dtype=torch.int32, device=device)
        self._buffers = DecodeBuffers.allocate(max_seqs, device)
        self._host_slots = np.full(max_seqs, -1, dtype=np.int32)
        self._host_tables = np.zeros(self.tables.shape, dtype=np.int32)  # a copy of `tables`, for kv_indices of slices
        self.shapes = Shapes()  # a step with prompt chunks is padded to the smallest of these that fits
        self._pages: dict[Shape, Page] = {}  # pages of padded steps, at fixed addresses
        columns = self.tables.shape[1]
        self._windows = WindowTables(windows, max_seqs=max_seqs, columns=columns, block_size=block_size, device=device)
        self.reset()

    def reset(self) -> None:
        """Free every slot."""
        self._order: list[int] = []  # slots that decode, as in `slots`
        self._place: dict[int, int] = {}  # slot -> index in _order
        self.decoding_slots: tuple[int, ...] = ()  # _order as a tuple, shared by all steps until it changes
        self._host_slots[:] = -1
        self._changed = True
        # Rows of the staged step that have adapters.
        self._adapter_rows: ops.AdapterRows | ops.DeviceAdapters | None = None
        if self._adapters is not None:
            self._adapters.reset()

    def vacate(self) -> None:
        """Empty every slot on the device until the next plan is staged.  Call it only while no slot is in use.

        A step that runs meanwhile reads and writes no slot.
        """
        self.slots.fill_(-1)
        self._buffers.sample_slots.fill_(-1)
        self._changed = True
        self._adapter_rows = None

    # ---------------------------------------------------------------------------------------------------- on the host

    def stage(self, plan: StepPlan) -> Staged:
        """Update the host's state by the plan, and start the copy of its values to the device.

        The page of a step with slices is staged first: pages of one shape always lie at the same addresses.
        Raises ValueError, with the device copy in an undefined state, when the plan does not fit the buffers.
        """
        for slot in plan.freed_slots:
            self._leave(slot)
        if self._adapters is not None:
            self._adapters.take(plan)
        edits, window_edits = self._windows.split(self._edits(plan))
        if edits is not None:
            self._host_tables[edits[:, 0], edits[:, 1]] = edits[:, 2]
        for piece in plan.slices:  # a decoding slot that has a slice computes only the slice in this step
            self._leave(piece.slot)
        decoding = len(self._order)
        for piece in plan.slices:
            if piece.sampler or piece.drafts:
                self._join(piece.slot)
        for fork in plan.forks:
            self._join(fork.slot)
        staging = self._staging
        staging.begin_step()
        single = self._single_rows(plan, decoding)
        mixed = self._mix(plan, decoding) if plan.slices and single is None else None
        slots = None
        if self._changed:
            self.decoding_slots = tuple(self._order)
            slots = staging.stage_array(self._host_slots)
        if self._adapters is not None:
            padded = (mixed.shape.decodes, mixed.shape.decodes + mixed.shape.tokens) if mixed is not None else None
            self._adapter_rows = self._adapters.rows(plan, self._order[:decoding], self.decoding_slots, staging, padded)
        self._changed = single is not None  # `apply` adds the slices' slots to the device's `slots` for this step only
        staged = Staged(
            slots,
            staging.stage_array(edits) if edits is not None else None,
            mixed,
            single,
            self._stage_blocks(plan.poison),
            self._stage_blocks(plan.copies),
            [staging.stage_array(own) for own in window_edits],
        )
        staging.send()
        return staged

    def _stage_blocks(self, blocks: Sequence[int | tuple[int, int]]) -> list[Tensor | None]:
        """Stage blocks, or pairs of blocks, per KV group."""
        parts = self._windows.split_blocks(np.array(blocks, dtype=np.int64) if blocks else None)
        return [None if part is None else self._staging.stage_array(part) for part in parts]

    def _single_rows(self, plan: StepPlan, decoding: int) -> SingleRows | None:
        """Return the rows of a step in which every slice is one token with candidates; None for any other step."""
        slices = plan.slices
        if not slices or not all(piece.candidates and len(piece.token_ids) == 1 for piece in slices):
            return None
        if decoding + len(slices) > len(self.slots):
            raise ValueError(f"{decoding} decoding slots and {len(slices)} slices, the buffers hold {len(self.slots)}")
        columns = [(piece.slot, piece.token_ids[0], piece.start) for piece in slices]
        inputs = self._staging.stage_array(np.ascontiguousarray(np.array(columns, dtype=np.int64).T))
        return SingleRows(decoding, inputs, tuple((piece.slot, piece.candidates) for piece in slices))

    def _join(self, slot: int) -> None:
        self._host_slots[len(self._order)] = slot
        self._place[slot] = len(self._order)
        self._order.append(slot)
        self._changed = True

    def _leave(self, slot: int) -> None:
        """Remove a slot from the order of decoding slots; the last slot takes its place."""
        if (at := self._place.pop(slot, None)) is None:
            return
        last = self._order.pop()
        if last != slot:
            self._order[at] = last
            self._host_slots[at] = last
            self._place[last] = at
        self._host_slots[len(self._order)] = -1
        self._changed = True

    def _edits(self, plan: StepPlan) -> Array | None:
        """Return every table entry that the plan sets: [n, 3] i32 (slot, index, block)."""
        tables = [(start.slot, start.table) for start in plan.starts if start.table]
        tables += [(fork.slot, fork.table) for fork in plan.forks]
        if not tables and not plan.edits:
            return None
        sizes = [len(table) for _, table in tables]
        for (slot, _), size in zip(tables, sizes, strict=True):
            if size > self.tables.shape[1]:
                raise ValueError(f"slot {slot}: a table of {size} blocks, the device copy holds {self.tables.shape[1]}")
        total = sum(sizes)
        edits = np.empty((total + len(plan.edits), 3), dtype=np.int32)
        if tables:
            edits[:total, 0] = np.repeat([slot for slot, _ in tables], sizes)
            edits[:total, 1] = ramps(np.zeros(len(sizes), dtype=np.int64), sizes)
            edits[:total, 2] = np.fromiter(chain.from_iterable(table for _, table in tables), np.int32, total)
        if plan.edits:
            edits[total:] = plan.edits
        return edits

    def _mix(self, plan: StepPlan, decoding: int) -> Mixed:
        slices, staging = plan.slices, self._staging
        sizes = [len(piece.token_ids) for piece in slices]
        candidates = tuple((piece.slot, piece.candidates) for piece in slices if piece.candidates)
        samples = len(self._order) + len(candidates)
        rows = samples + sum(piece.drafts for piece in slices)
        exact = Shape(decoding, sum(sizes), len(slices), samples, rows + sum(len(piece.targets) for piece in slices))
        self._check_size(decoding + exact.tokens, decoding + len(slices))
        shape = self.shapes.padded(exact) if exact.logits == rows else exact
        memory, page = blank(shape, len(self._windows))
        page.slots[:decoding] = self._host_slots[:decoding]
        starts = np.array([piece.start for piece in slices], dtype=np.int64)
        slots = np.array([piece.slot for piece in slices], dtype=np.int64)
        positions = ramps(starts, sizes)
        of_tokens = np.repeat(slots, sizes)
        blocks = self._host_tables[of_tokens, positions // self._block_size].astype(np.int64)
        fresh = slice(shape.decodes, shape.decodes + exact.tokens)
        page.ids[fresh] = np.fromiter(chain.from_iterable(piece.token_ids for piece in slices), np.int64, exact.tokens)
        page.positions[fresh] = positions
        page.kv_indices[fresh] = blocks * self._block_size + positions % self._block_size
        self._windows.fill_slices(of_tokens, positions, page.windows[:, fresh])
        ends = shape.decodes + np.cumsum(sizes)
        page.q_start[shape.decodes + 1 :] = ends[-1]
        if self.shapes.is_split(shape):
            sequences = ends - 1  # each token is a sequence: that of each slice's last token
            page.rows[fresh], page.lens[fresh] = of_tokens, positions + 1
            page.q_start[fresh] = np.arange(fresh.start, fresh.stop)
        else:
            sequences = np.arange(shape.decodes, shape.decodes + len(slices))
            page.rows[sequences], page.lens[sequences] = slots, starts + sizes
            page.q_start[shape.decodes + 1 :][: len(slices)] = ends

        # Order of the logits rows: decoding slots; slices that reach their last known token; forks, which read their
        # parent's logits again; slices with candidates, whose slots do not sample; tokens after drafts; tokens with a
        # target. The first three are in the order of `slots`.
        number = {piece.slot: i for i, piece in enumerate(slices) if piece.sampler or piece.drafts}
        asking = [*number.values(), *(number[fork.parent] for fork in plan.forks)]
        read = [*asking, *(i for i, piece in enumerate(slices) if piece.candidates)]
        page.logits_at[:decoding] = page.sample_seqs[:decoding] = np.arange(decoding)
        drafts = np.array([piece.drafts for piece in slices], dtype=np.int64)
        page.logits_at[decoding:samples] = (ends - 1 - drafts)[read]
        page.logits_at[samples:rows] = ramps(ends - drafts, drafts.tolist())
        page.sample_seqs[decoding:samples] = sequences[read]
        at = rows
        for piece, end, size in zip(slices, ends.tolist(), sizes, strict=True):
            page.logits_at[at : at + len(piece.targets)] = np.arange(end - size, end - size + len(piece.targets))
            at += len(piece.targets)

        there = self._stage_page(memory, shape)
        targets = self._targets(slices, there.logits_at[rows:])
        joined = None
        if asking:
            last = (starts + sizes - 1 - drafts)[asking]
            joined = staging.stage_array(np.array(self._order[decoding:], dtype=np.int64)), staging.stage_array(last)
        draft_rows = DraftRows.stage(slices, self._order, samples, staging) if rows > samples else None
        keeps = self._keeps(slices, ends.tolist())
        return Mixed(shape, there, joined, targets, candidates, draft_rows, keeps)

    def _check_size(self, tokens: int, sequences: int) -> None:
        if tokens > self._max_tokens or sequences > len(self.slots):
            limits = f"the buffers hold {self._max_tokens} in {len(self.slots)}"
            raise ValueError(f"a step of {tokens} tokens in {sequences} sequences, {limits}")

    def _stage_page(self, memory: Array, shape: Shape) -> Page:
        """Stage a page; it must be the first array of its step."""
        there = self._staging.stage_array(memory)
        page = self._pages.get(shape)
        if page is None or page.ids.data_ptr() != there.data_ptr():
            page = Page.view(there, shape, torch.int32, len(self._windows))
            if shape in self.shapes:
                self._pages[shape] = page
        return page

    def _targets(self, slices: list[Slice], logits_at: Tensor) -> list[Targets]:
        """Return the prompt logprobs that the slices request.  `logits_at`: indices of the tokens whose logits they
        need, slice after slice."""
        found, at = [], 0
        for piece in slices:
            if piece.targets:
                ids = self._staging.stage_array(np.array(piece.targets, dtype=np.int64))
                found.append(Targets(piece.slot, logits_at[at : at + len(ids)], ids, piece.top))
                at += len(ids)
        return found

    def _keeps(self, slices: Sequence[Slice], ends: list[int]) -> Tensor | None:
        """Stage the copies of recurrent state that slices request.  ends: per slice, the index in the step after its
        last token."""
        keeps = [
            (end - len(piece.token_ids) - piece.start + position, len(self.slots) + checkpoint)
            for piece, end in zip(slices, ends, strict=True)
            for position, checkpoint in piece.keep
        ]
        return self._staging.stage_array(np.array(keeps, dtype=np.int32)) if keeps else None

    # -------------------------------------------------------------------------------------------------- on the device

    def apply(self, staged: Staged) -> None:
        """Bring the device copy of the block tables, and of the rows with adapters, up to date."""
        if self._adapters is not None:
            self._adapters.apply()
        if staged.slots is not None:
            self.slots.copy_(staged.slots)
            self._buffers.sample_slots.copy_(staged.slots)
        if staged.edits is not None:
            ops.apply_edits(staged.edits, self.tables)
        self._windows.apply(staged.window_edits)
        if (single := staged.single) is not None:
            slots, tokens, positions = single.inputs
            self.slots[single.at : single.at + len(slots)].copy_(slots)
            self.token.index_copy_(0, slots, tokens)
            self.position.index_copy_(0, slots, positions)
        if staged.mixed is not None and staged.mixed.joined is not None:
            self.position.index_copy_(0, *staged.mixed.joined)

    @property
    def adapted(self) -> bool:
        """Whether the staged step has rows with LoRA adapters."""
        return self._adapter_rows is not None

    def with_adapters(self, step: StepTensors) -> StepTensors:
        """Return the step with the buffers of GPU adapters, whether or not a row has an adapter; unchanged on a CPU."""
        rows = self._adapters.device_rows if self._adapters is not None else None
        return step if rows is None else replace(step, adapters=rows)

    def decode_step(self, size: int) -> StepTensors:
        """Return a step of the first `size` slots; slots past the decoding ones are padding.

        Its tensors are valid after `gather`.
        """
        buffers = self._buffers
        return StepTensors(
            input_ids=buffers.ids[None, :size],
            position_ids=buffers.positions[None, :size],
            kv_indices=buffers.kv_indices[:size],
            tables=self.tables,
            rows=buffers.rows[:size],
            q_start=buffers.q_start[: size + 1],
            lens=buffers.lens[:size],
            decodes=size,
            caches=self._caches,
            plans=self._plans,
            logits_at=None,
            sample_slots=buffers.sample_slots[:size],
            known=buffers.known[:size],
            adapters=self._adapter_rows,
            windows=self._windows.decode_places(size),
        )

    def gather(self, step: StepTensors) -> None:
        """Fill the tensors of a decode_step."""
        ids, positions = step.input_ids[0], step.position_ids[0]
        for place in step.places:
            self._decode_inputs(self.slots[: step.decodes], ids, positions, place, step.rows, step.lens)
        torch.add(positions, 1, out=step.known)

    def mixed_step(self, mixed: Mixed) -> StepTensors:
        """Return the filled tensors of a step with slices."""
        shape, page = mixed.shape, mixed.page
        windows = self._windows.mixed_places(page.windows)
        if shape.decodes:
            for place in (GroupPlaces(page.kv_indices, self.tables), *windows):
                self._decode_inputs(page.slots, page.ids, page.positions, place, page.rows, page.lens)
        known = self._buffers.known[: shape.samples]
        known.copy_(page.lens.index_select(0, page.sample_seqs))
        rows = shape.logits - sum(len(targets.at) for targets in mixed.targets)
        return StepTensors(
            input_ids=page.ids[None],
            position_ids=page.positions[None],
            kv_indices=page.kv_indices,
            tables=self.tables,
            rows=page.rows,
            q_start=page.q_start,
            lens=page.lens,
            decodes=len(page.rows) if self.shapes.is_split(shape) else shape.decodes,
            caches=self._caches,
            plans=self._plans,
            logits_at=page.logits_at[:rows],
            sample_slots=self._buffers.sample_slots[: shape.samples],
            known=known,
            targets=mixed.targets,
            adapters=self._adapter_rows,
            keeps=mixed.keeps,
            windows=windows,
        )

    def idle_step(self, shape: Shape) -> Mixed:
        """Return a step of this shape that captures can run without effect: it stores no keys and attends to none."""
        self._staging.begin_step()
        page = self._stage_page(blank(shape, len(self._windows))[0], shape)
        self._staging.send()
        return Mixed(shape, page, None, [])

    def idle_drafts(self) -> DraftRows:
        """Return the rows of one draft in slot 0, which must not be in use."""
        self._staging.begin_step()
        rows = DraftRows.stage([Slice(0, 0, [0, 0], drafts=1)], [0], 1, self._staging)
        self._staging.send()
        return rows

    def finish(self, tokens: Tensor) -> None:
        """Store the tokens [N] i64 that the first N slots sampled, as the next step's input."""
        ops.decode_outputs(self.slots[: len(tokens)], tokens, self.token, self.position)

    def _decode_inputs(
        self, slots: Tensor, ids: Tensor, positions: Tensor, place: GroupPlaces, rows: Tensor, lens: Tensor
    ) -> None:
        """Write the next inputs of decoding slots, and their kv_indices in one KV group.  The other inputs do not
        depend on the group."""
        count = len(slots)
        ops.decode_inputs(
            slots,
            self.token,
            self.position,
            place.tables,
            self._block_size,
            ids=ids[:count],
            positions=positions[:count],
            kv_indices=place.kv_indices[:count],
            rows=rows[:count],
            lens=lens[:count],
        )


def ramps(starts: Array, sizes: list[int]) -> Array:
    """Return starts[0], starts[0] + 1, ... (sizes[0] of them), starts[1], starts[1] + 1, ..."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
