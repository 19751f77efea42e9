"""Rows of the plan's table: one for each kind of read of each pair of workers, and equal ones folded into one.

Folded are rows that differ only in their workers and in which heads are read, not in how many. So 64 ranks that are
read alike by 16 are one row, and so are all workers that are only sent their release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.cli.formatting import decimal_bytes, rounded_count
from kvferry.cli.plan.summary import Flow, Read, ReadingWorker
from kvferry.plan.wording import format_numbers, format_places
from kvferry.protocol.geometry import Place, Range

RELEASE = "released"
NONE = "no need"


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
        lengths = tuple(len(heads) for heads in self.heads)
        same = (self.group, self.layers, self.num_bytes, self.descriptors, self.placed)
        return (self.producer is None, lengths, *same)


def rows_of(readers: Iterable[ReadingWorker], reasons: dict[str, int]) -> Iterator[Row]:
    """All rows; new reasons get the next number in `reasons`."""
    for reader in readers:
        if not reader.flows:
            yield Row(reader.place, None, placed=NONE)
        for flow in reader.flows:
            if not flow.reads:
                yield Row(reader.place, flow.producer, placed=RELEASE)
            first_staged = next((read for read in flow.reads if read.placing == "staged"), None)
            for read in flow.reads:
                yield _row(reader.place, flow, read, read is first_staged, reasons)


def _row(
    consumer: Place, flow: Flow, read: Read, is_first_staged: bool, reasons: dict[str, int]
) -> Row:
    """Staged reads of one pair of workers share their descriptors, which the first of them has."""
    number = reasons.setdefault(read.reason, len(reasons) + 1)
    descriptors: int | None = read.runs
    if read.placing == "staged":
        descriptors = sum(one.descriptors for one in flow.staged) if is_first_staged else None
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
    """A folded row as text: consumers, producers, number of pairs, layers, heads, and of each pair bytes, descriptors
    and how they are placed. `groups`: names of the cache groups, if there are several."""
    first = folded[0]
    producers = [row.producer for row in folded if row.producer is not None]
    ends = [
        format_places(row.consumer for row in folded),
        format_places(producers) if producers else "",
    ]
    if not first.layers:
        return [*ends, f"{len(folded)}", "", "", "", "", first.placed]
    heads = sorted(
        {head for row in folded for held in row.heads for head in range(held.start, held.stop)}
    )
    return [
        *ends,
        f"{len(folded)}",
        f"{first.layers}, {groups[first.group]}" if groups else first.layers,
        format_numbers(heads),
        decimal_bytes(first.num_bytes),
        "with it" if first.descriptors is None else rounded_count(first.descriptors),
        first.placed,
    ]
