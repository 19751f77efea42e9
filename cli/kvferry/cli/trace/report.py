"""The summary of a recording, as tables and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvferry.cli.formatting import (
    decimal_bytes,
    digits,
    format_time,
    print_line,
    print_table,
)
from kvferry.plan.wording import counted
from kvferry.trace.events import Phase
from kvferry.trace.summary import Durations, Summary
from kvferry.trace.timeline import Span, Timeline, WorkerSpans

SCHEMA = 1
# vLLM's router puts both engines' addresses in front of the request's own id.
_ROUTED = re.compile(r"^(?:chat)?cmpl-___prefill_addr_.*___decode_addr_[^_]*_(.+)$")
# vLLM draws an engine's id as one of these; its first part is enough to tell engines apart.
_UUID = re.compile(r"([0-9a-f]{8})-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_PHASE_COLUMNS = 5
"""Phases with a column of their own: as many as fit beside a request's id in 80 letters."""


def format_result(timeline: Timeline) -> str:
    """`537 MB at 12.3 GB/s` of a load, `537 MB, 93% early` of one that followed the prefill, else the outcome."""
    if not timeline.bytes or not timeline.is_good:
        return timeline.outcome
    result = decimal_bytes(timeline.bytes)
    if timeline.early_bytes:
        result += f", {100 * timeline.early_bytes // timeline.bytes}% early"
    if timeline.gb_s is not None:
        result += f" at {timeline.gb_s:.3g} GB/s"
    return result


def short_id(request: str, max_length: int = 25) -> str:
    """The distinctive part of a request id, without the prefix of vLLM's router."""
    # Longer ones, as of real engines, would leave the columns of phases too narrow for their names.
    routed = _ROUTED.match(request)
    name = routed[1] if routed else request
    if len(name) <= max_length:
        return name
    num_first = max_length // 2 - 1
    num_last = max_length - max_length // 2
    return f"{name[:num_first]}…{name[-num_last:]}"


def name_of(timeline: Timeline) -> str:
    """A request's name in tables: its id in the producer, else in the consumer."""
    handover = timeline.handover
    return short_id(handover.producer_request or handover.consumer_request or "?")


def format_engines(timeline: Timeline) -> str:
    """`prefill-0 → decode-1`, a UUID by its first part, and `?` for an engine that was not recorded."""
    handover = timeline.handover
    names = []
    for engine in (handover.producer, handover.consumer):
        name = _UUID.sub(r"\1", engine or "?")
        names.append(short_id(name, 20))
    return " → ".join(names)


def print_listing(summary: Summary, slowest: int) -> None:
    """Print the tables, and the notes below them."""
    shown = summary.timelines[:slowest]
    by_outcome = [f"{number} {outcome}" for outcome, number in summary.outcomes.items()]
    handovers = counted(len(summary.timelines), "handover")
    processes = "1 process"
    if summary.num_processes != 1:
        processes = f"{summary.num_processes} processes"
    if not shown:
        print_line(f"no handover was recorded by {processes}")
        _print_notes(summary)
        return
    print_line(f"{handovers} of {processes}: {', '.join(by_outcome)}")
    print()
    print_table(
        ("phase", ">times", ">p50", ">p99", ">longest", "what it is"),
        (_duration_row(lasted) for lasted in summary.durations),
    )
    print("\nthe slowest handovers:\n")
    print_table(
        ("request", "engines", ">tokens", ">handover", "cause", "result"),
        (_row(timeline) for timeline in shown),
    )
    phases = _longest_phases(shown)
    if phases:
        print("\ntheir phases, in ms:\n")
        # A word a line, or narrow columns would fold the words.
        names = [f">{phase.label}".replace(" ", "\n") for phase in phases]
        print_table(
            ("request", *names, ">other"),
            (_phase_row(timeline, phases) for timeline in shown),
        )
    _print_notes(summary)


def _print_notes(summary: Summary) -> None:
    for note in summary.notes:
        print()
        print_line(note)


def _duration_row(lasted: Durations) -> tuple[str, ...]:
    return (
        lasted.phase.label,
        str(lasted.count),
        format_time(lasted.p50_ns),
        format_time(lasted.p99_ns),
        format_time(lasted.max_ns),
        lasted.phase.meaning,
    )


def _row(timeline: Timeline) -> tuple[str, ...]:
    result = format_result(timeline)
    if timeline.missing:
        result = f"{result}; not recorded: {', '.join(timeline.missing)}"
    lasted = "–"
    if timeline.lasted_ns is not None:
        lasted = format_time(timeline.lasted_ns)
    return (
        name_of(timeline),
        format_engines(timeline),
        str(timeline.handover.tokens or "–"),
        lasted,
        format_cause(timeline),
        result,
    )


def format_cause(timeline: Timeline) -> str:
    """`decode queue 64 ms`, `reading 55 ms of tp1` where one of several workers was the last, or a dash."""
    cause = timeline.cause
    if cause is None:
        return "–"
    text = f"{cause.phase.label} {format_time(cause.lasted_ns)}"
    last = timeline.last
    if last is None or len(timeline.workers) == 1:
        return text
    if cause.phase in {span.phase for span in last.spans}:
        text += f" of {last.place}"
    return text


def _longest_phases(timelines: Sequence[Timeline]) -> list[Phase]:
    """The phases that took longest in any of these handovers, as many as have a column, in their order."""
    longest_ns: dict[Phase, int] = {}
    for timeline in timelines:
        for span in timeline.path:
            longest_ns[span.phase] = max(span.lasted_ns, longest_ns.get(span.phase, 0))
    chosen = sorted(longest_ns, key=longest_ns.__getitem__)[-_PHASE_COLUMNS:]
    return [phase for phase in Phase if phase in chosen]


def _phase_row(timeline: Timeline, phases: Sequence[Phase]) -> tuple[str, ...]:
    """The milliseconds of these phases, and of all others together."""
    lasted_ns = dict.fromkeys(phases, 0)
    other_ns = 0
    for span in timeline.path:
        if span.phase in lasted_ns:
            lasted_ns[span.phase] += span.lasted_ns
        else:
            other_ns += span.lasted_ns
    times = [f"{digits(each_ns / 1e6)}" for each_ns in (*lasted_ns.values(), other_ns)]
    return (name_of(timeline), *times)


def as_json(summary: Summary, slowest: int) -> dict[str, Any]:
    """The whole answer as plain values; times are nanoseconds since the epoch, lengths milliseconds."""
    return {
        "kvferry_trace": SCHEMA,
        "processes": summary.num_processes,
        "handovers": len(summary.timelines),
        "outcomes": summary.outcomes,
        "phases": {
            lasted.phase: {
                "count": lasted.count,
                "p50_ms": lasted.p50_ns / 1e6,
                "p99_ms": lasted.p99_ns / 1e6,
                "max_ms": lasted.max_ns / 1e6,
            }
            for lasted in summary.durations
        },
        "slowest": [_timeline(timeline) for timeline in summary.timelines[:slowest]],
        "notes": list(summary.notes),
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    handover = timeline.handover
    zero_ns = timeline.zero_ns
    lease = None
    if handover.lease:
        lease = {"boot": handover.lease.boot, "epoch": handover.lease.epoch}
    handover_ms = None
    if timeline.lasted_ns is not None:
        handover_ms = timeline.lasted_ns / 1e6
    held = None
    if timeline.held:
        held = _span(timeline.held, zero_ns)
    cause = None
    if timeline.cause:
        cause = timeline.cause.phase
    return {
        "producer": handover.producer,
        "producer_request": handover.producer_request,
        "consumer": handover.consumer,
        "consumer_request": handover.consumer_request,
        "lease": lease,
        "tokens": handover.tokens,
        "outcome": timeline.outcome,
        "missing": list(timeline.missing),
        "zero_ns": zero_ns,
        "handover_ms": handover_ms,
        "cause": cause,
        "bytes": timeline.bytes,
        "early_bytes": timeline.early_bytes,
        "gb_s": timeline.gb_s,
        "steps": [_span(step, zero_ns) for step in timeline.steps],
        "phases": [_span(span, zero_ns) for span in (*timeline.before, *timeline.path)],
        "held": held,
        "workers": [_worker(worker, zero_ns) for worker in timeline.workers],
    }


def _worker(worker: WorkerSpans, zero_ns: int) -> dict[str, Any]:
    return {
        "place": worker.load.process.place,
        "host": worker.load.process.host,
        **worker.load.figures,
        "stages": [_span(span, zero_ns) for span in worker.spans],
        "chunks": [_span(chunk, zero_ns) for chunk in worker.chunks],
    }


def _span(span: Span, zero_ns: int) -> dict[str, Any]:
    """A span with its begin and end in milliseconds after the zero."""
    plain = {
        "phase": span.phase,
        "begun_ms": (span.begun_ns - zero_ns) / 1e6,
        "ended_ms": (span.ended_ns - zero_ns) / 1e6,
    }
    if span.stop_token is not None:
        plain["stop_token"] = span.stop_token
    return plain
