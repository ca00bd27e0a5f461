"""Operators of decode steps' inputs and outputs, and of sampling."""

from __future__ import annotations

import torch


def apply_edits(edits: torch.Tensor, tables: torch.Tensor) -> None:
    """Set tables[row, column] = block for each (row, column, block) of edits [n, 3] int32; row -1 is padding.

    tables [max_rows, max_blocks] int32.  Entries must be distinct.
    """
    torch.ops.quire.apply_edits.default(edits, tables)


def decode_inputs(
    slots: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    *,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Prepare the inputs of the next token of each decoding slot, in one launch.

    slots                       [n] int32: rows of the tables, in the order of the step; -1 is padding
    token, position             [max_rows] int64: next input token of each slot, and its position
    tables                      [max_rows, max_blocks] int32
    ids, positions, kv_indices  [n] int64, out: inputs of the model and of `kv_write`
    rows, lens                  [n] int32, out: inputs of `paged_attention`

    Padding, and a slot past the end of its table, becomes id 0, position 0, kv_index -1, row 0, lens 0.
    """
    torch.ops.quire.decode_inputs.default(
        slots, token, position, tables, block_size, ids, positions, kv_indices, rows, lens
    )


def decode_outputs(slots: torch.Tensor, tokens: torch.Tensor, token: torch.Tensor, position: torch.Tensor) -> None:
    """Feed sampled tokens [n] int64 back: token[slots[i]] = tokens[i], position[slots[i]] += 1; -1 is padding.

    Slots must be distinct.
    """
    torch.ops.quire.decode_outputs.default(slots, tokens, token, position)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    known: torch.Tensor,
    table: torch.Tensor,
    general: bool,
    tokens: torch.Tensor,
    outcome: torch.Tensor,
) -> None:
    """Sample one token per row of logits [N, V], equal on every device and in any batch.

    csrc/sampling_rules.h has the rules.

    slots, known  [N] int64: the row's slot in `table` (-1: none, the token is 0); number of tokens before this one
    table         [max_seqs, 9] int64: each slot's settings; `SamplerBank` owns it
    general       False: argmax of each row, with one pass over the logits; `table` is not read
    tokens        [N] int64, out; 0 if none was sampled
    outcome       [N] uint8, out: CHOSEN, NOT_FINITE or NOTHING_ALLOWED of engine/executor/sampling.py
    """
    torch.ops.quire.sample.default(logits, slots, known, table, general, tokens, outcome)


def argmax(logits: torch.Tensor, first: int, keys: torch.Tensor) -> None:
    """Find the argmax of each row of vocab-parallel logits [N, C]: the columns of tokens first, first + 1, ...

    keys  [N] int64, out: value and index of the maximum, as one integer.  The maximum key over the ranks is the key of
    the argmax (the lowest token of equal logits); a row with NaN has the maximum key.  `chosen` reads the keys"""
    torch.ops.quire.argmax.default(logits, first, keys)


def chosen(keys: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, outcome: torch.Tensor) -> None:
    """Write the tokens and outcomes of `sample` with `general` false, from the maximum keys [N] over the ranks."""
    torch.ops.quire.chosen.default(keys, slots, tokens, outcome)
