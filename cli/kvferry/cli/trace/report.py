"""The summary of a recording, as tables and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from kvferry.cli.formatting import (
    decimal_bytes,
    digits,
    format_time,
    print_line,
    print_table,
)
from kvferry.plan.wording import counted
from kvferry.trace.events import Phase
from kvferry.trace.handover import Handover
from kvferry.trace.outcome import GOOD, missing_parts, outcome_of
from kvferry.trace.summary import Durations, Summary

SCHEMA = 1
# vLLM's router puts both engines' addresses in front of the request's own id.
_ROUTED = re.compile(r"^(?:chat)?cmpl-___prefill_addr_.*___decode_addr_[^_]*_(.+)$")
# vLLM draws an engine's id as one of these; its first part is enough to tell engines apart.
_UUID = re.compile(r"([0-9a-f]{8})-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_PHASE_COLUMNS = 5
"""Phases with a column of their own: as many as fit beside a request's id in 80 letters."""


def format_result(handover: Handover) -> str:
    """`537 MB at 12.3 GB/s` of a load, `537 MB, 93% early` of one that followed the prefill, else the outcome."""
    outcome = outcome_of(handover)
    if not handover.bytes or outcome not in GOOD:
        return outcome
    result = decimal_bytes(handover.bytes)
    if handover.early_bytes:
        result += f", {100 * handover.early_bytes // handover.bytes}% early"
    if handover.gb_s is not None:
        result += f" at {handover.gb_s:.3g} GB/s"
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


def name_of(handover: Handover) -> str:
    """A request's name in tables: its id in the producer, else in the consumer."""
    return short_id(handover.producer.request or handover.consumer.request or "?")


def format_engines(handover: Handover) -> str:
    """`prefill-0 → decode-1`, a UUID by its first part, and `?` for an engine that was not recorded."""
    names = []
    for request in (handover.producer, handover.consumer):
        name = _UUID.sub(r"\1", request.engine_id or "?")
        names.append(short_id(name, 20))
    return " → ".join(names)


def print_listing(summary: Summary, slowest: int) -> None:
    """Print the tables, and the notes below them."""
    shown = summary.handovers[:slowest]
    by_outcome = [f"{number} {outcome}" for outcome, number in summary.outcomes.items()]
    handovers = counted(len(summary.handovers), "handover")
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
        (_duration_row(*lasted) for lasted in summary.durations.items()),
    )
    print("\nthe slowest handovers:\n")
    print_table(
        ("request", "engines", ">tokens", ">handover", "cause", "result"),
        (_row(handover) for handover in shown),
    )
    phases = _longest_phases(shown)
    if phases:
        print("\ntheir phases, in ms:\n")
        # A word a line, or narrow columns would fold the words.
        names = [f">{phase.label}".replace(" ", "\n") for phase in phases]
        print_table(
            ("request", *names, ">other"),
            (_phase_row(handover, phases) for handover in shown),
        )
    _print_notes(summary)


def _print_notes(summary: Summary) -> None:
    for note in summary.notes:
        print()
        print_line(note)


def _duration_row(phase: Phase, lasted: Durations) -> tuple[str, ...]:
    return (
        phase.label,
        str(lasted.count),
        _time(lasted.p50_ms),
        _time(lasted.p99_ms),
        _time(lasted.max_ms),
        phase.meaning,
    )


def _time(lasted_ms: float) -> str:
    return format_time(lasted_ms * 1e6)


def _row(handover: Handover) -> tuple[str, ...]:
    result = format_result(handover)
    missing = missing_parts(handover)
    if missing:
        result = f"{result}; not recorded: {', '.join(missing)}"
    lasted = "–"
    if handover.handover_ms is not None:
        lasted = _time(handover.handover_ms)
    return (
        name_of(handover),
        format_engines(handover),
        str(handover.tokens or "–"),
        lasted,
        format_cause(handover),
        result,
    )


def format_cause(handover: Handover) -> str:
    """`decode queue 64 ms`, `reading 55 ms of tp1` where one of several workers was the last, or a dash."""
    cause = handover.cause
    if cause is None:
        return "–"
    text = f"{cause.phase.label} {_time(cause.lasted_ms)}"
    last = handover.last
    if last is None or len(handover.workers) == 1:
        return text
    if cause.phase in {span.phase for span in last.stages}:
        text += f" of {last.place}"
    return text


def _longest_phases(handovers: Sequence[Handover]) -> list[Phase]:
    """The phases that took longest in any of these handovers, as many as have a column, in their order."""
    longest_ms: dict[Phase, float] = {}
    for handover in handovers:
        for span in handover.path:
            longest_ms[span.phase] = max(span.lasted_ms, longest_ms.get(span.phase, 0))
    chosen = sorted(longest_ms, key=longest_ms.__getitem__)[-_PHASE_COLUMNS:]
    return [phase for phase in Phase if phase in chosen]


def _phase_row(handover: Handover, phases: Sequence[Phase]) -> tuple[str, ...]:
    """The milliseconds of these phases, and of all others together."""
    lasted_ms: dict[Phase | None, float] = dict.fromkeys((*phases, None), 0.0)
    for span in handover.path:
        column = span.phase if span.phase in phases else None
        lasted_ms[column] += span.lasted_ms
    return (name_of(handover), *map(digits, lasted_ms.values()))


def as_json(summary: Summary, slowest: int) -> dict[str, Any]:
    """The whole answer as plain values."""
    return {
        "kvferry_trace": SCHEMA,
        "processes": summary.num_processes,
        "handovers": len(summary.handovers),
        "outcomes": summary.outcomes,
        "phases": msgspec.to_builtins(summary.durations),
        "slowest": [_as_json(handover) for handover in summary.handovers[:slowest]],
        "notes": list(summary.notes),
    }


def _as_json(handover: Handover) -> dict[str, Any]:
    workers = []
    for worker in handover.workers:
        names = {"place": worker.place, "host": worker.process.host}
        times = {"stages": worker.stages, "chunks": worker.chunks}
        workers.append({**names, **worker.figures, **times})
    cause = handover.cause
    plain = {
        "producer": handover.producer.engine_id,
        "producer_request": handover.producer.request,
        "consumer": handover.consumer.engine_id,
        "consumer_request": handover.consumer.request,
        "lease": handover.lease,
        "tokens": handover.tokens,
        "outcome": outcome_of(handover),
        "missing": missing_parts(handover),
        "zero_ns": handover.zero_ns,
        "handover_ms": handover.handover_ms,
        "cause": cause.phase if cause else None,
        "bytes": handover.bytes,
        "early_bytes": handover.early_bytes,
        "gb_s": handover.gb_s,
        "steps": handover.steps,
        "phases": (*handover.before, *handover.path),
        "held": handover.held,
        "workers": workers,
    }
    return cast(dict[str, Any], msgspec.to_builtins(plain))
