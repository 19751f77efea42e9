"""The bar of one handover: its phases in order, and below it a thin bar for every worker.

Left of the zero is the time before the prompt was computed, right of it the handover; each side has its own scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvferry.cli.svg import element, plain
from kvferry.cli.trace.report import format_time, ticks
from kvferry.cli.trace.theme import class_of, theme_of
from kvferry.trace.timeline import Span, Timeline, WorkerSpans

BAR, THIN, GAP, HELD = 17.0, 5.0, 2.0, 3.0
MOST_WORKERS = 16
"""Most thin bars of one handover: those of the slowest workers."""
_LETTER = 5.6


@dataclass(frozen=True, slots=True)
class Scale:
    """The mapping of times to pixels.

    Attributes:
        left, zero, right: in pixels.
        before_ns, after_ns: the time that fits on either side of the zero.
    """

    left: float
    zero: float
    right: float
    before_ns: float
    after_ns: float

    def x(self, at_ns: float) -> float:
        """The position of a time relative to the zero, clipped to the edges."""
        if at_ns < 0:
            return max(self.left, self.zero + at_ns / self.before_ns * (self.zero - self.left))
        return min(self.right, self.zero + at_ns / self.after_ns * (self.right - self.zero))


def scale_for(timelines: Iterable[Timeline], left: float, zero: float, right: float) -> Scale:
    """A scale that all of these fit on, except for blocks that the producer holds after the handover."""
    timelines = tuple(timelines)
    before = max((one.zero_ns - span.begun_ns for one in timelines for span in one.before), default=0)
    ends = [span.ended_ns - one.zero_ns for one in timelines for span in (*one.to_load, *one.from_load)]
    ends += [worker.ended_ns - one.zero_ns for one in timelines for worker in one.workers]
    after = max(ends or [one.held.lasted_ns for one in timelines if one.held], default=0)
    return Scale(left, zero, right, max(1, before), max(1, after))


def height_of(one: Timeline) -> float:
    """The height of a bar with those of its workers."""
    thin = min(len(one.workers), MOST_WORKERS) if len(one.workers) > 1 else 0
    return BAR + GAP + HELD + thin * (THIN + 1)


def bar(one: Timeline, scale: Scale, top: float) -> Iterator[str]:
    """The elements of one bar, from `top` on."""
    for span in (*one.before, *one.path):
        yield from segment(span, one.zero_ns, scale, top, BAR)
    if one.held is not None:
        yield from _held(one.held, one.zero_ns, scale, top + BAR + GAP)
    if len(one.workers) < 2:
        return
    y = top + BAR + GAP + HELD + 1
    for worker in shown_workers(one):
        for span in worker.spans:
            yield from segment(span, one.zero_ns, scale, y, THIN, worker.load.process.place)
        y += THIN + 1


def shown_workers(one: Timeline) -> tuple[WorkerSpans, ...]:
    """All workers, or the slowest `MOST_WORKERS`, in the order of their places."""
    kept = sorted(one.workers, key=lambda worker: worker.ended_ns)[-MOST_WORKERS:]
    return tuple(worker for worker in one.workers if worker in kept)


def axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Grid lines with their times, on both sides."""
    sides = (
        (-1, ticks(scale.before_ns if scale.before_ns > 1 else 0, 2)),
        (1, ticks(scale.after_ns, 6)),
    )
    for sign, times in sides:
        for at_ns in times[1:]:
            x = scale.x(sign * at_ns)
            yield element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid")
            content = f"{'−' if sign < 0 else ''}{format_time(at_ns)}"
            yield element("text", plain(content), x=x, y=top - 5, font_size=10.5, text_anchor="middle", class_="muted")
    yield element("line", x1=scale.zero, x2=scale.zero, y1=top, y2=bottom, class_="zero")
    yield element("text", "0", x=scale.zero, y=top - 5, font_size=10.5, text_anchor="middle", class_="muted")


def segment(span: Span, zero_ns: int, scale: Scale, y: float, height: float, whose: str = "") -> Iterator[str]:
    """One phase, with its name if there is space, and a tooltip.

    Args:
        whose: the worker's place; empty for the whole engine.
    """
    begun, ended = scale.x(span.begun_ns - zero_ns), scale.x(span.ended_ns - zero_ns)
    shown = theme_of(span.phase)
    who = f"{whose} " if whose else ""
    hint = f"{who}{shown.label}: {format_time(span.lasted_ns)}{f' – {shown.meaning}' if shown.meaning else ''}"
    title = element("title", plain(hint))
    width = max(ended - begun, 0.75 if span.lasted_ns else 0)
    if not width:
        return
    yield element("rect", title, x=begun, y=y, width=width, height=height, class_=class_of(span.phase))
    content = next(
        (text for text in (f"{shown.label} {format_time(span.lasted_ns)}", shown.label) if _fits(text, width)), ""
    )
    if content and height >= BAR:
        on = class_of(span.phase).replace("p-", "on-", 1)
        place = {"x": (begun + ended) / 2, "y": y + height / 2 + 3.7}
        yield element(
            "text", plain(content), **place, font_size=10.5, text_anchor="middle", class_=on, pointer_events="none"
        )


def _held(span: Span, zero_ns: int, scale: Scale, y: float) -> Iterator[str]:
    begun, ended = scale.x(span.begun_ns - zero_ns), scale.x(span.ended_ns - zero_ns)
    title = element("title", plain(f"held by the producer: {format_time(span.lasted_ns)}"))
    yield element("rect", title, x=begun, y=y, width=max(ended - begun, 0.75), height=HELD, class_="p-held", rx=1)
    if span.ended_ns - zero_ns > scale.after_ns * 1.001:
        points = f"{scale.right},{y - 2} {scale.right + 6},{y + HELD / 2} {scale.right},{y + HELD + 2}"
        yield element("polygon", element("title", plain("it goes on")), points=points, class_="p-held")


def _fits(content: str, width: float) -> bool:
    return len(content) * _LETTER + 6 <= width
