"""Positions of everything in the picture: cards of workers in two columns, bands of bytes between them.

Both columns have the same height. A band's width is proportional to its bytes, with one scale for the whole picture,
chosen so that the bands of every worker fit along its card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.formatting import span
from kvferry.cli.plan.summary import Flow, PlanSummary, Read, Reader, Shard, Side
from kvferry.protocol.geometry import Place

TOP = 116.0
CARD_WIDTH = 232.0
LEFT = 70.0
FLOW_WIDTH = 520.0
RIGHT = LEFT + CARD_WIDTH + FLOW_WIDTH
WIDTH = RIGHT + CARD_WIDTH + LEFT
ROOMY_CARD, COMPACT_CARD = 62.0, 26.0
ROOMY_GAP, COMPACT_GAP = 12.0, 5.0
BLOCK_GAP = 18.0
COMPACT_FROM = 17
MARGIN = 5.0
THINNEST = 1.0


@dataclass(frozen=True, slots=True)
class Card:
    """One worker: its shard, and the top and height of its rectangle; left and width are those of the column."""

    shard: Shard
    top: float
    height: float

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


@dataclass(frozen=True, slots=True)
class Block:
    """Workers of one pipeline stage and one prefill context parallel rank; no label if there is only one."""

    label: str
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Column:
    """One engine."""

    side: Side
    cards: tuple[Card, ...]
    blocks: tuple[Block, ...]
    compact: bool


@dataclass(frozen=True, slots=True)
class Band:
    """Bytes that one consumer worker reads from one producer worker with one placing; `width` 0 for a release."""

    producer: int
    consumer: int
    flow: Flow
    placing: str
    num_bytes: int
    left_top: float
    right_top: float
    width: float


@dataclass(frozen=True, slots=True)
class Scene:
    """The whole picture; cards are in the order of their engine's workers."""

    left: Column
    right: Column
    bands: tuple[Band, ...]
    bottom: float


def arrange(summary: PlanSummary) -> Scene:
    """Compute the layout of a plan's picture."""
    sides = (summary.producer, summary.consumer)
    height = max(_natural_height(side) for side in sides)
    left, right = (_column(side, height) for side in sides)
    return Scene(left, right, _bands(left, right, summary.workers), TOP + height)


def place_key(place: Place) -> tuple[int, int, int, int]:
    """The order of workers from top to bottom: stage by stage."""
    return (place.pp, place.pcp, place.tp, place.dcp)


def _is_compact(side: Side) -> bool:
    return len(side.workers) >= COMPACT_FROM


def _block_of(shard: Shard) -> tuple[int, int]:
    return (shard.place.pp, shard.place.pcp)


def _gaps(side: Side) -> float:
    gap = COMPACT_GAP if _is_compact(side) else ROOMY_GAP
    blocks = len({_block_of(shard) for shard in side.workers})
    return gap * (len(side.workers) - 1) + BLOCK_GAP * (blocks - 1)


def _natural_height(side: Side) -> float:
    return len(side.workers) * (COMPACT_CARD if _is_compact(side) else ROOMY_CARD) + _gaps(side)


def _column(side: Side, height: float) -> Column:
    compact = _is_compact(side)
    gap = COMPACT_GAP if compact else ROOMY_GAP
    card_height = (height - _gaps(side)) / len(side.workers)
    order = sorted(range(len(side.workers)), key=lambda index: place_key(side.workers[index].place))
    cards: dict[int, Card] = {}
    blocks: list[Block] = []
    top = TOP
    for position, index in enumerate(order):
        shard = side.workers[index]
        is_new = position == 0 or _block_of(side.workers[order[position - 1]]) != _block_of(shard)
        if is_new and position:
            top += BLOCK_GAP
        cards[index] = Card(shard, top, card_height)
        if is_new:
            blocks.append(Block(_label(side, shard), top, top + card_height))
        blocks[-1] = Block(blocks[-1].label, blocks[-1].top, top + card_height)
        top += card_height + gap
    return Column(side, tuple(cards[index] for index in range(len(cards))), tuple(blocks), compact)


def _label(side: Side, shard: Shard) -> str:
    """A block's label; that of a single worker is too short for its layers."""
    parts = [f"stage {shard.place.pp}"] if side.topology.pp > 1 else []
    parts += [f"pcp {shard.place.pcp}"] if side.topology.pcp > 1 else []
    if side.topology.pp > 1 and sum(_block_of(other) == _block_of(shard) for other in side.workers) > 1:
        parts.append(f"layers {span(shard.layers)}")
    return " · ".join(parts)


def _bands(left: Column, right: Column, readers: Sequence[Reader]) -> tuple[Band, ...]:
    found = []
    for consumer, reader in enumerate(readers):
        for flow in reader.flows:
            for placing in sorted({read.placing for read in flow.reads}) or ["release"]:
                num_bytes = sum(read.bytes for read in flow.reads if read.placing == placing)
                found.append(Band(flow.producer_worker, consumer, flow, placing, num_bytes, 0.0, 0.0, 0.0))
    scale = _scale(left, right, found)
    widths = [max(THINNEST, band.num_bytes * scale) if band.num_bytes else 0.0 for band in found]
    by_left = sorted(range(len(found)), key=lambda i: (found[i].producer, right.cards[found[i].consumer].top))
    by_right = sorted(range(len(found)), key=lambda i: (found[i].consumer, left.cards[found[i].producer].top))
    left_tops = _stack(left, by_left, [band.producer for band in found], widths)
    right_tops = _stack(right, by_right, [band.consumer for band in found], widths)
    return tuple(
        Band(
            band.producer,
            band.consumer,
            band.flow,
            band.placing,
            band.num_bytes,
            left_tops[index],
            right_tops[index],
            widths[index],
        )
        for index, band in enumerate(found)
    )


def _scale(left: Column, right: Column, bands: Sequence[Band]) -> float:
    """Height per byte: the largest that the fullest card allows."""
    heights = []
    for column, ends in ((left, [band.producer for band in bands]), (right, [band.consumer for band in bands])):
        load: dict[int, int] = {}
        for end, band in zip(ends, bands, strict=True):
            load[end] = load.get(end, 0) + band.num_bytes
        heights += [(column.cards[end].height - 2 * MARGIN) / num_bytes for end, num_bytes in load.items() if num_bytes]
    return min(heights, default=0.0)


def _stack(column: Column, order: Sequence[int], ends: Sequence[int], widths: Sequence[float]) -> list[float]:
    """The top of every band along its cards: stacked, and centred in the card."""
    total: dict[int, float] = {}
    for index in order:
        total[ends[index]] = total.get(ends[index], 0.0) + widths[index]
    at = {end: column.cards[end].middle - height / 2 for end, height in total.items()}
    tops = [0.0] * len(widths)
    for index in order:
        tops[index] = at[ends[index]]
        at[ends[index]] += widths[index]
    return tops


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of a consumer's shard and its producer worker, as fractions of heads (x) and layers (y) of the model."""

    producer: int
    x: float
    y: float
    width: float
    height: float


def patches(reader: Reader, side: Side) -> tuple[Patch, ...]:
    """The producer worker of each part of a consumer worker's shard. A part that several share by token is split."""
    filled: dict[tuple[int, int, int, int], list[int]] = {}
    for flow in reader.flows:
        for read in _of_the_map(flow):
            for heads in read.heads:
                part = (heads.start, heads.stop, read.layer_range.start, read.layer_range.stop)
                found = filled.setdefault(part, [])
                if flow.producer_worker not in found:
                    found.append(flow.producer_worker)
    total_heads, total_layers = max(1, side.heads), max(1, side.layers)
    made = []
    for (first, last, top, bottom), producers in filled.items():
        slot = (last - first) / total_heads / len(producers)
        for position, producer in enumerate(producers):
            x = first / total_heads + position * slot
            made.append(Patch(producer, x, top / total_layers, slot, (bottom - top) / total_layers))
    return tuple(made)


def _of_the_map(flow: Flow) -> list[Read]:
    """The reads with the shard's heads: attention, or temporal states if there is no attention."""
    attention = [read for read in flow.reads if read.policy != "state"]
    return attention or [read for read in flow.reads if "ssm" in read.kinds]
