"""Positions in the picture: cards of workers in two columns of the same height, bands of bytes between them.

A band's width is proportional to its bytes, with one scale for the whole picture, chosen so that the bands of every
worker fit along its card.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.cli.plan.engine import Shard, Side
from kvferry.cli.plan.summary import Flow, PlanSummary, Reader
from kvferry.protocol.geometry import Range

TOP = 116.0
CARD_WIDTH, FLOW_WIDTH, EDGE = 262.0, 500.0, 40.0
LEFT = EDGE
RIGHT = LEFT + CARD_WIDTH + FLOW_WIDTH
WIDTH = RIGHT + CARD_WIDTH + EDGE
CARD, COMPACT_CARD, COMPACT_FROM, GAP = 62.0, 26.0, 17, 8.0
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

    left: tuple[Card, ...]
    right: tuple[Card, ...]
    bands: tuple[Band, ...]
    bottom: float


@dataclass(frozen=True, slots=True)
class Patch:
    """A part of a shard and its producer worker, as fractions of heads (x) and layers (y) of the model."""

    producer: int
    x: float
    y: float
    width: float
    height: float


def arrange(summary: PlanSummary) -> Scene:
    """Compute the layout of a plan's picture."""
    most = max(len(side.workers) for side in (summary.producer, summary.consumer))
    height = most * ((CARD if most < COMPACT_FROM else COMPACT_CARD) + GAP) - GAP
    left, right = _cards(summary.producer, height), _cards(summary.consumer, height)
    return Scene(left, right, _bands(left, right, summary.workers), TOP + height)


def _cards(side: Side, height: float) -> tuple[Card, ...]:
    step = (height + GAP) / len(side.workers)
    return tuple(Card(shard, TOP + index * step, step - GAP) for index, shard in enumerate(side.workers))


def _bands(left: tuple[Card, ...], right: tuple[Card, ...], readers: tuple[Reader, ...]) -> tuple[Band, ...]:
    """Bands, stacked along their cards and centred in them."""
    found: list[tuple[int, int, Flow, str, int]] = []
    for consumer, reader in enumerate(readers):
        for flow in reader.flows:
            for placing in sorted({read.placing for read in flow.reads}) or ["release"]:
                num_bytes = sum(read.bytes for read in flow.reads if read.placing == placing)
                found.append((flow.producer_worker, consumer, flow, placing, num_bytes))
    sent, received = Counter[int](), Counter[int]()
    for producer, consumer, _, _, num_bytes in found:
        sent[producer] += num_bytes
        received[consumer] += num_bytes
    loads = [(left[index].height, load) for index, load in sent.items()]
    loads += [(right[index].height, load) for index, load in received.items()]
    scale = min(((height - 2 * MARGIN) / load for height, load in loads if load), default=0.0)
    left_tops = [card.middle - sent[index] * scale / 2 for index, card in enumerate(left)]
    right_tops = [card.middle - received[index] * scale / 2 for index, card in enumerate(right)]
    bands = []
    for producer, consumer, flow, placing, num_bytes in found:
        width = max(THINNEST, num_bytes * scale) if num_bytes else 0.0
        tops = (left_tops[producer], right_tops[consumer])
        bands.append(Band(producer, consumer, flow, placing, num_bytes, *tops, width))
        left_tops[producer] += width
        right_tops[consumer] += width
    return tuple(bands)


def own_patch(index: int, side: Side) -> Patch:
    """The shard of one worker."""
    shard = side.workers[index]
    return _patch(index, shard.heads, shard.layers, side)


def patches(reader: Reader, side: Side) -> tuple[Patch, ...]:
    """The producer worker of each part of a consumer worker's shard. A part that several share by token is split."""
    filled: dict[tuple[Range, Range], dict[int, None]] = {}
    for flow in reader.flows:
        attention = [read for read in flow.reads if read.policy != "state"]
        for read in attention or [read for read in flow.reads if "ssm" in read.kinds]:
            for heads in read.heads:
                filled.setdefault((heads, read.layer_range), {})[flow.producer_worker] = None
    return tuple(
        _patch(producer, heads, layers, side, position, len(producers))
        for (heads, layers), producers in filled.items()
        for position, producer in enumerate(producers)
    )


def _patch(producer: int, heads: Range, layers: Range, side: Side, position: int = 0, of: int = 1) -> Patch:
    """The slot at `position` of the `of` equal ones that the heads are split into."""
    all_heads, all_layers = max(1, side.heads), max(1, side.layers)
    width = len(heads) / all_heads / of
    x = heads.start / all_heads + position * width
    return Patch(producer, x, layers.start / all_layers, width, len(layers) / all_layers)
