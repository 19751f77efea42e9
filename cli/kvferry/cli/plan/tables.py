"""Tables of `plan` and `describe`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvferry.cli.formatting import binary_bytes, counted, decimal_bytes, print_line, print_table, span, spans
from kvferry.cli.plan.engine import Side, format_engine, format_group, format_tokens
from kvferry.cli.plan.summary import Flow, PlanSummary, Read, Reader, Refusal
from kvferry.protocol.description_json import EngineJson


def print_plan(summary: PlanSummary) -> None:
    """Print a workable pair."""
    _print_sides((("producer", summary.producer), ("consumer", summary.consumer)))
    reasons: dict[str, int] = {}
    several = len(summary.producer.groups) > 1
    columns = ["consumer", "reads from", *(["group"] if several else []), "layers", "heads", ">bytes", ">runs"]
    rows = [row for reader in summary.workers for row in _reader_rows(reader, reasons, several)]
    print_table([*columns, ">descriptors", "placed"], rows[:-1])
    for reason, number in reasons.items():
        print_line(f"({number}) {reason}")
    print_line()
    _print_time(summary)
    print_line()
    print_line("in the log of each consumer worker:")
    for reader in summary.workers:
        print_line(reader.log)


def print_refusal(refusal: Refusal, sides: Sequence[tuple[str, Side]]) -> None:
    """Print an unworkable pair: all reasons, each with the change that helps."""
    _print_sides(sides)
    print_line("this pair cannot work:")
    for number, reason in enumerate(refusal.reasons, 1):
        print_line(f"{number:>4}. {reason.field}: producer {reason.producer}, consumer {reason.consumer}")
        print_line(f"      {reason.change}")


def print_engine(engine_json: EngineJson, side: Side) -> None:
    """Print one engine: its model, groups and workers."""
    facts = engine_json.facts
    print_line(f"engine {engine_json.engine_id}: {format_engine(side)}")
    named = (("model", facts.model), ("fingerprint", facts.fingerprint), ("dtype", facts.dtype))
    more = (("cache", facts.cache_dtype), ("quantisation", facts.quantization), ("speculative", facts.speculative))
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
    print_table(("worker", "memory", ">device", "layers", "heads", "tokens", ">tensors", ">cache"), rows)


def _print_sides(sides: Iterable[tuple[str, Side]]) -> None:
    for role, side in sides:
        name = "" if side.engine_id == role else f" {side.engine_id}:"
        print_line(f"{role}{name} {format_engine(side)}")
    print_line()


def _print_time(summary: PlanSummary) -> None:
    link = f"{decimal_bytes(summary.link_bytes)} over the links, " if summary.link_bytes != summary.bytes else ""
    print_line(
        f"a prompt of {counted(summary.tokens, 'token')}: {decimal_bytes(summary.bytes)}, {link}"
        f"{summary.bytes_per_token:g} B/token, {counted(summary.descriptors, 'descriptor')}"
    )
    print_line(
        f"predicted: {summary.predicted_ms:.3f} ms over {summary.link_gb_s:g} GB/s a worker; "
        f"{summary.slowest.side} {summary.slowest.place} is the slowest"
    )


def _reader_rows(reader: Reader, reasons: dict[str, int], several: bool) -> Iterator[list[str]]:
    """The rows of one consumer worker, then an empty one; its name and each producer's are in one row only."""
    name = str(reader.place)
    if not reader.flows:
        yield [name, "none", *[""] * (7 if several else 6)]
    for flow in reader.flows:
        producer = str(flow.producer)
        if not flow.reads:
            yield [name, producer, *([""] if several else []), "", "", "", "", "", "release only"]
        for read in flow.reads:
            yield [name, producer, *_read_cells(flow, read, reasons, several)]
            name = producer = ""
        name = ""
    yield []


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
