"""The picture of the slowest handovers: one row each, the slowest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.cli.formatting import counted
from kvferry.cli.svg import FONT, element, plain
from kvferry.cli.trace.bars import Scale, axis, bar, height_of, scale_for
from kvferry.cli.trace.report import format_engines, format_rate, format_time, name_of
from kvferry.cli.trace.theme import PHASE_THEMES, class_of, style
from kvferry.trace.timeline import Timeline

WIDTH = 1240.0
_LEFT, _ZERO, _RIGHT = 262.0, 432.0, 1052.0
_PAD = 9.0
_LEGEND_ROW = 18.0


def draw(timelines: Sequence[Timeline], of_all: int, notes: Sequence[str] = ()) -> str:
    """One SVG document.

    Args:
        timelines: those to show, in this order.
        of_all: number of all handovers.
        notes: shown below the picture, e.g. that clocks were shifted.
    """
    scale = scale_for(timelines, _LEFT, _ZERO, _RIGHT)
    legend, below_legend = _legend(phases_of(timelines), 66.0)
    top = below_legend + 42
    rows, bottom = _rows(timelines, scale, top)
    height = bottom + 12 + 16 * len(notes)
    everything = counted(of_all, "handover")
    title = f"the {len(timelines)} slowest of {everything}" if len(timelines) < of_all else everything
    parts = [
        element("rect", width=WIDTH, height=height, class_="paper"),
        _text_element(f"{title[0].upper()}{title[1:]}", 16, 30, 17, "ink", 650),
        _text_element(
            "0: the prompt is computed. Left of it the prefill, right of it the handover; two scales.", 16, 50, 12
        ),
        *legend,
        _text_element("prefill", (_LEFT + _ZERO) / 2, top - 22, 11, "muted", 600, "middle"),
        _text_element("handover", (_ZERO + _RIGHT) / 2, top - 22, 11, "muted", 600, "middle"),
        *(row for row in rows if 'class="band"' in row),
        *axis(scale, top, bottom),
        *(row for row in rows if 'class="band"' not in row),
        *(_text_element(note, 16, bottom + 18 + 16 * index, 11.5) for index, note in enumerate(notes)),
    ]
    body = "\n".join(parts)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" font-family="{FONT}">\n<style>{style()}</style>\n{body}\n</svg>\n'
    )


def phases_of(timelines: Sequence[Timeline]) -> list[str]:
    """The phases that occur, in the order of a handover."""
    seen = {span.phase for one in timelines for span in (*one.before, *one.path)}
    seen |= {span.phase for one in timelines for worker in one.workers for span in worker.spans}
    seen |= {one.held.phase for one in timelines if one.held}
    return [phase for phase in PHASE_THEMES if phase in seen]


def _rows(timelines: Sequence[Timeline], scale: Scale, top: float) -> tuple[list[str], float]:
    rows = []
    y = top
    for index, one in enumerate(timelines):
        height = max(height_of(one), 29) + 2 * _PAD
        if index % 2 == 0:
            rows.append(element("rect", x=8, y=y, width=WIDTH - 16, height=height, class_="band"))
        rows += _row(one, scale, y + _PAD)
        y += height
    return rows, y


def _row(one: Timeline, scale: Scale, top: float) -> Iterator[str]:
    handover = one.handover
    ids = f"producer {handover.producer_request or '?'}\nconsumer {handover.consumer_request or '?'}"
    yield element(
        "text",
        element("title", plain(ids)),
        plain(name_of(one)),
        x=16,
        y=top + 12,
        font_size=12.5,
        font_weight=600,
        class_="ink",
    )
    tokens = f" · {handover.tokens} tokens" if handover.tokens else ""
    yield _text_element(f"{format_engines(one)}{tokens}"[:48], 16, top + 27, 10.5)
    yield from bar(one, scale, top)
    yield _text_element(
        "–" if one.lasted_ns is None else format_time(one.lasted_ns), _RIGHT + 14, top + 12, 13, "ink", 650
    )
    reported = (format_rate(one) or one.outcome) if one.is_good else one.outcome
    yield _text_element(reported[:34], _RIGHT + 14, top + 27, 10.5, "muted" if one.is_good else "bad")
    if one.missing:
        yield _text_element(f"not recorded: {', '.join(one.missing)}"[:34], _RIGHT + 14, top + 39, 9.5)


def _legend(phases: Sequence[str], top: float) -> tuple[list[str], float]:
    parts, x, y = [], 16.0, top
    for phase in phases:
        shown = PHASE_THEMES[phase]
        width = 22 + 6.3 * len(shown.label) + 14
        if x + width > WIDTH - 16:
            x, y = 16.0, y + _LEGEND_ROW
        title = element("title", plain(shown.meaning))
        parts.append(element("rect", title, x=x, y=y, width=12, height=12, rx=2, class_=class_of(phase)))
        parts.append(_text_element(shown.label, x + 17, y + 10, 11.5))
        x += width
    return parts, y + _LEGEND_ROW


def _text_element(
    content: str, x: float, y: float, size: float, kind: str = "muted", weight: int = 400, anchor: str = "start"
) -> str:
    return element(
        "text", plain(content), x=x, y=y, font_size=size, class_=kind, font_weight=weight, text_anchor=anchor
    )
