"""Reads an area (rows and columns) of a quantised weight from its stored tensors, plus the units at its borders.

    wanted      rows 10 to 20, columns 64 to 128 of a weight in groups of 32
    read        rows 8 to 24, because 8 values share a word; columns 64 to 128 are two complete groups
    returned    the stored tensors of this area, and the position of the wanted area in it

Every format can be cut at the borders of its units: a block with one scale, a group, a word.  An area that ends within
a unit is read up to the unit's end, and the caller drops the rest.  If g_idx names each column's group, the scales of
all groups are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.engine.executor.models.cuts import Where
from quire.engine.executor.models.quantised.dequantise import WORD, Shape, check_packed
from quire.engine.executor.models.quantised.quantisation import Format, Quantisation

PartSlices = Mapping[str, Any]  # kind of part -> lazy slice of a file, read when it is indexed
Parts = dict[str, Tensor]


def shape_of(how: Quantisation, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of the weight that stored tensors of these shapes make; `packed`: with the padding of words."""
    numbers = WORD // how.bits
    if how.format == "scaled":
        return shapes["weight"]
    if how.format == "mxfp4":
        experts, out, groups, _ = shapes["blocks"]
        return experts, groups * how.group, out
    if how.format == "fp4":
        out, pairs = shapes["packed"]
        return out, 2 * pairs
    if how.format == "packed":
        out, words = shapes["packed"]
        return out, words * numbers
    rows, _ = shapes["qweight"]
    return shapes["scales"][1], rows * (1 if how.format == "awq" else numbers)


def units(how: Quantisation) -> tuple[int, int]:
    """Return the units, in rows and columns (the last two dimensions), of areas that can be read."""
    word = WORD // how.bits
    if how.format == "scaled":
        return how.block if how.strategy == "block" else (1, 1)
    if how.format == "mxfp4":
        return how.group, 1
    if how.format == "fp4":
        return 1, how.group
    return word, how.group or 1 if how.format == "awq" else math.lcm(how.group or 1, word)


def read_area(how: Quantisation, stored: PartSlices, where: Where) -> tuple[Parts, Where]:
    """Return the stored tensors of an area that holds `where` of a weight, and the position of `where` in that area.

    where: a slice per dimension of the weight; in a weight of three dimensions, the first slice is complete."""
    rows, columns = (_widened(place, unit) for place, unit in zip(where[-2:], units(how), strict=True))
    inner = [
        slice(place.start - read.start, place.stop - read.start)
        for place, read in zip(where[-2:], (rows, columns), strict=True)
    ]
    return AREA_READERS[how.format](how, stored, rows, columns), (*where[:-2], *inner)


def _widened(place: slice, unit: int) -> slice:
    """Return a range that begins and ends at a unit.  It may end past the last row or column."""
    return slice(place.start // unit * unit, math.ceil(place.stop / unit) * unit)


def _shrunk(place: slice, unit: int) -> slice:
    """Return the range of units that contains a range."""
    return slice(place.start // unit, math.ceil(place.stop / unit))


def _area_of_scaled(how: Quantisation, stored: PartSlices, rows: slice, columns: slice) -> Parts:
    lead = len(stored["weight"].get_shape()) - 2
    parts = {"weight": stored["weight"][(*[slice(None)] * lead, rows, columns)]}
    for part in stored.keys() - {"weight"}:
        scale = stored[part][...]
        if how.strategy == "block":
            scale = scale[..., _shrunk(rows, how.block[0]), _shrunk(columns, how.block[1])]
        elif how.strategy == "channel":
            scale = scale[(*[slice(None)] * lead, rows)]
        parts[part] = scale.contiguous()
    return parts


def _area_of_mxfp4(how: Quantisation, stored: PartSlices, rows: slice, columns: slice) -> Parts:
    where = (slice(None), columns, _shrunk(rows, how.group))
    return {part: stored[part][where] for part in ("blocks", "scales")}


def _area_of_fp4(how: Quantisation, stored: PartSlices, rows: slice, columns: slice) -> Parts:
    """Read complete groups of columns, and the tensor's scale."""
    parts = {part: stored[part][...] for part in stored.keys() - {"packed", "scale"}}
    parts["packed"] = stored["packed"][rows, _shrunk(columns, 2)]
    parts["scale"] = stored["scale"][rows, _shrunk(columns, how.group)]
    return parts


def _area_of_packed(how: Quantisation, stored: PartSlices, rows: slice, columns: slice) -> Parts:
    shape = stored["shape"][...].tolist()
    check_packed(how, shape, stored["packed"].get_shape())
    rows, columns = (
        slice(place.start, min(place.stop, size)) for place, size in zip((rows, columns), shape, strict=True)
    )
    numbers = WORD // how.bits
    order = _order(stored, columns)
    groups = _groups(how, order, columns)
    parts = {
        "packed": stored["packed"][rows, _shrunk(columns, numbers)],
        "shape": torch.tensor([rows.stop - rows.start, columns.stop - columns.start]),
        "scale": stored["scale"][rows, groups],
    } | order
    if "zero_point" in stored:
        parts["zero_point"] = stored["zero_point"][_shrunk(rows, numbers), groups]
    return parts


def _area_of_transposed(how: Quantisation, stored: PartSlices, rows: slice, columns: slice) -> Parts:
    """Read awq and gptq, which store the transpose of a weight."""
    numbers = WORD // how.bits
    words = _shrunk(rows, numbers)
    order = _order(stored, columns)
    groups = _groups(how, order, columns)
    where = (columns, words) if how.format == "awq" else (_shrunk(columns, numbers), rows)
    return {
        "qweight": stored["qweight"][where],
        "qzeros": stored["qzeros"][groups, words],
        "scales": stored["scales"][groups, rows],
    } | order


def _order(stored: PartSlices, columns: slice) -> Parts:
    """Return g_idx of the columns, if groups are not consecutive columns."""
    order = stored["g_idx"][columns] if "g_idx" in stored else None
    return {} if order is None or int(order[0]) < 0 else {"g_idx": order}


def _groups(how: Quantisation, order: Parts, columns: slice) -> slice:
    """Return the range of groups whose scales are read: all if there is a g_idx, which names groups of the weight."""
    return slice(None) if order or not how.group else _shrunk(columns, how.group)


AREA_READERS: dict[Format, Callable[[Quantisation, PartSlices, slice, slice], Parts]] = {
    "scaled": _area_of_scaled,
    "packed": _area_of_packed,
    "awq": _area_of_transposed,
    "gptq": _area_of_transposed,
    "mxfp4": _area_of_mxfp4,
    "fp4": _area_of_fp4,
}
