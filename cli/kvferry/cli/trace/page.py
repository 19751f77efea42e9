"""The HTML page: a row for every shown handover, with all details after a click. It loads no other files and runs no
scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kvferry.cli.formatting import decimal_bytes
from kvferry.cli.svg import element, plain
from kvferry.cli.trace.bars import Scale, axis, bar, height_of, scale_for, segment, shown_workers
from kvferry.cli.trace.report import Report, format_engines, format_rate, format_time, headline, name_of
from kvferry.cli.trace.theme import PHASE_THEMES, class_of, label_of, meaning_of, style
from kvferry.cli.trace.waterfall import phases_of
from kvferry.trace.summary import Durations
from kvferry.trace.timeline import Timeline, WorkerSpans

_WIDTH, _ZERO, _RIGHT = 720.0, 150.0, 706.0
_NAMES, _LANE = 60.0, 12.0


def page(report: Report, shown: int) -> Iterator[str]:
    """The HTML document in pieces.

    Args:
        shown: most handovers that have a row.
    """
    rows = report.timelines[:shown]
    scale = scale_for(rows, 4, _ZERO, _RIGHT)
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{_POLICY}<title>Handovers</title>\n'
    yield f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}{style()}</style></head><body>\n'
    yield f"<h1>Handovers</h1>\n<p>{_summary(report, len(rows))}</p>\n"
    yield from (f'<p class="note">{_text(note)}</p>\n' for note in report.notes)
    yield _phases(report.durations)
    yield "<h2>The slowest first</h2>\n<p>0 is where the prompt is computed: left of it the prefill, right of it the "
    yield "handover, on two scales that all rows share. Thin bars are workers, the grey line is how long the producer "
    yield "keeps the blocks. Open a row for ids, workers and times.</p>\n"
    yield f'<p class="legend">{_legend(rows)}</p>\n'
    yield '<div class="head"><span>request</span>'
    yield _drawing(axis(scale, 18, 26), 26)
    yield "<span>handover</span></div>\n"
    for one in rows:
        yield _row(one, scale)
    yield "</body></html>\n"


def _text(content: str) -> str:
    return plain(content)


def _summary(report: Report, shown: int) -> str:
    few = f" The {shown} slowest have a row." if shown < len(report.timelines) else ""
    return _text(f"{headline(report)}.{few}")


def _phases(lasted: Sequence[Durations]) -> str:
    rows = "".join(
        f"<tr><td>{_swatch(one.phase)}{_text(label_of(one.phase))}</td><td>{one.count}</td><td>{format_time(one.p50_ns)}</td>"
        f"<td>{format_time(one.p99_ns)}</td><td>{format_time(one.max_ns)}</td><td>{_text(meaning_of(one.phase))}</td></tr>"
        for one in lasted
    )
    head = "<tr><th>phase</th><th>times</th><th>p50</th><th>p99</th><th>longest</th><th>what it is</th></tr>"
    return f'<table class="phases">{head}{rows}</table>\n'


def _legend(timelines: Sequence[Timeline]) -> str:
    return "".join(
        f'<span title="{escape(PHASE_THEMES[phase].meaning)}">{_swatch(phase)}{_text(PHASE_THEMES[phase].label)}</span>'
        for phase in phases_of(timelines)
    )


def _swatch(phase: str) -> str:
    if phase not in PHASE_THEMES:
        return '<i class="swatch"></i>'
    box = element("rect", width=11, height=11, rx=2, class_=class_of(phase))
    return f'<svg class="swatch" width="11" height="11" aria-hidden="true">{box}</svg>'


def _row(one: Timeline, scale: Scale) -> str:
    good = one.is_good
    outcome = (format_rate(one) or one.outcome) if good else one.outcome
    tokens = f" · {one.handover.tokens} tokens" if one.handover.tokens else ""
    missing = f"<small>not recorded: {_text(', '.join(one.missing))}</small>" if one.missing else ""
    lasted = "–" if one.lasted_ns is None else format_time(one.lasted_ns)
    return (
        f"<details><summary><span><b>{_text(name_of(one, 40))}</b>"
        f"<small>{_text(format_engines(one) + tokens)}</small></span>"
        f"{_drawing(bar(one, scale, 2), height_of(one) + 4)}"
        f"<span><b>{lasted}</b><small{'' if good else ' class=wrong'}>{_text(outcome)}</small>"
        f"{missing}</span></summary>\n"
        f"{_ids(one)}{_details(one)}</details>\n"
    )


def _ids(one: Timeline) -> str:
    handover = one.handover
    arrivals = (handover.decode and handover.decode.arrived, handover.prefill and handover.prefill.arrived)
    known = {
        "producer's": handover.producer_request,
        "consumer's": handover.consumer_request,
        "lease": f"{handover.lease.boot} {handover.lease.epoch}" if handover.lease else "",
        "traceparent": next((arrival.traceparent for arrival in arrivals if arrival and arrival.traceparent), ""),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in known.items() if value)
    return f"<dl>{rows}</dl>"


def _details(one: Timeline) -> str:
    spans = (*one.before, *one.path, *((one.held,) if one.held else ()))
    rows = "".join(
        f"<tr><td>{_swatch(span.phase)}{_text(label_of(span.phase))}</td><td>{format_time(span.lasted_ns)}</td>"
        f"<td>{(span.begun_ns - one.zero_ns) / 1e6:.3f} ms</td></tr>"
        for span in spans
    )
    phases = f"<table><tr><th>phase</th><th>lasted</th><th>from</th></tr>{rows}</table>"
    return f'<div class="more">{phases}<div>{_workers(one) if one.workers else ""}{_magnified(one)}</div></div>'


def _workers(one: Timeline) -> str:
    rows = "".join(_worker(worker) for worker in one.workers)
    names = ("worker", "host", "load", "bytes", "staged", "descriptors", "relayout", "failed")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _worker(worker: WorkerSpans) -> str:
    process, reported = worker.load.process, worker.load.ended
    cells = (
        process.place or "?",
        process.host,
        format_time(worker.ended_ns - worker.spans[0].begun_ns),
        decimal_bytes(reported.bytes),
        decimal_bytes(reported.staged_bytes),
        str(reported.descriptors),
        format_time(reported.relayout_ns),
    )
    shown = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    return f"<tr>{shown}<td class=wrong>{_text(reported.reason)}</td></tr>"


def _magnified(one: Timeline) -> str:
    """The handover alone, on a scale of its own."""
    lanes = [("", one.path), *((worker.load.process.place or "?", worker.spans) for worker in shown_workers(one))]
    longest = max((span.ended_ns - one.zero_ns for _, spans in lanes for span in spans), default=0)
    scale = Scale(_NAMES, _NAMES, _RIGHT, 1, max(1, longest))
    bottom = 22 + _LANE * len(lanes)
    parts = list(axis(scale, 18, bottom))
    for index, (place, spans) in enumerate(lanes):
        y = 22 + _LANE * index
        parts.append(element("text", plain(place[:9]), x=4, y=y + 8, font_size=10.5, class_="muted"))
        parts += (piece for span in spans for piece in segment(span, one.zero_ns, scale, y, _LANE - 3, place))
    return _drawing(iter(parts), bottom + 2)


def _drawing(parts: Iterator[str], height: float) -> str:
    return element("svg", *parts, viewBox=f"0 0 {_WIDTH:.0f} {height:g}", width=_WIDTH, height=height)


_POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
_STYLE = """
:root{color-scheme:light dark;--ink:#0f172a;--muted:#5b6778;--line:#dde3ea;--band:#f5f7fa;--bad:#c02626}
@media (prefers-color-scheme:dark){:root{--ink:#e8edf4;--muted:#98a5b6;--line:#2d3644;--band:#1a202a;--bad:#ff8a80}}
@media (prefers-color-scheme:dark){body{background:#12161d}}
body{font:14px/1.45 Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;color:var(--ink);
max-width:1180px;margin:24px auto;padding:0 16px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:26px 0 4px}p{margin:4px 0;max-width:90ch}
.note{border-left:3px solid #f3b62c;padding:2px 10px;background:var(--band);overflow-wrap:anywhere}
small{display:block;color:var(--muted);font-size:12px;overflow-wrap:anywhere}.wrong{color:var(--bad)}
table{border-collapse:collapse;margin:8px 0}th{color:var(--muted);font-weight:500;text-align:left}
th,td{padding:2px 14px 2px 0;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}
.phases td:nth-child(n+2):nth-child(-n+5),.phases th:nth-child(n+2):nth-child(-n+5){text-align:right}
.swatch{margin-right:7px;vertical-align:-1px;display:inline-block;width:11px;height:11px}
.legend span{display:inline-block;margin-right:16px}
.head,summary{display:grid;grid-template-columns:240px minmax(0,1fr) 170px;gap:12px;padding:6px 8px;align-items:start}
.head{color:var(--muted);position:sticky;top:0;background:var(--band);z-index:1}
svg{max-width:100%;height:auto;display:block}.head svg{overflow:visible}svg.swatch{display:inline-block}
details{border-bottom:1px solid var(--line)}summary{cursor:pointer;list-style:none}
summary::-webkit-details-marker{display:none}summary:hover,details[open]>summary{background:var(--band)}
summary b{overflow-wrap:anywhere}dl{display:grid;grid-template-columns:110px 1fr;margin:6px 8px}
dt{color:var(--muted)}dd{margin:0;font-family:ui-monospace,monospace;font-size:12.5px;overflow-wrap:anywhere}
.more{display:flex;flex-wrap:wrap;gap:28px;padding:0 8px 12px}
"""
