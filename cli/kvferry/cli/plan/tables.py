"""Tables of `plan` and `describe`."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.cli.formatting import (
    binary_bytes,
    decimal_bytes,
    digits,
    milliseconds,
    print_line,
    print_table,
    rounded_count,
    span,
)
from kvferry.cli.plan.engine import PlanSide, format_engine, format_tokens
from kvferry.cli.plan.rows import NONE, RELEASE, cells_of, fold, rows_of
from kvferry.cli.plan.summary import PlanSummary, Refusal
from kvferry.plan.engine_shape import format_group
from kvferry.plan.wording import counted
from kvferry.protocol.description_json import EngineJson

_COLUMNS = ("consumer", "producer", ">pairs", "layers", "heads", ">bytes", ">descriptors", "placed")
_STYLES = {"direct": "green", "staged": "yellow", RELEASE: "dim", NONE: "dim"}


def print_plan(summary: PlanSummary) -> None:
    """Print a workable pair."""
    reasons: dict[str, int] = {}
    policies = [group.policy for group in summary.consumer.groups]
    is_clear = len(set(policies)) == len(policies)
    groups = [
        policy if is_clear else f"{policy} {index}"
        for index, policy in enumerate(policies)
        if policies[1:]
    ]
    rows = [cells_of(folded, groups) for folded in fold(rows_of(summary.workers, reasons))]
    for row, above in reversed(list(zip(rows[1:], rows, strict=False))):
        if row[0] == above[0]:
            row[0] = ""
    print_table(_COLUMNS, rows, _STYLES)
    for reason, number in reasons.items():
        print_line(f"({number}) {reason}", "dim", hang=4)
    print_line()
    _print_time(summary)
    print_line()
    first, *others = summary.workers
    more = f", one of {len(others) + 1} (--json has all)" if others else ""
    print_line(f"in the log of consumer {first.place}{more}:")
    print_line(first.log, "dim", hang=2)
    for line in first.log_debug:
        print_line(f"DEBUG {line}", "dim", hang=2)


def print_refusal(refusal: Refusal) -> None:
    """Print an unworkable pair: all reasons, each with the change that helps."""
    print_line("this pair cannot work:", "bold red")
    for number, reason in enumerate(refusal.reasons, 1):
        print_line(f"{number:>4}. {reason.field}", "bold", hang=6)
        print_line(f"      producer: {reason.producer}", hang=8)
        print_line(f"      consumer: {reason.consumer}", hang=8)
        print_line(f"      → {reason.change}", "green", hang=8)


def print_engine(engine_json: EngineJson, side: PlanSide) -> None:
    """Print one engine: its model, groups and workers."""
    facts = engine_json.facts
    print_line(f"engine {engine_json.engine_id}: {format_engine(side)}")
    named = (("model", facts.model), ("fingerprint", facts.fingerprint), ("dtype", facts.dtype))
    more = (
        ("cache", facts.cache_dtype),
        ("quantisation", facts.quantization),
        ("speculative", facts.speculative),
    )
    for name, value in (*named, *more):
        print_line(f"  {name:<13} {value}")
    for index, group in enumerate(engine_json.groups):
        print_line(f"  {f'group {index}':<13} {format_group(group)}")
    rows = (
        (
            str(shard.place),
            worker.memory,
            str(worker.device),
            span(shard.layers),
            span(shard.heads),
            format_tokens(shard.interleave),
            str(len(worker.tensors)),
            binary_bytes(shard.cache_bytes),
        )
        for worker, shard in zip(engine_json.workers, side.workers, strict=True)
    )
    print_table(
        ("worker", "memory", ">device", "layers", "heads", "tokens", ">tensors", ">cache"), rows
    )


def print_sides(sides: Iterable[tuple[str, PlanSide, str]]) -> None:
    """Print both engines: role, engine, and the short form that it was completed to, or empty."""
    for role, side, form in sides:
        name = "" if side.engine_id == role else f" {side.engine_id}:"
        print_line(f"{role}{name} {format_engine(side)}", hang=len(role) + 1)
        if form:
            print_line(f"{'':{len(role)}} {form}", "dim", hang=len(role) + 1)
    print_line()


def _print_time(summary: PlanSummary) -> None:
    link = (
        f"{decimal_bytes(summary.link_bytes)} over the links, "
        if summary.link_bytes != summary.bytes
        else ""
    )
    print_line(
        f"a prompt of {counted(summary.tokens, 'token')}: {decimal_bytes(summary.bytes)}, {link}"
        f"{decimal_bytes(summary.bytes_per_token)}/token, {rounded_count(summary.descriptors)} descriptors",
        hang=2,
    )
    print_line(
        f"predicted: {milliseconds(summary.predicted_ms)} over {digits(summary.link_gb_s)} GB/s a worker; "
        f"{summary.slowest.side} {summary.slowest.place} is the slowest",
        "bold",
        hang=2,
    )
