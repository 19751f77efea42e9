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
from kvferry.cli.plan.summary import (
    Flow,
    PlanSide,
    PlanSummary,
    Read,
    ReadingWorker,
    Refusal,
)
from kvferry.plan.engine_shape import EngineShape, format_group
from kvferry.plan.wording import counted, format_numbers, format_places
from kvferry.protocol.description_json import EngineJson
from kvferry.protocol.geometry import Place, Range

RELEASE = "released"
NONE = "no need"

_COLUMNS = (
    "consumer",
    "producer",
    ">pairs",
    "layers",
    "heads",
    ">bytes",
    ">descriptors",
    "placed",
)
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
        if not reader.flows:
            folded.setdefault(Kind(NONE), []).append(Pair(reader.place, None))
        for flow in reader.flows:
            if not flow.reads:
                folded.setdefault(Kind(RELEASE), []).append(
                    Pair(reader.place, flow.producer)
                )
            for kind, read in _kinds(flow, reasons):
                pair = Pair(reader.place, flow.producer, read.heads)
                folded.setdefault(kind, []).append(pair)
    return folded


def _kinds(flow: Flow, reasons: dict[str, int]) -> Iterator[tuple[Kind, Read]]:
    # Staged reads of one pair of workers share their descriptors, which the first of them shows.
    staged_descriptors: int | None = sum(staged.descriptors for staged in flow.staged)
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
        yield kind, read


def cells_of(kind: Kind, pairs: Sequence[Pair], groups: Sequence[str]) -> list[str]:
    """A folded row as text, a cell for each of `_COLUMNS`.

    Args:
        groups: names of the cache groups, if there are several.
    """
    consumers = format_places(pair.consumer for pair in pairs)
    producers = format_places(
        pair.producer for pair in pairs if pair.producer is not None
    )
    cells = [consumers, producers, f"{len(pairs)}"]
    if not kind.layers:
        return [*cells, "", "", "", "", kind.placed]
    layers = kind.layers
    if groups:
        layers = f"{layers}, {groups[kind.group]}"
    ranges = [held for pair in pairs for held in pair.heads]
    heads = {head for held in ranges for head in range(held.start, held.stop)}
    descriptors = "with it"
    if kind.descriptors is not None:
        descriptors = rounded_count(kind.descriptors)
    return [
        *cells,
        layers,
        format_numbers(sorted(heads)),
        decimal_bytes(kind.num_bytes),
        descriptors,
        kind.placed,
    ]


def print_plan(summary: PlanSummary) -> None:
    """Print a workable pair."""
    reasons: dict[str, int] = {}
    groups = _names_of_groups(summary)
    folded = fold(summary.workers, reasons)
    rows = [cells_of(kind, pairs, groups) for kind, pairs in folded.items()]
    _leave_out_repeated(rows)
    print_table(_COLUMNS, rows, _STYLES)
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


def _leave_out_repeated(rows: list[list[str]]) -> None:
    """Empty the first cell of each row that has the consumers of the row above it."""
    consumers = ""
    # In a column of equal names the one that differs is not seen.
    for row in rows:
        if row[0] == consumers:
            row[0] = ""
        else:
            consumers = row[0]


def _print_time(summary: PlanSummary) -> None:
    sizes = [decimal_bytes(summary.bytes)]
    if summary.link_bytes != summary.bytes:
        sizes.append(f"{decimal_bytes(summary.link_bytes)} over the links")
    sizes.append(f"{decimal_bytes(summary.bytes_per_token)}/token")
    sizes.append(f"{rounded_count(summary.descriptors)} descriptors")
    print_line(
        f"a prompt of {counted(summary.tokens, 'token')}: {', '.join(sizes)}", hang=2
    )
    time = format_time(summary.predicted_ms * 1e6)
    slowest = f"{summary.slowest.side} {summary.slowest.place}"
    print_line(
        f"predicted: {time} over {digits(summary.link_gb_s)} GB/s a worker; {slowest} is the slowest",
        "bold",
        hang=2,
    )


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
    named_facts = (
        ("model", facts.model),
        ("fingerprint", facts.fingerprint),
        ("dtype", facts.dtype),
        ("cache", facts.cache_dtype),
        ("quantisation", facts.quantization),
        ("speculative", facts.speculative),
    )
    for name, value in named_facts:
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
        (
            "worker",
            "memory",
            ">device",
            "layers",
            "heads",
            "tokens",
            ">tensors",
            ">cache",
        ),
        rows,
    )


def print_sides(sides: Iterable[tuple[str, PlanSide, str]]) -> None:
    """Print both engines: role, engine, and the short form that it was completed to, or empty."""
    for role, side, form in sides:
        name = role
        # An engine of a short form has its role as its id.
        if side.engine_id != role:
            name = f"{role} {side.engine_id}:"
        print_line(f"{name} {format_engine(side)}", hang=len(role) + 1)
        if form:
            print_line(f"{'':{len(role)}} {form}", "dim", hang=len(role) + 1)
    print_line()


def format_engine(side: PlanSide) -> str:
    """An engine in one line."""
    shape = EngineShape(
        side.topology, side.layers, side.heads, side.dtypes, side.groups
    )
    return str(shape)
