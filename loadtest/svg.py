"""Line and bar charts as SVG text, for pages without scripts.  Colours are CSS classes that the page defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 20, 26  # margins around the plot: labels of y, phase names, labels of x
Place = Callable[[float], float]  # from a value to units of the view box


@dataclass(frozen=True)
class Line:
    name: str
    style: str  # CSS class
    xs: Sequence[float]
    ys: Sequence[float | None]  # None leaves a gap


@dataclass(frozen=True)
class Bars:
    """Stacked: each layer is drawn on top of those before it."""

    width: float  # in units of x
    xs: Sequence[float]
    layers: Sequence[tuple[str, str, Sequence[float]]]  # name, CSS class, heights


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) from `low` to the first one at or above `high`."""
    span = max(high - low, 1e-12 * max(1.0, abs(high)))  # a narrower span contains no other float
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten that enclose the positive values `low` and `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def label(value: float) -> str:
    return f"{value:g}" if abs(value) < 10_000 else f"{value / 1000:g}k"


def chart(
    name: str,
    parts: Sequence[Line | Bars],
    windows: dict[str, tuple[float, float]],
    *,
    log: bool = False,
    top: float | None = None,
    end: float = 1.0,
) -> str:
    """Return one plot over time in seconds, up to `end` at least.

    The y axis runs from 0 (or is logarithmic) to `top`, by default to the largest value.  `windows` are shaded
    alternately and named.  Screen readers read `name`.  Without a single value the plot is a sentence."""
    heights = [y for part in parts if isinstance(part, Line) for y in part.ys if y is not None]
    for part in parts:
        if isinstance(part, Bars):
            heights += [sum(column) for column in zip(*(ys for _, _, ys in part.layers), strict=True)]
    if log:
        heights = [y for y in heights if y > 1e-9]  # shorter than any clock's resolution
    if not heights:
        return '<p class="none">Nothing was measured.</p>'
    ends = [x for part in parts for x in part.xs[-1:]] + [stop for _, stop in windows.values()]
    right = max([*ends, end])
    x_ticks = ticks(0.0, right, 8)
    y_ticks = decades(min(heights), max(heights)) if log else ticks(0.0, top or max(heights) or 1.0, 4)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / right

    def y(value: float) -> float:
        low, high = y_ticks[0], y_ticks[-1]
        if log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">']
    for i, (phase, (begin, stop)) in enumerate(windows.items()):
        box = f'x="{x(begin):.1f}" y="{TOP}" width="{x(stop) - x(begin):.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        out.append(f'<rect class="phase{i % 2}" {box}/>')
        out.append(f'<text class="phase" x="{x(begin) + 4:.1f}" y="{TOP - 6}">{escape(phase)}</text>')
    for value in y_ticks:
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text class="y" x="{LEFT - 6}" y="{y(value) + 4:.1f}">{label(value)}</text>')
    for value in x_ticks:
        if value <= right:
            out.append(f'<text class="x" x="{x(value):.1f}" y="{HEIGHT - 8}">{label(value)} s</text>')
    for part in parts:
        if isinstance(part, Line):
            out.append(_path(part, x, y))
        else:
            out.extend(_bars(part, x, y))
    out.append("</svg>")
    return "".join(out)


def _path(line: Line, x: Place, y: Place) -> str:
    """Return the line's path.  None interrupts it; a lone value is a dot (a stroke of length 0 with round ends)."""
    steps, pen = [], "M"
    for i, (at, value) in enumerate(zip(line.xs, line.ys, strict=True)):
        if value is None:
            pen = "M"
            continue
        alone = pen == "M" and (i + 1 == len(line.ys) or line.ys[i + 1] is None)
        steps.append(f"{pen}{x(at):.1f} {y(value):.1f}" + ("h0" if alone else ""))
        pen = "L"
    return f'<path class="line {line.style}" d="{"".join(steps)}"><title>{escape(line.name)}</title></path>'


def _bars(bars: Bars, x: Place, y: Place) -> Iterator[str]:
    """Draw a box for each layer of each column that is not 0."""
    width = max(1.0, x(bars.width) - x(0) - 0.5)
    for i, at in enumerate(bars.xs):
        floor = 0.0
        for name, style, heights in bars.layers:
            if heights[i]:
                low, high = y(floor), y(floor + heights[i])
                box = f'x="{x(at):.1f}" y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}"'
                title = f"{escape(name)}: {heights[i]:g} at {at:g} s"
                yield f'<rect class="bar {style}" {box}><title>{title}</title></rect>'
                floor += heights[i]
