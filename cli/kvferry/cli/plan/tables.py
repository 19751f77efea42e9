"""Tables of `plan` and `describe`.

The plan's table has a row for each kind of read of each pair of workers, and equal ones are folded into one: rows that
differ only in their workers and in which heads are read, not in how many. So 64 ranks that are read alike by 16 are one
row, and so are all workers that are only sent their release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
from kvferry.cli.plan.summary import (
    Flow,
    PlanSide,
    PlanSummary,
    Read,
    ReadingWorker,
    Refusal,
    format_engine,
    format_tokens,
)
from kvferry.plan.engine_shape import format_group
from kvferry.plan.wording import counted, format_numbers, format_places
from kvferry.protocol.description_json import EngineJson
from kvferry.protocol.geometry import Place, Range

RELEASE = "released"
NONE = "no need"

_COLUMNS = ("consumer", "producer", ">pairs", "layers", "heads", ">bytes", ">descriptors", "placed")
_STYLES = {"direct": "green", "staged": "yellow", "mapped": "cyan", RELEASE: "dim", NONE: "dim"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row before folding.

    Attributes:
        consumer, producer: the workers; a consumer that needs nothing has no producer.
        heads: of the model, as half-open ranges.
        group, layers: index of the cache group; how many of which tensors, as text.
        num_bytes, descriptors: of the prompt; None: the descriptors are those of the row before.
        placed: how the bytes are put in place, and the number of the reason.
    """

    consumer: Place
    producer: Place | None
    heads: tuple[Range, ...] = ()
    group: int = 0
    layers: str = ""
    num_bytes: int = 0
    descriptors: int | None = 0
    placed: str = ""

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for rows that are folded."""
        return (
            self.producer is None,
            tuple(len(heads) for heads in self.heads),
            self.group,
            self.layers,
            self.num_bytes,
            self.descriptors,
            self.placed,
        )


def rows_of(readers: Iterable[ReadingWorker], reasons: dict[str, int]) -> Iterator[Row]:
    """All rows; new reasons get the next number in `reasons`."""
    for reader in readers:
        if not reader.flows:
            yield Row(reader.place, None, placed=NONE)
        for flow in reader.flows:
            if not flow.reads:
                yield Row(reader.place, flow.producer, placed=RELEASE)
            # Staged reads of one pair of workers share their descriptors, which the first of them shows.
            has_shown_staged = False
            for read in flow.reads:
                descriptors: int | None = read.runs
                if read.placing == "mapped":
                    descriptors = 0
                if read.placing == "staged":
                    descriptors = None if has_shown_staged else _staged_descriptors(flow)
                    has_shown_staged = True
                yield _row(reader.place, flow, read, descriptors, reasons)


def _staged_descriptors(flow: Flow) -> int:
    return sum(staged.descriptors for staged in flow.staged)


def _row(
    consumer: Place, flow: Flow, read: Read, descriptors: int | None, reasons: dict[str, int]
) -> Row:
    number = reasons.setdefault(read.reason, len(reasons) + 1)
    return Row(
        consumer=consumer,
        producer=flow.producer,
        heads=read.heads,
        group=read.group,
        layers=f"{read.layers} × {' '.join(read.kinds)}",
        num_bytes=read.bytes,
        descriptors=descriptors,
        placed=f"{read.placing} ({number})",
    )


def fold(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of the same kind together, the kinds in the order of their first rows."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return list(kinds.values())


def cells_of(folded: list[Row], groups: Sequence[str]) -> list[str]:
    """A folded row as text, a cell for each of `_COLUMNS`.

    Args:
        groups: names of the cache groups, if there are several.
    """
    row = folded[0]
    consumers = format_places(folded_row.consumer for folded_row in folded)
    producers = ""
    if row.producer is not None:
        places = (folded_row.producer for folded_row in folded)
        producers = format_places(place for place in places if place is not None)
    num_pairs = f"{len(folded)}"
    if not row.layers:
        return [consumers, producers, num_pairs, "", "", "", "", row.placed]
    layers = row.layers
    if groups:
        layers = f"{layers}, {groups[row.group]}"
    heads: set[int] = set()
    for folded_row in folded:
        for held in folded_row.heads:
            heads.update(range(held.start, held.stop))
    descriptors = "with it"
    if row.descriptors is not None:
        descriptors = rounded_count(row.descriptors)
    return [
        consumers,
        producers,
        num_pairs,
        layers,
        format_numbers(sorted(heads)),
        decimal_bytes(row.num_bytes),
        descriptors,
        row.placed,
    ]


def print_plan(summary: PlanSummary) -> None:
    """Print a workable pair."""
    reasons: dict[str, int] = {}
    groups = _names_of_groups(summary)
    rows = [cells_of(folded, groups) for folded in fold(rows_of(summary.workers, reasons))]
    _leave_out_repeated(rows)
    print_table(_COLUMNS, rows, _STYLES)
    for reason, number in reasons.items():
        print_line(f"({number}) {reason}", "dim", hang=4)
    print_line()
    _print_time(summary)
    print_line()
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
    for row in rows:
        if row[0] == consumers:
            row[0] = ""
        else:
            consumers = row[0]


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
        ("worker", "memory", ">device", "layers", "heads", "tokens", ">tensors", ">cache"), rows
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


def _print_time(summary: PlanSummary) -> None:
    sizes = [decimal_bytes(summary.bytes)]
    if summary.link_bytes != summary.bytes:
        sizes.append(f"{decimal_bytes(summary.link_bytes)} over the links")
    sizes.append(f"{decimal_bytes(summary.bytes_per_token)}/token")
    sizes.append(f"{rounded_count(summary.descriptors)} descriptors")
    print_line(f"a prompt of {counted(summary.tokens, 'token')}: {', '.join(sizes)}", hang=2)
    time = milliseconds(summary.predicted_ms)
    slowest = f"{summary.slowest.side} {summary.slowest.place}"
    print_line(
        f"predicted: {time} over {digits(summary.link_gb_s)} GB/s a worker; {slowest} is the slowest",
        "bold",
        hang=2,
    )
