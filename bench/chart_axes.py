"""Contents of a chart's axes: lines or bars with their ranges, and ticks with plain numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from bench.chart_style import COLOURS, GRID, INK, MARKERS, MUTED
from bench.figures import Chart, shown

MOST_TICKS, LEAST_TICK_GAP = 10, 0.06
"""Ticks stand at the measured places when these are few, and no two nearer than this share of the axis."""
MOST_LABELLED_BARS = 40
MOST_MARKED_POINTS = 24
MOST_BANDS = 3
POINTS_ASIDE = 2.5
"""Between the strokes of two series at one place."""
STEPS = (1, 2, 2.5, 5, 10)
LETTERS_BESIDE = 34
NAN = math.nan


def draw_lines(axes: Axes, chart: Chart) -> None:
    """A line for each series over numbers, its ranges as strokes, and as a band where few could cover each other."""
    for index, series in enumerate(chart.series):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        x = [float(one) for one in series.x]
        aside = (index - (len(chart.series) - 1) / 2) * POINTS_ASIDE / 72 if series.low or series.high else 0.0
        beside = axes.transData + ScaledTranslation(aside, 0, axes.figure.dpi_scale_trans)
        if series.low is not None or series.high is not None:
            low, high = _numbers(series.low or series.y), _numbers(series.high or series.y)
            if len(chart.series) <= MOST_BANDS:
                axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=1)
            axes.vlines(x, low, high, color=colour, linewidth=1, zorder=2, transform=beside)
        axes.plot(
            x,
            _numbers(series.y),
            color=colour,
            marker=marker if len(x) <= MOST_MARKED_POINTS else "",
            markersize=4.5,
            linewidth=1.8,
            zorder=3,
            label=series.name,
            transform=beside,
        )
    places = sorted({float(one) for series in chart.series for one in series.x})
    _set_ticks(axes, "x", places, chart.x_log, at_values=True, unit=chart.x_label)
    _set_ticks(axes, "y", _all_values(chart), chart.y_log, at_values=False, unit=chart.y_label)


def draw_words(axes: Axes, chart: Chart) -> None:
    """A group of bars for each word, lying; points instead on a logarithmic axis, where a bar's length says nothing."""
    words = words_of(chart)
    height = (0.6 if chart.y_log else 0.8) / len(chart.series)
    labelled = len(words) * len(chart.series) <= MOST_LABELLED_BARS
    for index, series in enumerate(chart.series):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        rows = [words.index(str(one)) + (index - (len(chart.series) - 1) / 2) * height for one in series.x]
        values = _numbers(series.y)
        if chart.y_log:
            axes.plot(
                values, rows, color=colour, marker=marker, markersize=6, linestyle="none", zorder=3, label=series.name
            )
        else:
            axes.barh(rows, values, height * 0.88, color=colour, zorder=2, label=series.name)
        ends = values
        if series.low is not None or series.high is not None:
            ends = _numbers(series.high or series.y)
            axes.hlines(rows, _numbers(series.low or series.y), ends, color=INK, linewidth=1, zorder=4)
        for row, value, end in zip(rows, values, ends, strict=True) if labelled else ():
            if math.isfinite(value):
                at = (value if math.isnan(end) else max(value, end), row)
                text = shown(value, digits=3)
                axes.annotate(text, at, (6, 0), textcoords="offset points", va="center", color=INK, size=8)
    axes.set_ylim(len(words) - 0.45, -0.55)
    axes.set_yticks(range(len(words)), [wrapped(word) for word in words])
    _set_ticks(axes, "x", _all_values(chart), chart.y_log, at_values=False, unit=chart.y_label)


def words_of(chart: Chart) -> list[str]:
    """The words on its axis, in order; empty for a chart over numbers."""
    return list(dict.fromkeys(one for series in chart.series for one in series.x if isinstance(one, str)))


def wrapped(word: str) -> str:
    """In lines that fit beside the bars."""
    return "\n".join(textwrap.wrap(word, LETTERS_BESIDE))


def style_axes(axes: Axes, values_on: Literal["x", "y"]) -> None:
    """A quiet frame: a base line, and a grid for the values that stays behind them."""
    axes.set_axisbelow(True)
    axes.grid(axis=values_on, color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    for name, spine in axes.spines.items():
        spine.set_visible(name == ("bottom" if values_on == "y" else "left"))
        spine.set_color(MUTED)
        spine.set_linewidth(0.8)


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [NAN if one is None else float(one) for one in values]


def _all_values(chart: Chart) -> list[float]:
    """Every number that the y axis must reach, sorted."""
    given = [
        x for one in chart.series for part in (one.y, one.low or (), one.high or ()) for x in part if x is not None
    ]
    values = [float(one) for one in given] + [limit.y for limit in chart.limits]
    return sorted(one for one in values if math.isfinite(one) and (one > 0 or not chart.y_log))


def _set_ticks(
    axes: Axes, name: Literal["x", "y"], values: Sequence[float], log: bool, at_values: bool, unit: str
) -> None:
    """Bounds and ticks of one axis; with `at_values` at the values themselves where they do not crowd, else from 0."""
    text_of = _bytes if unit.startswith("bytes") else shown
    axis: Axis = axes.xaxis if name == "x" else axes.yaxis
    if not values:
        return
    if log:
        axes.set(**{f"{name}scale": "log"})  # brings a formatter with powers of ten; ours comes after it
        low, high = values[0], values[-1]
        margin = (high / low) ** 0.07 if high > low else 2.0
        axes.set(**{f"{name}lim": (low / margin, high * margin**1.6)})
        axis.set_major_locator(FixedLocator(_spread(values, log) if at_values else _round_steps(low, high)))
        axis.set_minor_locator(NullLocator())
    elif at_values:
        room = (values[-1] - values[0]) * 0.04 or 1.0
        axes.set(**{f"{name}lim": (values[0] - room, values[-1] + room)})
        crowded = len(_spread(values, log)) < len(values)
        axis.set_major_locator(MaxNLocator(8, steps=STEPS) if crowded else FixedLocator(list(values)))
    else:
        low = min(0.0, values[0])
        axes.set(**{f"{name}lim": (low * 1.1, max(values[-1], 0.0) * 1.13 or 1.0)})
        axis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text_of(float(value))))


def _spread(values: Sequence[float], log: bool) -> list[float]:
    """The values that can be ticks: from the left, those with room between them."""
    at = [math.log(one) if log else one for one in values]
    span = at[-1] - at[0] or 1.0
    gap = max(LEAST_TICK_GAP, 1 / MOST_TICKS if len(values) > MOST_TICKS else 0.0) * span
    kept: list[int] = []
    for index, place in enumerate(at):
        if not kept or place - at[kept[-1]] >= gap * 0.999:
            kept.append(index)
    return [values[index] for index in kept]


def _round_steps(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … or only powers of ten, at least two of them, around `[low, high]`."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        steps = [factor * 10.0**decade for decade in decades for factor in factors]
        within = [step for step in steps if low / 1.3 <= step <= high * 1.3]
        if len(within) >= 4:
            break
    return within if len(within) >= 2 else [low, high]


def _bytes(number: float) -> str:
    """In the largest binary unit that it reaches."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{shown(number / (1 << power))} {unit}"
    return f"{shown(number)} B"
