"""What `kvferry plan` and `kvferry describe` print for a person.

The table of a plan has a row for each kind of read of each pair of workers, and equal ones are folded into one: rows
that differ only in their workers and in which heads are read, not in how many. So 64 ranks that are read alike by 16
are one row, and so are all workers that are only sent their release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvferry.cli.formatting import (
    binary_bytes,
    decimal_bytes,
    digits,
    format_time,
    format_tokens,
    print_line,
    print_table,
    rounded_count,
    span,
)
from kvferry.cli.plan.summary import PlanSummary, ReadingWorker, Refusal, side_of
from kvferry.plan.engine_shape import EngineShape, format_group
from kvferry.plan.wording import counted, format_numbers, format_places
from kvferry.protocol.geometry import Place, Range
from kvferry.protocol.handshake import EngineDescription

RELEASE = "released"
NONE = "no need"

_STYLES = {
    "direct": "green",
    "staged": "yellow",
    "mapped": "cyan",
    RELEASE: "dim",
    NONE: "dim",
}


class Kind(NamedTuple):
    """What folded rows have in common.

    Attributes:
        placed: how the bytes are put in place, and the number of the reason.
        group, layers: index of the cache group; how many of which tensors, as text.
        num_bytes, descriptors: of the prompt; None: the descriptors are those of the row before.
        head_counts: how many heads each range of a pair's has.
    """

    placed: str
    group: int = 0
    layers: str = ""
    num_bytes: int = 0
    descriptors: int | None = 0
    head_counts: tuple[int, ...] = ()


class Pair(NamedTuple):
    """A consumer worker, the producer worker that it reads from, if any, and the heads of the model that it reads."""

    consumer: Place
    producer: Place | None
    heads: tuple[Range, ...] = ()


def fold(
    readers: Iterable[ReadingWorker], reasons: dict[str, int]
) -> dict[Kind, list[Pair]]:
    """The pairs of each kind, in the order of their first ones; new reasons get the next number in `reasons`."""
    folded: dict[Kind, list[Pair]] = {}
    for reader in readers:
        for kind, pair in _rows(reader, reasons):
            folded.setdefault(kind, []).append(pair)
    return folded


def _rows(
    reader: ReadingWorker, reasons: dict[str, int]
) -> Iterator[tuple[Kind, Pair]]:
    if not reader.flows:
        yield Kind(NONE), Pair(reader.place, None)
    for flow in reader.flows:
        if not flow.reads:
            yield Kind(RELEASE), Pair(reader.place, flow.producer)
        # Staged reads of one pair of workers share their descriptors, which the first of them shows.
        staged_descriptors: int | None = sum(read.descriptors for read in flow.staged)
        for read in flow.reads:
            descriptors: int | None = read.runs
            if read.placing == "mapped":
                descriptors = 0
            if read.placing == "staged":
                descriptors = staged_descriptors
                staged_descriptors = None
            number = reasons.setdefault(read.reason, len(reasons) + 1)
            kind = Kind(
                placed=f"{read.placing} ({number})",
                group=read.group,
                layers=f"{read.layers} × {' '.join(read.kinds)}",
                num_bytes=read.bytes,
                descriptors=descriptors,
                # Not the heads themselves: workers that read other heads alike are one row.
                head_counts=tuple(map(len, read.heads)),
            )
            yield kind, Pair(reader.place, flow.producer, read.heads)


def cells_of(
    kind: Kind, pairs: Sequence[Pair], groups: Sequence[str]
) -> dict[str, str]:
    """A folded row as text, by its columns.

    Args:
        groups: names of the cache groups, if there are several.
    """
    cells = {
        "consumer": format_places(pair.consumer for pair in pairs),
        "producer": format_places(pair.producer for pair in pairs if pair.producer),
        ">pairs": f"{len(pairs)}",
        "layers": kind.layers,
        "heads": "",
        ">bytes": "",
        ">descriptors": "",
        "placed": kind.placed,
    }
    if not kind.layers:
        return cells
    if groups:
        cells["layers"] += f", {groups[kind.group]}"
    ranges = [held for pair in pairs for held in pair.heads]
    heads = {head for held in ranges for head in range(held.start, held.stop)}
    cells["heads"] = format_numbers(sorted(heads))
    cells[">bytes"] = decimal_bytes(kind.num_bytes)
    cells[">descriptors"] = "with it"
    if kind.descriptors is not None:
        cells[">descriptors"] = rounded_count(kind.descriptors)
    return cells


def print_plan(summary: PlanSummary) -> None:
    """Print a workable pair."""
    reasons: dict[str, int] = {}
    groups = _names_of_groups(summary)
    rows = []
    consumers = ""
    for kind, pairs in fold(summary.workers, reasons).items():
        cells = cells_of(kind, pairs, groups)
        # In a column of equal names the one that differs is not seen.
        if cells["consumer"] == consumers:
            cells["consumer"] = ""
        else:
            consumers = cells["consumer"]
        rows.append(cells)
    print_table([*rows[0]], [[*row.values()] for row in rows], _STYLES)
    for reason, number in reasons.items():
        print_line(f"({number}) {reason}", "dim", hang=4)
    print_line()
    _print_time(summary)
    print_line()
    # One worker's: the lines of 64 would hide the table.
    worker = summary.workers[0]
    more = ""
    if len(summary.workers) > 1:
        more = f", one of {len(summary.workers)} (--json has all)"
    print_line(f"in the log of consumer {worker.place}{more}:")
    print_line(worker.log, "dim", hang=2)
    for line in worker.log_debug:
        print_line(f"DEBUG {line}", "dim", hang=2)


def _names_of_groups(summary: PlanSummary) -> list[str]:
    """Names of the cache groups, with their number where two have one policy; none for a single group."""
    policies = [group.policy for group in summary.consumer.groups]
    if len(policies) == 1:
        return []
    if len(set(policies)) == len(policies):
        return policies
    return [f"{policy} {index}" for index, policy in enumerate(policies)]


def _print_time(summary: PlanSummary) -> None:
    sizes = [decimal_bytes(summary.bytes)]
    if summary.link_bytes != summary.bytes:
        sizes.append(f"{decimal_bytes(summary.link_bytes)} over the links")
    sizes.append(f"{decimal_bytes(summary.bytes_per_token)}/token")
    sizes.append(f"{rounded_count(summary.descriptors)} descriptors")
    prompt = counted(summary.tokens, "token")
    print_line(f"a prompt of {prompt}: {', '.join(sizes)}", hang=2)
    time = format_time(summary.predicted_ms * 1e6)
    link = f"{digits(summary.link_gb_s)} GB/s a worker"
    slowest = f"{summary.slowest.side} {summary.slowest.place} is the slowest"
    print_line(f"predicted: {time} over {link}; {slowest}", "bold", hang=2)


def print_refusal(refusal: Refusal) -> None:
    """Print an unworkable pair: all reasons, each with the change that helps."""
    print_line("this pair cannot work:", "bold red")
    for number, reason in enumerate(refusal.reasons, 1):
        print_line(f"{number:>4}. {reason.field}", "bold", hang=6)
        print_line(f"      producer: {reason.producer}", hang=8)
        print_line(f"      consumer: {reason.consumer}", hang=8)
        print_line(f"      → {reason.change}", "green", hang=8)


def print_engine(engine: EngineDescription) -> None:
    """Print one engine: its model, groups and workers."""
    facts = engine.facts
    print_line(f"engine {engine.engine_id}: {EngineShape.from_engine(engine)}")
    named = {
        "model": facts.model,
        "fingerprint": facts.fingerprint,
        "dtype": facts.dtype,
        "cache": facts.cache_dtype,
        "quantisation": facts.quantization,
        "speculative": facts.speculative,
    }
    for index, group in enumerate(engine.groups):
        named[f"group {index}"] = format_group(group)
    for name, value in named.items():
        print_line(f"  {name:<13} {value}")
    rows = []
    for worker, shard in zip(engine.workers, side_of(engine).workers, strict=True):
        row = {
            "worker": str(shard.place),
            "memory": worker.memory,
            ">device": str(worker.device),
            "layers": span(shard.layers),
            "heads": span(shard.heads),
            "tokens": format_tokens(shard.interleave),
            ">tensors": str(len(worker.tensors)),
            ">cache": binary_bytes(shard.cache_bytes),
        }
        rows.append(row)
    print_table([*rows[0]], [[*row.values()] for row in rows])


def print_side(role: str, engine: EngineDescription, form: str) -> None:
    """Print one engine of a pair, and the short form that it was completed to, or empty."""
    name = role
    # An engine of a short form has its role as its id.
    if engine.engine_id != role:
        name = f"{role} {engine.engine_id}:"
    hang = len(role) + 1
    print_line(f"{name} {EngineShape.from_engine(engine)}", hang=hang)
    if form:
        print_line(f"{'':{len(role)}} {form}", "dim", hang=hang)
