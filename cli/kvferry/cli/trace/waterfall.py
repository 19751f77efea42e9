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
BAR = 17.0
THIN = 6.0
HELD = 3.0
GAP = 2.0
MAX_WORKERS = 16
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
LEFT = 262.0
ZERO = 432.0
WIDE_ZERO = 742.0
"""The place of the zero where prefills were read meanwhile: most of their reading is left of it."""
_PAD = 9.0
_LETTER = 5.6
_THINNEST = 0.75


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
        begun = self.x(span.begun_ns - zero_ns)
        ended = self.x(span.ended_ns - zero_ns)
        return begun, max(ended - begun, _THINNEST)


def style() -> str:
    """The CSS of a waterfall, in a picture or on a page."""
    rules = [THEME]
    for phase, colour in _COLOURS.items():
        ink = "#ffffff" if phase in _DARK else "#111827"
        rules.append(f".p-{phase}{{fill:{colour}}}.on-{phase}{{fill:{ink}}}")
    return "".join(rules)


def scale_for(timelines: Sequence[Timeline]) -> Scale:
    """A scale that all of these fit on, except for blocks that the producer holds after the handover."""
    before_ns = 1
    ends_ns: list[int] = []
    held_ns: list[int] = []
    for timeline in timelines:
        for span in timeline.before:
            before_ns = max(before_ns, timeline.zero_ns - span.begun_ns)
        for span in (*timeline.to_load, *timeline.from_load):
            ends_ns.append(span.ended_ns - timeline.zero_ns)
        for worker in timeline.workers:
            ends_ns.append(worker.ended_ns - timeline.zero_ns)
        if timeline.held:
            held_ns.append(timeline.held.lasted_ns)
    # Held blocks decide only where nothing else is right of the zero.
    after_ns = max([1, *(ends_ns or held_ns)])
    zero = WIDE_ZERO if any(chunk_rows(timeline) for timeline in timelines) else ZERO
    return Scale(before_ns, after_ns, zero)


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
    for timeline in timelines:
        rows += row(timeline, scale, bottom + _PAD)
        bottom += height_of(timeline) + 2 * _PAD
    height = bottom + 12 + 16 * len(notes)
    title = counted(of_all, "handover")
    if len(timelines) < of_all:
        title = f"The {len(timelines)} slowest of {title}"
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
    phases: set[Phase] = set()
    for timeline in timelines:
        phases.update(span.phase for span in timeline.spans)
        for worker in timeline.workers:
            phases.update(span.phase for span in worker.spans)
        for chunks in chunk_rows(timeline):
            phases.update(chunk.span.phase for chunk in chunks)
    parts = []
    x = 16.0
    for phase in Phase:
        if phase not in phases:
            continue
        width = 36 + 6.3 * len(phase.label)
        if x + width > WIDTH - 16:
            x = 16.0
            top += 18
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
    if scale.before_ns > 1:
        for before_ns in ticks(scale.before_ns, 2)[1:]:
            yield from _tick(scale.x(-before_ns), f"−{format_time(before_ns)}", top, bottom)
    yield from _tick(scale.x(0), "0", top, bottom, line="zero")
    for after_ns in ticks(scale.after_ns, 6)[1:]:
        yield from _tick(scale.x(after_ns), format_time(after_ns), top, bottom)


def _tick(x: float, label: str, top: float, bottom: float, *, line: str = "grid") -> Iterator[str]:
    yield element("line", x1=x, x2=x, y1=top, y2=bottom, class_=line)
    yield text(label, x, top - 5, 10.5, text_anchor="middle", class_="muted")


def height_of(timeline: Timeline) -> float:
    """The height of a row."""
    texts = 41 if timeline.missing else 29
    thin_bars = len(chunk_rows(timeline)) + len(shown_workers(timeline))
    bars = BAR + GAP + HELD + 1 + thin_bars * (THIN + 1)
    return max(texts, bars)


def row(timeline: Timeline, scale: Scale, top: float) -> Iterator[str]:
    """The elements of one row, from `top` on."""
    handover = timeline.handover
    zero_ns = timeline.zero_ns
    producer_request = handover.producer_request or "?"
    consumer_request = handover.consumer_request or "?"
    ids = f"producer {producer_request}\nconsumer {consumer_request}"
    about = format_engines(timeline)
    if handover.tokens:
        about += f" · {handover.tokens} tokens"
    yield text(name_of(timeline), 16, top + 12, 12.5, class_="ink", font_weight=600, hint=ids)
    yield text(about[:48], 16, top + 27, 10.5, class_="muted")
    yield from segments((*timeline.before, *timeline.path), zero_ns, scale, top, BAR)
    if timeline.held is not None:
        yield from _held(timeline.held, zero_ns, scale, top + BAR + GAP)
    y = top + BAR + GAP + HELD + 1
    for chunks in chunk_rows(timeline):
        yield from _chunks(chunks, zero_ns, scale, y)
        y += THIN + 1
    for worker in shown_workers(timeline):
        whose = f"{worker.load.process.place} "
        yield from segments(worker.spans, zero_ns, scale, y, THIN, whose)
        y += THIN + 1
    right = RIGHT + 14
    ink = "muted" if timeline.is_good else "bad"
    yield text(format_lasted(timeline), right, top + 12, 13, class_="ink", font_weight=650)
    yield text(format_result(timeline)[:34], right, top + 27, 10.5, class_=ink)
    yield text(format_missing(timeline)[:34], right, top + 39, 9.5, class_="muted")


def chunk_rows(timeline: Timeline) -> list[tuple[Chunk, ...]]:
    """The steps of a prefill that was read meanwhile, and the reads of the worker that ended last."""
    rows = []
    if timeline.steps:
        rows.append(timeline.steps)
    if timeline.last and timeline.last.chunks:
        rows.append(timeline.last.chunks)
    return rows


def shown_workers(timeline: Timeline) -> tuple[WorkerSpans, ...]:
    """The slowest `MAX_WORKERS`, in the order of their places; none where there is only one."""
    if len(timeline.workers) < 2:
        return ()
    slowest = sorted(timeline.workers, key=lambda worker: worker.ended_ns)[-MAX_WORKERS:]
    return tuple(worker for worker in timeline.workers if worker in slowest)


def segments(
    spans: Iterable[Span], zero_ns: int, scale: Scale, y: float, height: float, whose: str = ""
) -> Iterator[str]:
    """Phases with tooltips, and with names where there is space; `whose` begins the tooltips."""
    for span in spans:
        phase = span.phase
        lasted = format_time(span.lasted_ns)
        begun, width = scale.bar(span, zero_ns)
        if not span.lasted_ns and width == _THINNEST:
            continue
        hint = f"{whose}{phase.label}: {lasted} – {phase.meaning}"
        yield element(
            "rect", x=begun, y=y, width=width, height=height, class_=f"p-{phase}", hint=hint
        )
        if height < BAR:
            continue
        # The longer name that fits into the bar.
        for name in (f"{phase.label} {lasted}", phase.label):
            if len(name) * _LETTER + 6 <= width:
                yield text(
                    name,
                    begun + width / 2,
                    y + height / 2 + 3.7,
                    10.5,
                    text_anchor="middle",
                    class_=f"on-{phase}",
                    pointer_events="none",
                )
                break


def _chunks(chunks: Iterable[Chunk], zero_ns: int, scale: Scale, y: float) -> Iterator[str]:
    """A row of thin bars, every second one paler, since steps touch one another."""
    for index, chunk in enumerate(chunks):
        span = chunk.span
        x, width = scale.bar(span, zero_ns)
        what = f"{span.phase.label} to token {chunk.stop_token}: {format_time(span.lasted_ns)}"
        yield element(
            "rect",
            hint=f"{what} – {span.phase.meaning}",
            class_=f"p-{span.phase}",
            opacity=0.6 if index % 2 else 1,
            x=x,
            y=y,
            width=width,
            height=THIN,
        )


def _held(span: Span, zero_ns: int, scale: Scale, y: float) -> Iterator[str]:
    x, width = scale.bar(span, zero_ns)
    hint = f"held by the producer: {format_time(span.lasted_ns)}"
    yield element("rect", x=x, y=y, width=width, height=HELD, class_="p-held", hint=hint)
    if span.ended_ns - zero_ns > scale.after_ns * 1.001:
        points = f"{RIGHT},{y - 2} {RIGHT + 6},{y + HELD / 2} {RIGHT},{y + HELD + 2}"
        yield element("polygon", points=points, class_="p-held", hint="it goes on")
