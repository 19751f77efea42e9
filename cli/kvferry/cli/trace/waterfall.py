"""The waterfall: one row per handover, for a picture and for the page.

A row has the phases in their order, a line for the time that the producer held the blocks, and thin bars: where the
prefill was read meanwhile its steps, and below them the reads of the worker that ended last; then every worker. Left of
the zero is the time before the prompt was computed, right of it the handover; each side has its own scale. Waiting is
pale or warm, work is saturated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.cli.svg import THEME, document, element, text
from kvferry.cli.trace.report import (
    format_engines,
    format_lasted,
    format_missing,
    format_result,
    format_time,
    name_of,
    ticks,
)
from kvferry.plan.wording import counted
from kvferry.trace.events import Phase
from kvferry.trace.timeline import Chunk, Span, Timeline, WorkerSpans

WIDTH = 1240.0
RIGHT = 1052.0
BAR, THIN, HELD, GAP = 17.0, 6.0, 3.0, 2.0
MOST_WORKERS = 16
"""Most thin bars of one handover: those of the slowest workers."""
_COLOURS = {
    Phase.PREFILL_QUEUE: "#bccbe4",
    Phase.PREFILL: "#4c7fe0",
    Phase.PREFILL_STEP: "#2a5bb8",
    Phase.ROUTER: "#9b7be8",
    Phase.DECODE_QUEUE: "#f3b62c",
    Phase.ORDER: "#d8c9a3",
    Phase.LOAD: "#3f9d6b",
    Phase.QUEUED: "#fbe08b",
    Phase.CONNECTING: "#ee7b30",
    Phase.FENCE: "#dc4a4a",
    Phase.POSTING: "#45c4b6",
    Phase.READING: "#1f9150",
    Phase.CHUNK_READ: "#0f6b38",
    Phase.FENCE_AGAIN: "#9bc53d",
    Phase.REPORT: "#e46aa7",
    Phase.FIRST_STEP: "#8fa1b8",
    Phase.HELD: "#6b7a90",
}
_DARK = {Phase.PREFILL, Phase.ROUTER, Phase.LOAD, Phase.FENCE, Phase.READING, Phase.HELD}
"""Phases whose colour needs light text."""
LEFT, ZERO, WIDE_ZERO = 262.0, 432.0, 742.0
"""The zero is at `WIDE_ZERO` where prefills were read meanwhile: most of their reading is left of it."""
_PAD = 9.0
_LETTER, _THINNEST = 5.6, 0.75


@dataclass(frozen=True, slots=True)
class Scale:
    """The mapping of times to pixels, by the time that fits on either side of the zero, which is at `zero`."""

    before_ns: float
    after_ns: float
    zero: float = ZERO

    def x(self, at_ns: float) -> float:
        """The position of a time relative to the zero, clipped to the edges."""
        if at_ns < 0:
            return max(LEFT, self.zero + at_ns / self.before_ns * (self.zero - LEFT))
        return min(RIGHT, self.zero + at_ns / self.after_ns * (RIGHT - self.zero))

    def bar(self, span: Span, zero_ns: int) -> tuple[float, float]:
        """The left edge and the width of a span's bar, which is never too thin to be seen."""
        begun, ended = self.x(span.begun_ns - zero_ns), self.x(span.ended_ns - zero_ns)
        return begun, max(ended - begun, _THINNEST)


def style() -> str:
    """The CSS of a waterfall, in a picture or on a page."""
    colours = [
        f".p-{phase}{{fill:{colour}}}.on-{phase}{{fill:{'#ffffff' if phase in _DARK else '#111827'}}}"
        for phase, colour in _COLOURS.items()
    ]
    return "".join((THEME, *colours))


def scale_for(timelines: Sequence[Timeline]) -> Scale:
    """A scale that all of these fit on, except for blocks that the producer holds after the handover."""
    before = max(
        (one.zero_ns - span.begun_ns for one in timelines for span in one.before), default=0
    )
    ends = [
        span.ended_ns - one.zero_ns for one in timelines for span in (*one.to_load, *one.from_load)
    ]
    ends += [worker.ended_ns - one.zero_ns for one in timelines for worker in one.workers]
    after = max(ends or [one.held.lasted_ns for one in timelines if one.held], default=0)
    return Scale(
        max(1, before), max(1, after), WIDE_ZERO if any(map(chunk_rows, timelines)) else ZERO
    )


def draw(timelines: Sequence[Timeline], of_all: int, notes: Sequence[str] = ()) -> str:
    """One SVG document.

    Args:
        timelines: those to show, in this order.
        of_all: number of all handovers.
        notes: shown below the picture, e.g. that clocks were shifted.
    """
    scale = scale_for(timelines)
    header, top = legend(timelines, 66)
    top += 24
    rows: list[str] = []
    bottom = top
    for one in timelines:
        rows += row(one, scale, bottom + _PAD)
        bottom += height_of(one) + 2 * _PAD
    height = bottom + 12 + 16 * len(notes)
    everything = counted(of_all, "handover")
    title = (
        f"The {len(timelines)} slowest of {everything}" if len(timelines) < of_all else everything
    )
    about = (
        "0: the prompt is computed. Left of it the prefill, right of it the handover; two scales."
    )
    parts = [
        f"<style>{style()}</style>",
        element("rect", width=WIDTH, height=height, class_="paper"),
        text(title, 16, 30, 17, class_="ink", font_weight=650),
        text(about, 16, 50, 12, class_="muted"),
        *header,
        *axis(scale, top, bottom),
        *rows,
        *(
            text(note, 16, bottom + 18 + 16 * index, 11.5, class_="muted")
            for index, note in enumerate(notes)
        ),
    ]
    return document(WIDTH, height, parts)


def legend(timelines: Sequence[Timeline], top: float) -> tuple[list[str], float]:
    """The phases that occur, in the order of a handover, and the bottom of the legend."""
    seen = {span.phase for one in timelines for span in one.spans}
    seen |= {span.phase for one in timelines for worker in one.workers for span in worker.spans}
    seen |= {
        chunk.span.phase for one in timelines for chunks in chunk_rows(one) for chunk in chunks
    }
    parts, x = [], 16.0
    for phase in filter(seen.__contains__, Phase):
        width = 36 + 6.3 * len(phase.label)
        if x + width > WIDTH - 16:
            x, top = 16.0, top + 18
        parts.append(
            element(
                "rect",
                x=x,
                y=top,
                width=12,
                height=12,
                rx=2,
                class_=f"p-{phase}",
                hint=phase.meaning,
            )
        )
        parts.append(text(phase.label, x + 17, top + 10, 11.5, class_="muted"))
        x += width
    return parts, top + 18


def axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Grid lines with their times, on both sides."""
    before = ticks(scale.before_ns if scale.before_ns > 1 else 0, 2)
    for sign, times in ((-1, before[1:]), (1, ticks(scale.after_ns, 6))):
        for at_ns in times:
            x = scale.x(sign * at_ns)
            content = f"{'−' if sign < 0 else ''}{format_time(at_ns)}" if at_ns else "0"
            yield element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid" if at_ns else "zero")
            yield text(content, x, top - 5, 10.5, text_anchor="middle", class_="muted")


def height_of(one: Timeline) -> float:
    """The height of a row."""
    texts = 41 if one.missing else 29
    return max(
        texts, BAR + GAP + HELD + 1 + (len(chunk_rows(one)) + len(shown_workers(one))) * (THIN + 1)
    )


def row(one: Timeline, scale: Scale, top: float) -> Iterator[str]:
    """The elements of one row, from `top` on."""
    handover, right = one.handover, RIGHT + 14
    ids = (
        f"producer {handover.producer_request or '?'}\nconsumer {handover.consumer_request or '?'}"
    )
    tokens = f" · {handover.tokens} tokens" if handover.tokens else ""
    yield text(name_of(one), 16, top + 12, 12.5, class_="ink", font_weight=600, hint=ids)
    yield text(f"{format_engines(one)}{tokens}"[:48], 16, top + 27, 10.5, class_="muted")
    yield from segments((*one.before, *one.path), one.zero_ns, scale, top, BAR)
    if one.held is not None:
        yield from _held(one.held, one.zero_ns, scale, top + BAR + GAP)
    y = top + BAR + GAP + HELD + 1
    for chunks in chunk_rows(one):
        yield from _chunks(chunks, one.zero_ns, scale, y)
        y += THIN + 1
    for worker in shown_workers(one):
        yield from segments(
            worker.spans, one.zero_ns, scale, y, THIN, f"{worker.load.process.place} "
        )
        y += THIN + 1
    yield text(format_lasted(one), right, top + 12, 13, class_="ink", font_weight=650)
    yield text(
        format_result(one)[:34], right, top + 27, 10.5, class_="muted" if one.is_good else "bad"
    )
    yield text(format_missing(one)[:34], right, top + 39, 9.5, class_="muted")


def chunk_rows(one: Timeline) -> list[tuple[Chunk, ...]]:
    """The steps of a prefill that was read meanwhile, and the reads of the worker that ended last."""
    return [chunks for chunks in (one.steps, one.last.chunks if one.last else ()) if chunks]


def shown_workers(one: Timeline) -> tuple[WorkerSpans, ...]:
    """The slowest `MOST_WORKERS`, in the order of their places; none where there is only one."""
    if len(one.workers) < 2:
        return ()
    kept = sorted(one.workers, key=lambda worker: worker.ended_ns)[-MOST_WORKERS:]
    return tuple(worker for worker in one.workers if worker in kept)


def segments(
    spans: Iterable[Span], zero_ns: int, scale: Scale, y: float, height: float, whose: str = ""
) -> Iterator[str]:
    """Phases with tooltips, and with names where there is space; `whose` begins the tooltips."""
    for span in spans:
        phase, lasted = span.phase, format_time(span.lasted_ns)
        begun, width = scale.bar(span, zero_ns)
        if not span.lasted_ns and width == _THINNEST:
            continue
        hint = f"{whose}{phase.label}: {lasted} – {phase.meaning}"
        yield element(
            "rect", x=begun, y=y, width=width, height=height, class_=f"p-{phase}", hint=hint
        )
        name = next(
            (
                name
                for name in (f"{phase.label} {lasted}", phase.label)
                if len(name) * _LETTER + 6 <= width
            ),
            "",
        )
        if name and height >= BAR:
            at = (begun + width / 2, y + height / 2 + 3.7)
            yield text(
                name, *at, 10.5, text_anchor="middle", class_=f"on-{phase}", pointer_events="none"
            )


def _chunks(chunks: Iterable[Chunk], zero_ns: int, scale: Scale, y: float) -> Iterator[str]:
    """A row of thin bars, every second one paler, since steps touch one another."""
    for index, chunk in enumerate(chunks):
        span, (x, width) = chunk.span, scale.bar(chunk.span, zero_ns)
        hint = f"{span.phase.label} to token {chunk.stop_token}: {format_time(span.lasted_ns)} – {span.phase.meaning}"
        shape = {"x": x, "y": y, "width": width, "height": THIN}
        yield element(
            "rect", hint=hint, class_=f"p-{span.phase}", opacity=1 - index % 2 * 0.4, **shape
        )


def _held(span: Span, zero_ns: int, scale: Scale, y: float) -> Iterator[str]:
    x, width = scale.bar(span, zero_ns)
    hint = f"held by the producer: {format_time(span.lasted_ns)}"
    yield element("rect", x=x, y=y, width=width, height=HELD, class_="p-held", hint=hint)
    if span.ended_ns - zero_ns > scale.after_ns * 1.001:
        points = f"{RIGHT},{y - 2} {RIGHT + 6},{y + HELD / 2} {RIGHT},{y + HELD + 2}"
        yield element("polygon", points=points, class_="p-held", hint="it goes on")
