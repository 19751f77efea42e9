"""Tables of `plan` and `describe`; needs rich, which the extra `cli` installs.

If the output is no terminal, lines are 132 characters wide and have no colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvferry.cli.formatting import binary_bytes, counted, decimal_bytes, new_table, span, spans
from kvferry.cli.plan.engine import Side, format_engine, format_group, format_tokens
from kvferry.cli.plan.summary import Flow, PlanSummary, Read, Reader, Refusal
from kvferry.protocol.description_json import EngineJson

if TYPE_CHECKING:
    from rich.console import Console


def print_plan(out: Console, summary: PlanSummary) -> None:
    """Print a workable pair."""
    _print_sides(out, (("producer", summary.producer), ("consumer", summary.consumer)))
    reasons: dict[str, int] = {}
    several = len(summary.producer.groups) > 1
    columns = ["consumer", "reads from", *(["group"] if several else []), "layers", "heads", ">bytes", ">runs"]
    table = new_table([*columns, ">descriptors", "placed"])
    for reader in summary.workers:
        for row in _reader_rows(reader, reasons, several):
            table.add_row(*row)
        table.add_section()
    out.print(table)
    for reason, number in reasons.items():
        out.print(f"({number}) {reason}")
    out.print()
    _print_time(out, summary)
    out.print("\nin the log of each consumer worker:")
    for reader in summary.workers:
        out.print(reader.log, soft_wrap=True)


def print_refusal(out: Console, refusal: Refusal, sides: Sequence[tuple[str, Side]]) -> None:
    """Print an unworkable pair: all reasons, each with the change that helps."""
    _print_sides(out, sides)
    out.print("this pair cannot work:")
    for number, reason in enumerate(refusal.reasons, 1):
        out.print(
            f"{number:>4}. {reason.field}: producer {reason.producer}, consumer {reason.consumer}", soft_wrap=True
        )
        out.print(f"      {reason.change}", soft_wrap=True)


def print_engine(out: Console, engine_json: EngineJson, side: Side) -> None:
    """Print one engine: its model, groups and workers."""
    facts = engine_json.facts
    out.print(f"engine {engine_json.engine_id}: {format_engine(side)}")
    named = (("model", facts.model), ("fingerprint", facts.fingerprint), ("dtype", facts.dtype))
    more = (("cache", facts.cache_dtype), ("quantisation", facts.quantization), ("speculative", facts.speculative))
    for name, value in (*named, *more):
        out.print(f"  {name:<13} {value}")
    for index, group in enumerate(engine_json.groups):
        out.print(f"  {f'group {index}':<13} {format_group(group)}")
    table = new_table(["worker", "memory", ">device", "layers", "heads", "tokens", ">tensors", ">cache"])
    for worker, shard in zip(engine_json.workers, side.workers, strict=True):
        table.add_row(
            str(shard.place),
            worker.memory,
            str(worker.device),
            span(shard.layers),
            span(shard.heads),
            format_tokens(shard.interleave),
            str(len(worker.tensors)),
            binary_bytes(shard.cache_bytes),
        )
    out.print(table)


def _print_sides(out: Console, sides: Iterable[tuple[str, Side]]) -> None:
    for role, side in sides:
        name = "" if side.engine_id == role else f" {side.engine_id}:"
        out.print(f"{role}{name} {format_engine(side)}")
    out.print()


def _print_time(out: Console, summary: PlanSummary) -> None:
    link = f"{decimal_bytes(summary.link_bytes)} over the links, " if summary.link_bytes != summary.bytes else ""
    out.print(
        f"a prompt of {counted(summary.tokens, 'token')}: {decimal_bytes(summary.bytes)}, {link}"
        f"{summary.bytes_per_token:g} B/token, {counted(summary.descriptors, 'descriptor')}"
    )
    out.print(
        f"predicted: {summary.predicted_ms:.3f} ms over {summary.link_gb_s:g} GB/s a worker; "
        f"{summary.slowest.side} {summary.slowest.place} is the slowest"
    )


def _reader_rows(reader: Reader, reasons: dict[str, int], several: bool) -> Iterable[list[str]]:
    """The rows of one consumer worker; its name and each producer's are in one row only."""
    name = str(reader.place)
    if not reader.flows:
        yield [name, "none"]
    for flow in reader.flows:
        producer = str(flow.producer)
        if not flow.reads:
            yield [name, producer, *([""] if several else []), "", "", "", "", "", "release only"]
        for read in flow.reads:
            yield [name, producer, *_read_cells(flow, read, reasons, several)]
            name = producer = ""
        name = ""


def _read_cells(flow: Flow, read: Read, reasons: dict[str, int], several: bool) -> list[str]:
    unit = "request" if read.policy == "state" else counted(read.unit_tokens, "token")
    number = reasons.setdefault(read.reason, len(reasons) + 1)
    descriptors = f"{read.runs}"
    if read.placing == "staged":
        staged = sum(one.descriptors for one in flow.staged)
        descriptors = f"{staged}" if read is _first_staged(flow) else "with it"
    return [
        *([f"{read.group} {read.policy}"] if several else []),
        f"{read.layers} × {' '.join(read.kinds)}",
        spans(read.heads),
        decimal_bytes(read.bytes),
        f"{read.unit_runs} × {read.run_bytes} B / {unit}",
        descriptors,
        f"{read.placing} ({number})",
    ]


def _first_staged(flow: Flow) -> Read:
    return next(read for read in flow.reads if read.placing == "staged")
