"""docs/timelines.svg: the slowest handovers of a recording, phase by phase, in the style of the benchmarks' charts.

Left of the zero is the time until the prompt is computed, right of it the handover; each side has its own scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.charts import drawn_as_svg
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from kvferry.cli.formatting import format_time
from kvferry.cli.trace.report import format_result, name_of
from kvferry.trace.events import Phase
from kvferry.trace.handover import Handover, Span

# Waiting is pale or warm, work is saturated.
_COLOURS = {
    Phase.PREFILL_QUEUE: "#bccbe4",
    Phase.PREFILL: "#4c7fe0",
    Phase.ROUTER: "#9b7be8",
    Phase.DECODE_QUEUE: "#f3b62c",
    Phase.ORDER: "#d8c9a3",
    Phase.LOAD: "#3f9d6b",
    Phase.QUEUED: "#fbe08b",
    Phase.CONNECTING: "#ee7b30",
    Phase.FENCE: "#dc4a4a",
    Phase.POSTING: "#45c4b6",
    Phase.READING: "#1f9150",
    Phase.FENCE_AGAIN: "#9bc53d",
    Phase.REPORT: "#e46aa7",
    Phase.FIRST_STEP: "#8fa1b8",
}
_ROW_INCHES = 0.27


def picture(handovers: Sequence[Handover]) -> str:
    """An SVG document with a row for each handover, in this order."""
    with drawn_as_svg((10.4, 1.3 + _ROW_INCHES * len(handovers))) as (figure, written):
        before, after = figure.subplots(1, 2, sharey=True, width_ratios=(1, 3.4))
        shown: set[Phase] = set()
        for row, handover in enumerate(handovers):
            shown |= _draw(before, handover.before, row)
            shown |= _draw(after, handover.path, row)
            _write_result(after, handover, row)
        before.set_yticks(
            range(len(handovers)), [name_of(handover) for handover in handovers]
        )
        before.invert_yaxis()
        before.set(
            title=f"The {len(handovers)} slowest handovers of the example",
            xlabel="ms until the prompt is computed",
        )
        before.set_xlim(right=0)
        after.set(xlabel="ms from then until its first step on the decoder")
        after.set_xlim(left=0)
        for axes in (before, after):
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        colours = [
            Patch(color=colour, label=phase.label)
            for phase, colour in _COLOURS.items()
            if phase in shown
        ]
        figure.legend(handles=colours, loc="outside lower left", ncols=7)
    return written.getvalue()


def _draw(axes: Axes, spans: Iterable[Span], row: int) -> set[Phase]:
    """A row of bars; returns the phases that it shows."""
    phases = set()
    for span in spans:
        axes.barh(
            row,
            span.lasted_ms,
            left=span.begun_ms,
            height=0.6,
            color=_COLOURS[span.phase],
        )
        phases.add(span.phase)
    return phases


def _write_result(axes: Axes, handover: Handover, row: int) -> None:
    """The duration and what was loaded, behind the last bar."""
    if handover.handover_ms is None:
        return
    ended_ms = max(span.ended_ms for span in handover.path)
    lasted = format_time(handover.handover_ms * 1e6)
    text = f" {lasted}, {format_result(handover)}"
    axes.text(ended_ms, row, text, va="center", color="#5b5a57", clip_on=False)
