"""The HTML page: a row for every shown handover, with all details after a click. It loads no other files and runs no
scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.cli.formatting import decimal_bytes
from kvferry.cli.svg import element, plain
from kvferry.cli.trace.report import Report, format_time
from kvferry.cli.trace.waterfall import WIDTH, axis, height_of, legend, row, scale_for, style
from kvferry.trace.timeline import Timeline


def page(report: Report, shown: int) -> Iterator[str]:
    """The HTML document in pieces.

    Args:
        shown: most handovers that have a row.
    """
    rows = report.timelines[:shown]
    scale = scale_for(rows)
    phases, bottom = legend(rows, 4)
    few = ""
    if len(rows) < len(report.timelines):
        few = f" The {len(rows)} slowest have a row."
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{_POLICY}<title>Handovers</title>\n'
    yield f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}{style()}</style></head><body>\n'
    yield f"<h1>Handovers</h1>\n<p>{plain(report.headline)}.{few}</p>\n"
    yield from (f"<p><em>{plain(note)}</em></p>\n" for note in report.notes)
    yield _table(("phase", "times", "p50", "p99", "longest", "what it is"), report.phase_rows())
    yield f"<h2>The slowest first</h2>\n<p>{_ABOUT}</p>\n"
    yield f"<header>{_drawing((*phases, *axis(scale, bottom + 20, bottom + 28)), bottom + 28)}</header>\n"
    for timeline in rows:
        drawn = _drawing(row(timeline, scale, 4), height_of(timeline) + 8)
        yield f"<details><summary>{drawn}</summary>\n{_details(timeline)}</details>\n"
    yield "</body></html>\n"


def _details(timeline: Timeline) -> str:
    """Ids, phases and workers of a handover."""
    handover = timeline.handover
    lease = ""
    if handover.lease:
        lease = f"{handover.lease.boot} {handover.lease.epoch}"
    ids = (
        ("producer's", handover.producer_request),
        ("consumer's", handover.consumer_request),
        ("lease", lease),
        ("traceparent", handover.traceparent),
    )
    phases = (
        (
            span.phase.label,
            format_time(span.lasted_ns),
            f"{(span.begun_ns - timeline.zero_ns) / 1e6:.3f} ms",
        )
        for span in timeline.spans
    )
    workers = (
        (
            worker.load.process.place or "?",
            worker.load.process.host,
            format_time(worker.ended_ns - worker.spans[0].begun_ns),
            decimal_bytes(worker.load.ended.bytes),
            decimal_bytes(worker.load.ended.staged_bytes),
            str(worker.load.ended.descriptors),
            format_time(worker.load.ended.relayout_ns),
            decimal_bytes(worker.load.ended.early_bytes),
            str(worker.load.ended.restarts),
            worker.load.ended.reason,
        )
        for worker in timeline.workers
    )
    heads = (
        "worker",
        "host",
        "load",
        "bytes",
        "staged",
        "descriptors",
        "relayout",
        "early",
        "restarts",
        "failed",
    )
    known_ids = [(name, value) for name, value in ids if value]
    tables = [
        _table(("id", ""), known_ids),
        _table(("phase", "lasted", "from"), phases),
    ]
    if timeline.workers:
        tables.append(_table(heads, workers))
    return "".join(tables)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = ""
    for row_cells in rows:
        cells = "".join(f"<td>{plain(cell)}</td>" for cell in row_cells)
        body += f"<tr>{cells}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>\n"


def _drawing(parts: Iterable[str], height: float) -> str:
    return element("svg", *parts, viewBox=f"0 0 {WIDTH:.0f} {height:g}", width=WIDTH, height=height)


_ABOUT = """0 is where the prompt is computed: left of it the prefill, right of it the handover, on two scales that all
rows share. Thin bars are the steps of a prefill that is read meanwhile, its reads, and workers; the grey line is how
long the producer keeps the blocks. Open a row for ids, workers and times."""
_POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.45 Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;max-width:1240px;margin:24px auto}
h1{font-size:22px}h2{font-size:17px}p{overflow-wrap:anywhere}
table{border-collapse:collapse;margin:8px 0}th{font-weight:500;text-align:left}
th,td{padding:2px 14px 2px 0;border-bottom:1px solid #8884;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
header{position:sticky;top:0;background:Canvas}svg{max-width:100%;height:auto;display:block}
details{border-bottom:1px solid #8884}summary{cursor:pointer;list-style:none}
summary::-webkit-details-marker{display:none}summary:hover{background:#8882}
"""
