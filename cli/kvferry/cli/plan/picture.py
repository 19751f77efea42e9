"""`--svg`: ranks, head ranges and flows at a glance.

Producers are on the left, each with its own colour; consumers on the right. In a card, the small map is the whole
model, heads from left to right and layers from top to bottom; the worker's part is filled. A band's width is
proportional to its bytes, with one scale for the whole picture, chosen so that the bands of every worker fit along its
card; a hatched one is staged.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from kvferry.cli.formatting import decimal_bytes, span, spans
from kvferry.cli.plan.summary import Flow, PlanSide, PlanSummary, Shard, format_tokens
from kvferry.cli.svg import THEME, document, element, text
from kvferry.plan.engine_shape import format_group, format_topology
from kvferry.plan.wording import counted

_CONSUMER = "#7c8a9d"
_MAP_WIDTH, _MAP_HEIGHT = 92.0, 64.0
_LABELS_UP_TO = 40
_LEGEND_HEIGHT = 88.0
_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="7" class="paper" fill-opacity="0.5"/></pattern></defs>'
)


TOP = 116.0
CARD_WIDTH, FLOW_WIDTH, EDGE = 262.0, 500.0, 40.0
LEFT = EDGE
RIGHT = LEFT + CARD_WIDTH + FLOW_WIDTH
WIDTH = RIGHT + CARD_WIDTH + EDGE
CARD, COMPACT_CARD, COMPACT_FROM, GAP = 62.0, 26.0, 17, 8.0
MARGIN = 5.0
THINNEST = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Card:
    """One worker: its shard of its side, its rectangle, which is `CARD_WIDTH` wide, and its colour."""

    side: PlanSide
    shard: Shard
    left: float
    top: float
    height: float
    colour: str

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Bytes that one consumer worker reads from one producer worker with one placing; `width` 0 for a release."""

    producer: Card
    consumer: Card
    flow: Flow
    placing: str
    num_bytes: int
    left_top: float
    right_top: float
    width: float


def draw(summary: PlanSummary) -> str:
    """The picture of a plan as one SVG document."""
    cards, bands = arrange(summary)
    bottom = max(card.top + card.height for card in cards)
    height = bottom + _LEGEND_HEIGHT
    parts = [
        f"<style>{THEME}</style>",
        _HATCH,
        element("rect", width=WIDTH, height=height, class_="paper"),
        *_heading(summary),
        # Wide bands first, so that thin ones are visible.
        *(_band(band) for band in sorted(bands, key=lambda one: -one.width)),
        *_labels(bands),
        *(part for card in cards for part in _card(card)),
        *_legend({band.placing for band in bands}, bottom + 34),
    ]
    return document(WIDTH, height, parts)


def arrange(summary: PlanSummary) -> tuple[list[Card], list[Band]]:
    """The layout of a plan's picture; the cards are in the order of the workers, the producer's first.

    Bands are stacked along their cards and centred in them.
    """
    sides = (summary.producer, summary.consumer)
    most = max(len(side.workers) for side in sides)
    height = most * ((CARD if most < COMPACT_FROM else COMPACT_CARD) + GAP)
    colours = (palette(len(summary.producer.workers)), [_CONSUMER] * len(summary.consumer.workers))
    left, right = (
        [
            Card(
                side,
                shard,
                x,
                TOP + index * height / len(of_side),
                height / len(of_side) - GAP,
                colour,
            )
            for index, (shard, colour) in enumerate(zip(side.workers, of_side, strict=True))
        ]
        for side, x, of_side in zip(sides, (LEFT, RIGHT), colours, strict=True)
    )
    found = [
        (
            left[flow.producer_worker],
            card,
            flow,
            placing,
            sum(read.bytes for read in flow.reads if read.placing == placing),
        )
        for card, reader in zip(right, summary.workers, strict=True)
        for flow in reader.flows
        for placing in sorted({read.placing for read in flow.reads}) or ["release"]
    ]
    loads = Counter[Card]()
    for producer, consumer, _, _, num_bytes in found:
        loads[producer] += num_bytes
        loads[consumer] += num_bytes
    scale = min(
        ((card.height - 2 * MARGIN) / load for card, load in loads.items() if load), default=0.0
    )
    tops = {card: card.middle - load * scale / 2 for card, load in loads.items()}
    bands = []
    for producer, consumer, flow, placing, num_bytes in found:
        width = max(THINNEST, num_bytes * scale) if num_bytes else 0.0
        bands.append(
            Band(
                producer, consumer, flow, placing, num_bytes, tops[producer], tops[consumer], width
            )
        )
        tops[producer] += width
        tops[consumer] += width
    return left + right, bands


def palette(count: int) -> list[str]:
    """A colour for every producer worker: hues around the circle, light and dark in turn."""
    colours = []
    for index in range(count):
        rgb = colorsys.hls_to_rgb((0.6 + index / count) % 1, 0.48 if index % 2 else 0.60, 0.62)
        colours.append("#" + "".join(f"{round(part * 255):02x}" for part in rgb))
    return colours


def _heading(summary: PlanSummary) -> Iterator[str]:
    producer, consumer = summary.producer, summary.consumer
    title = f"{format_topology(producer.topology)}  →  {format_topology(consumer.topology)}"
    facts = (
        f"{counted(consumer.layers, 'layer')} · {counted(consumer.heads, 'head')} · {'/'.join(consumer.dtypes)}"
        f" · a prompt of {counted(summary.tokens, 'token')}: {decimal_bytes(summary.bytes)} in "
        f"{counted(summary.descriptors, 'descriptor')}, {summary.predicted_ms:.3g} ms over {summary.link_gb_s:g} GB/s"
    )
    yield text(title, WIDTH / 2, 38, 24, class_="ink", font_weight=700, text_anchor="middle")
    yield text(facts, WIDTH / 2, 62, 13, class_="muted", text_anchor="middle")
    for role, side, x in (("producer", producer, LEFT), ("consumer", consumer, RIGHT)):
        name = role if side.engine_id == role else f"{role} {side.engine_id}"
        yield text(_cut(name, 38), x, 90, 13, class_="ink", font_weight=700)
        yield text(_cut("; ".join(map(format_group, side.groups)), 46), x, 106, 11, class_="muted")


def _cut(content: str, length: int) -> str:
    return content if len(content) <= length else content[: length - 1] + "…"


def _band(band: Band) -> str:
    start, end = LEFT + CARD_WIDTH, RIGHT
    middle, hint = (start + end) / 2, _band_words(band)
    if not band.width:
        left, right = band.producer.middle, band.consumer.middle
        path = f"M{start:.1f} {left:.1f}C{middle:.1f} {left:.1f} {middle:.1f} {right:.1f} {end:.1f} {right:.1f}"
        return _dotted(path, hint)
    top, bottom = band.left_top, band.left_top + band.width
    far_top, far_bottom = band.right_top, band.right_top + band.width
    path = (
        f"M{start:.1f} {top:.2f}C{middle:.1f} {top:.2f} {middle:.1f} {far_top:.2f} {end:.1f} {far_top:.2f}"
        f"L{end:.1f} {far_bottom:.2f}C{middle:.1f} {far_bottom:.2f} {middle:.1f} {bottom:.2f} {start:.1f} {bottom:.2f}Z"
    )
    hatch = [element("path", d=path, fill="url(#hatch)")] if band.placing == "staged" else []
    return element(
        "g",
        element("path", d=path, fill=band.producer.colour, fill_opacity=0.55),
        *hatch,
        hint=hint,
    )


def _dotted(path: str, hint: str = "") -> str:
    return element(
        "path", hint=hint, d=path, class_="zero", stroke_width=1.2, stroke_dasharray="3 5"
    )


def _band_words(band: Band) -> str:
    flow = band.flow
    ends = f"{band.producer.shard.place} → {band.consumer.shard.place}"
    if not flow.reads:
        return f"{ends}: release only"
    heads = spans(
        sorted(
            {heads for read in flow.reads for heads in read.heads},
            key=lambda one: (one.start, one.stop),
        )
    )
    runs = ", ".join(
        sorted({f"{read.run_bytes} B" for read in flow.reads if read.placing == band.placing})
    )
    return f"{ends}: heads {heads}, {decimal_bytes(band.num_bytes)}, {band.placing}, runs of {runs}"


def _labels(bands: Sequence[Band]) -> Iterator[str]:
    """Labels with the bytes at the right end of wide bands, if there are few bands."""
    for band in bands if len(bands) <= _LABELS_UP_TO else ():
        if band.width >= 13:
            content = f"{decimal_bytes(band.num_bytes)} {band.placing}"
            yield text(
                content,
                RIGHT - 10,
                band.right_top + band.width / 2 + 3.5,
                10,
                class_="ink",
                text_anchor="end",
            )


def _card(card: Card) -> Iterator[str]:
    """A worker's name and part, and its map: the whole model, with the part that it holds filled."""
    shard, x, heads, layers = (
        card.shard,
        card.left,
        max(1, card.side.heads),
        max(1, card.side.layers),
    )
    is_left = x == LEFT
    tokens = f"tokens: {format_tokens(shard.interleave)}"
    yield element(
        "rect",
        x=x,
        y=card.top,
        width=CARD_WIDTH,
        height=card.height,
        rx=6,
        class_="card grid",
        hint=tokens,
    )
    if is_left:
        yield element(
            "rect",
            x=x + CARD_WIDTH - 5,
            y=card.top,
            width=5,
            height=card.height,
            rx=2,
            fill=card.colour,
        )
    at = x + 12 if is_left else x + _MAP_WIDTH + 26
    held = f"heads {span(shard.heads)} · layers {span(shard.layers)}"
    yield text(str(shard.place), at, card.middle - 1, 12, class_="ink", font_weight=700)
    yield text(held, at, card.middle + 10, 10, class_="muted")
    left, height = (
        x + CARD_WIDTH - _MAP_WIDTH - 14 if is_left else x + 12,
        min(card.height - 8, _MAP_HEIGHT),
    )
    top = card.middle - height / 2
    yield element("rect", x=left, y=top, width=_MAP_WIDTH, height=height, rx=2, class_="paper")
    yield element(
        "rect",
        x=left + shard.heads.start / heads * _MAP_WIDTH,
        y=top + shard.layers.start / layers * height,
        width=max(len(shard.heads) / heads * _MAP_WIDTH, 0.5),
        height=max(len(shard.layers) / layers * height, 0.5),
        fill=card.colour,
    )


def _legend(placings: Set[str], y: float) -> Iterator[str]:
    x = LEFT
    names = {
        "direct": "read in place",
        "staged": "staged, then put in place",
        "release": "release only",
    }
    for placing in (name for name in names if name in placings):
        if placing == "release":
            yield _dotted(f"M{x:.1f} {y - 4:.1f}h28")
        else:
            yield element(
                "rect", x=x, y=y - 10, width=28, height=12, rx=2, fill="#4269d0", fill_opacity=0.55
            )
        if placing == "staged":
            yield element("rect", x=x, y=y - 10, width=28, height=12, rx=2, fill="url(#hatch)")
        yield text(names[placing], x + 36, y, 11.5, class_="muted")
        x += 60 + 7 * len(names[placing])
    yield text("width of a band: its bytes", x, y, 11.5, class_="muted")
    about = (
        "in each card the whole model: heads across, layers down; filled is what the worker holds"
    )
    yield text(about, LEFT, y + 24, 11.5, class_="muted")
