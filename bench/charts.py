"""A chart as SVG, in the style of `charts.mplstyle`: the same bytes for the same figures."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.figures import Chart, Series, shown

_STYLE = Path(__file__).parent / "charts.mplstyle"
_BAR_INCHES, _AROUND_INCHES = 0.21, 1.4
_NO_DATE = {"Date": None, "Creator": None, "Format": None, "Type": None}


def svg_of(chart: Chart) -> str:
    """The drawing: lines where `x` are numbers, lying bars where they are words."""
    with matplotlib.style.context(["default", _STYLE]):
        words = list(dict.fromkeys(x for series in chart.series for x in series.x if isinstance(x, str)))
        figure = Figure()
        axes = figure.add_subplot()
        axes.set_title(chart.title)
        if words:
            figure.set_figheight(_AROUND_INCHES + _BAR_INCHES * len(words) * (len(chart.series) + 0.5))
            _draw_bars(axes, chart, words)
        else:
            _draw_lines(axes, chart)
        if len(chart.series) > 1 or chart.limit is not None:
            figure.legend(loc="outside lower left", ncols=3)
        written = io.StringIO()
        FigureCanvasSVG(figure).print_svg(written, metadata=_NO_DATE)  # type: ignore[no-untyped-call]
        return written.getvalue()


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for series in chart.series:
        y = _numbers(series.y)
        axes.errorbar([float(x) for x in series.x], y, _beyond(series), label=series.name, elinewidth=1)
    if chart.limit is not None:
        axes.axhline(chart.limit, color="black", linestyle="--", linewidth=1.2, label="limit")
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    _scale(axes, "x", chart.x_log, chart.x_label)
    _scale(axes, "y", chart.y_log, chart.y_label)
    if not chart.y_log:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, chart: Chart, words: Sequence[str]) -> None:
    height = 0.8 / len(chart.series)
    for index, series in enumerate(chart.series):
        rows = [words.index(str(x)) + (index - (len(chart.series) - 1) / 2) * height for x in series.x]
        bars = axes.barh(rows, _numbers(series.y), 0.88 * height, xerr=_beyond(series), label=series.name)
        axes.bar_label(bars, [shown(y, digits=3) for y in series.y], padding=4, fontsize=8)
    if chart.limit is not None:
        axes.axvline(chart.limit, color="black", linestyle="--", linewidth=1.2, label="limit")
    axes.set_yticks(range(len(words)), words)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel=chart.y_label, ylabel=chart.x_label)
    axes.margins(x=0.1)
    _scale(axes, "x", chart.y_log, chart.y_label)


def _scale(axes: Axes, name: Literal["x", "y"], log: bool, label: str) -> None:
    """Plain numbers as ticks; bytes in binary units."""
    axis, set_scale = (axes.xaxis, axes.set_xscale) if name == "x" else (axes.yaxis, axes.set_yscale)
    powers_of_two = label.startswith("bytes")
    if log:
        set_scale("log")
        axis.set_major_locator(LogLocator(16 if powers_of_two else 10, subs=(1.0,) if powers_of_two else (1.0, 3.0)))
        axis.set_minor_locator(NullLocator())
    text_of = _bytes if powers_of_two else shown
    axis.set_major_formatter(FuncFormatter(lambda value, _: text_of(float(value))))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _beyond(series: Series) -> list[list[float]] | None:
    """How far the range goes beyond each value, as matplotlib has it; None without a range."""
    if series.low is None and series.high is None:
        return None
    y, low, high = _numbers(series.y), _numbers(series.low or series.y), _numbers(series.high or series.y)
    below = [max(0.0, value - least) for value, least in zip(y, low, strict=True)]
    return [below, [max(0.0, most - value) for value, most in zip(y, high, strict=True)]]


def _bytes(number: float) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{shown(number / (1 << power))} {unit}"
    return f"{shown(number)} B"
