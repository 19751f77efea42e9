"""A chart as SVG, in the style of `charts.mplstyle`, in light and dark: the same bytes for the same figures."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from bench.figures import Chart, Series, shown, shown_bytes

_STYLE = Path(__file__).parent / "charts.mplstyle"
_GREYS = ("one engine", "bare NIXL", "plain copy")
_WHOSE = {
    "kvferry": "#2a78d6",
    "NixlConnector": "#e0721f",
    **dict.fromkeys(_GREYS, "#8a8984"),
}
"""Colours by the beginning of a line's name, the same in all charts; others are of the style's cycle."""
DARK = {
    "#ffffff": "#12161d",
    "#24292f": "#e8edf4",
    "#5b5a57": "#98a5b6",
    "#e2e1dd": "#2d3644",
}
"""Of paper, title, labels and grid: what is in their place where the page or the system is dark."""
_RULE = '[style*="{0}: {1}"]{{{0}: {2} !important}}'
_RULES = "".join(
    _RULE.format(what, *pair) for pair in DARK.items() for what in ("fill", "stroke")
)
_NO_DATE = {"Date": None, "Creator": None, "Format": None, "Type": None}


def svg_of(chart: Chart) -> str:
    """The drawing: a line for each series, with its range as error bars, and the limit across."""
    with drawn_as_svg() as (figure, written):
        axes = figure.add_subplot()
        drawn: list[str | None] = []
        for series in chart.series:
            whose = next(
                (
                    colour
                    for name, colour in _WHOSE.items()
                    if series.name.startswith(name)
                ),
                None,
            )
            dash = ("-", "--", ":")[drawn.count(whose) % 3] if whose else "-"
            drawn.append(whose)
            label, around = (
                series.name
                if series.n is None
                else f"{series.name} (n = {series.n:,})",
                _beyond(series),
            )
            axes.errorbar(
                series.x,
                _numbers(series.y),
                around,
                label=label,
                elinewidth=1,
                color=whose,
                linestyle=dash,
            )
        if chart.limit is not None:
            axes.axhline(
                chart.limit,
                color="#24292f",
                linestyle="--",
                linewidth=1.2,
                label="limit",
            )
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        _scale(axes, chart)
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 1:
            figure.legend(
                loc="outside lower left", ncols=3 if max(map(len, labels)) < 30 else 2
            )
    return written.getvalue()


@contextlib.contextmanager
def drawn_as_svg(
    inches: tuple[float, float] | None = None,
) -> Iterator[tuple[Figure, io.StringIO]]:
    """A figure of this width and height, or the style's; what is drawn in it is in the text afterwards."""
    written = io.StringIO()
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=inches)
        yield figure, written
        plain = io.StringIO()
        FigureCanvasSVG(figure).print_svg(plain, metadata=_NO_DATE)  # type: ignore[no-untyped-call]
    dark = f"@media (prefers-color-scheme: dark){{{_RULES}}}</style>"
    written.write(plain.getvalue().replace("</style>", dark, 1))


def _scale(axes: Axes, chart: Chart) -> None:
    """Plain numbers as ticks, bytes in binary units; on a logarithmic x they are where the points are."""
    if chart.x_log:
        axes.set_xscale("log")
        axes.set_xticks(sorted({x for series in chart.series for x in series.x}))
    if chart.y_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0)))
    else:
        axes.set_ylim(bottom=0)
    axes.minorticks_off()
    text_of = shown_bytes if chart.x_label.startswith("bytes") else shown
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: text_of(float(value)))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(float(value))))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _beyond(series: Series) -> list[list[float]] | None:
    """How far the range goes beyond each value, as matplotlib has it; None without a range."""
    if series.low is None and series.high is None:
        return None
    y, low, high = (
        _numbers(series.y),
        _numbers(series.low or series.y),
        _numbers(series.high or series.y),
    )
    below = [max(0.0, value - least) for value, least in zip(y, low, strict=True)]
    return [
        below,
        [max(0.0, most - value) for value, most in zip(y, high, strict=True)],
    ]
