"""A chart as SVG: the same bytes for the same figures on every machine with the same matplotlib.

Everything is placed by fixed margins, and ticks are chosen here; nothing depends on the clock.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, cast

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.chart_axes import draw_lines, draw_words, style_axes, words_of, wrapped
from bench.chart_style import BACKGROUND, INK, MUTED, SETTINGS, for_readers
from bench.figures import Chart

WIDTH, PLOT_HEIGHT = 7.6, 2.7
LEFT, RIGHT, BOTTOM, TITLE, LEGEND_ROW, Y_LABEL = 0.72, 0.24, 0.66, 0.36, 0.21, 0.33
BAR, BETWEEN_BARS, LETTER = 0.21, 0.14, 0.074
"""Inches."""
LEGEND_LETTERS = 104
"""In one row of a legend; the sample of a line takes six."""


def svg_of(chart: Chart) -> str:
    """The drawing."""
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user has in a matplotlibrc
        mpl.rcParams.update(cast(Any, SETTINGS))
        return for_readers(_draw(chart), chart.title)


def _draw(chart: Chart) -> str:
    rows = _legend_rows([series.name for series in chart.series] + [limit.name for limit in chart.limits])
    words = [line for word in words_of(chart) for line in wrapped(word).splitlines()]
    left = max(LEFT, LETTER * max(map(len, words)) + 0.2) if words else LEFT
    plot = len(words_of(chart)) * (BAR * len(chart.series) + BETWEEN_BARS) if words else PLOT_HEIGHT
    above = TITLE + LEGEND_ROW * len(rows) + Y_LABEL
    height = BOTTOM + plot + above
    figure = Figure(figsize=(WIDTH, height), facecolor=BACKGROUND)
    box = (left / WIDTH, BOTTOM / height, (WIDTH - left - RIGHT) / WIDTH, plot / height)
    axes = figure.add_axes(box, facecolor=BACKGROUND)
    style_axes(axes, "x" if words else "y")
    (draw_words if words else draw_lines)(axes, chart)
    for limit in chart.limits:
        line = axes.axvline if words else axes.axhline
        line(limit.y, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=2.5, label=limit.name)
    beside, below = (chart.x_label, chart.y_label) if words else (chart.y_label, chart.x_label)
    axes.set_xlabel(below, color=MUTED, labelpad=5)
    figure.text(0.016, 1 - (above - 0.14) / height, beside, color=MUTED, va="baseline")
    figure.text(0.016, 1 - 0.25 / height, chart.title, color=INK, size=11, weight="bold", va="baseline")
    _draw_legend(figure, axes, rows, height)
    written = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Type": None, "Format": None, "Title": chart.title}
    FigureCanvasSVG(figure).print_svg(written, metadata=metadata)  # type: ignore[no-untyped-call]
    return written.getvalue()


def _legend_rows(names: Sequence[str]) -> list[list[str]]:
    """The names in rows that fit; none for a single one, which the title names."""
    rows: list[list[str]] = []
    free = 0
    for name in names if len(names) > 1 else ():
        needed = len(name) + 6
        if needed > free:
            rows.append([])
            free = LEGEND_LETTERS
        rows[-1].append(name)
        free -= needed
    return rows


def _draw_legend(figure: Figure, axes: Axes, rows: list[list[str]], height: float) -> None:
    handles: dict[str, Artist] = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for index, row in enumerate(rows):
        figure.legend(
            [handles[name] for name in row],
            row,
            loc="upper left",
            bbox_to_anchor=(0.016, 1 - (TITLE + LEGEND_ROW * index) / height),
            ncols=len(row),
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            labelcolor=INK,
            handlelength=1.8,
            columnspacing=1.6,
        )
