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
from xml.sax.saxutils import escape

from msgspec.structs import astuple

from kvferry.cli.formatting import decimal_bytes, format_tokens, span, spans
from kvferry.cli.plan.summary import Flow, PlanSide, PlanSummary, Shard
from kvferry.plan.engine_shape import format_group, format_topology
from kvferry.plan.wording import counted
from kvferry.protocol.visible import visible_lines

_FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
# It follows the light or dark mode of the page or system that shows it.
_STYLE = """<style>
.paper{fill:#ffffff}.card{fill:#f6f8fa}.ink{fill:#0f172a}.muted{fill:#5b6778}
.grid{stroke:#dde3ea}.zero{stroke:#64748b;fill:none}
@media (prefers-color-scheme:dark){
.paper{fill:#12161d}.card{fill:#1b222c}.ink{fill:#e8edf4}.muted{fill:#98a5b6}
.grid{stroke:#2d3644}.zero{stroke:#7c8a9d}}
</style>"""
_CONSUMER = "#7c8a9d"
_MAP_WIDTH = 92.0
_MAP_HEIGHT = 64.0
# Bands; more of them would lie under one another's labels.
_LABELS_UP_TO = 40
_LEGEND_HEIGHT = 88.0
_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="7" class="paper" fill-opacity="0.5"/></pattern></defs>'
)

_HATCHED = '"url(#hatch)"'
_OPACITY = 'fill-opacity="0.55"'
_DOTTED = 'class="zero" stroke-width="1.2" stroke-dasharray="3 5"'
_MUTED = 'class="muted"'
_BOLD = 'class="ink" font-weight="700"'
_CENTRED = 'text-anchor="middle"'

TOP = 116.0
CARD_WIDTH = 262.0
FLOW_WIDTH = 500.0
EDGE = 40.0
LEFT = EDGE
RIGHT = LEFT + CARD_WIDTH + FLOW_WIDTH
START = LEFT + CARD_WIDTH
WIDTH = RIGHT + CARD_WIDTH + EDGE
CARD = 62.0
COMPACT_CARD = 26.0
# Workers of a side from which cards are compact.
COMPACT_FROM = 17
GAP = 8.0
MARGIN = 5.0
# A thinner band cannot be seen, nor pointed at.
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
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" font-family="{_FONT}">',
        _STYLE,
        _HATCH,
        f'<rect width="{_short(WIDTH)}" height="{_short(height)}" class="paper"/>',
        *_heading(summary),
        # Wide bands first, so that thin ones are visible.
        *(_band(band) for band in sorted(bands, key=lambda band: -band.width)),
        *_labels(bands),
        *(part for card in cards for part in _card(card)),
        *_legend({band.placing for band in bands}, bottom + 34),
        "</svg>\n",
    ]
    return "\n".join(parts)


def arrange(summary: PlanSummary) -> tuple[list[Card], list[Band]]:
    """The layout of a plan's picture; the cards are in the order of the workers, the producer's first.

    Bands are stacked along their cards and centred in them.
    """
    # Both sides are equally high, so that most bands run level.
    most_workers = max(len(summary.producer.workers), len(summary.consumer.workers))
    card_height = CARD if most_workers < COMPACT_FROM else COMPACT_CARD
    height = most_workers * (card_height + GAP)
    colours = palette(len(summary.producer.workers))
    producers = _cards(summary.producer, LEFT, height, colours)
    colours = [_CONSUMER] * len(summary.consumer.workers)
    consumers = _cards(summary.consumer, RIGHT, height, colours)
    pairs = []
    bytes_of_card = Counter[Card]()
    for consumer, reader in zip(consumers, summary.workers, strict=True):
        for flow in reader.flows:
            producer = producers[flow.producer_worker]
            pairs.append((producer, consumer, flow))
            bytes_of_card[producer] += flow.bytes
            bytes_of_card[consumer] += flow.bytes
    # One scale for all bands: those of the card with the most bytes just fit along it.
    # Where nothing is read any scale will do.
    scale = 1.0
    for card, num_bytes in bytes_of_card.items():
        if num_bytes:
            scale = min(scale, (card.height - 2 * MARGIN) / num_bytes)
    tops = {}
    for card, num_bytes in bytes_of_card.items():
        tops[card] = card.middle - num_bytes * scale / 2
    bands = []
    for producer, consumer, flow in pairs:
        # A flow with two placings is two bands: their hatching differs. One without reads is a release of 0 bytes.
        placings = sorted(flow.bytes_by_placing().items()) or [("release", 0)]
        for placing, num_bytes in placings:
            width = 0.0
            if num_bytes:
                width = max(THINNEST, num_bytes * scale)
            left_top = tops[producer]
            right_top = tops[consumer]
            band = Band(
                producer, consumer, flow, placing, num_bytes, left_top, right_top, width
            )
            bands.append(band)
            tops[producer] += width
            tops[consumer] += width
    return producers + consumers, bands


def _cards(
    side: PlanSide, left: float, height: float, colours: Sequence[str]
) -> list[Card]:
    """The cards of one side, which share its height."""
    pitch = height / len(side.workers)
    cards = []
    for index, (shard, colour) in enumerate(zip(side.workers, colours, strict=True)):
        cards.append(Card(side, shard, left, TOP + index * pitch, pitch - GAP, colour))
    return cards


def palette(count: int) -> list[str]:
    """A colour for every producer worker: hues around the circle, light and dark in turn."""
    colours = []
    for index in range(count):
        hue = (0.6 + index / count) % 1
        # Neighbours among many hues are told apart by their lightness.
        lightness = 0.48 if index % 2 else 0.60
        rgb = colorsys.hls_to_rgb(hue, lightness, 0.62)
        colours.append("#" + "".join(f"{round(part * 255):02x}" for part in rgb))
    return colours


def _heading(summary: PlanSummary) -> Iterator[str]:
    producer = summary.producer
    consumer = summary.consumer
    topologies = [format_topology(side.topology) for side in (producer, consumer)]
    title = "  →  ".join(topologies)
    facts = (
        f"{counted(consumer.layers, 'layer')} · {counted(consumer.heads, 'head')} · {'/'.join(consumer.dtypes)}"
        f" · a prompt of {counted(summary.tokens, 'token')}: {decimal_bytes(summary.bytes)} in "
        f"{counted(summary.descriptors, 'descriptor')}, {summary.predicted_ms:.3g} ms over {summary.link_gb_s:g} GB/s"
    )
    yield text(title, WIDTH / 2, 38, 24, f"{_BOLD} {_CENTRED}")
    yield text(facts, WIDTH / 2, 62, 13, f"{_MUTED} {_CENTRED}")
    for role, side, x in (("producer", producer, LEFT), ("consumer", consumer, RIGHT)):
        name = role
        if side.engine_id != role:
            name = f"{role} {side.engine_id}"
        groups = "; ".join(map(format_group, side.groups))
        yield text(_cut(name, 38), x, 90, 13, _BOLD)
        yield text(_cut(groups, 46), x, 106, 11, _MUTED)


def _cut(content: str, length: int) -> str:
    if len(content) <= length:
        return content
    return content[: length - 1] + "…"


def _band(band: Band) -> str:
    hint = _title(_band_words(band))
    if not band.width:
        middles = (START, band.producer.middle, RIGHT, band.consumer.middle)
        return f'<path d="{_curve("M", *middles)}" {_DOTTED}>{hint}</path>'
    below_left = band.left_top + band.width
    below_right = band.right_top + band.width
    there = _curve("M", START, band.left_top, RIGHT, band.right_top)
    back = _curve("L", RIGHT, below_right, START, below_left)
    path = f'<path d="{there}{back}Z" fill='
    hatching = f"{path}{_HATCHED}/>" if band.placing == "staged" else ""
    return f'<g>{hint}{path}"{band.producer.colour}" {_OPACITY}/>{hatching}</g>'


def _curve(begin: str, x: float, y: float, to_x: float, to_y: float) -> str:
    """A curve that is level at both ends."""
    middle = (START + RIGHT) / 2
    return f"{begin}{x:.1f} {y:.2f}C{middle:.1f} {y:.2f} {middle:.1f} {to_y:.2f} {to_x:.1f} {to_y:.2f}"


def _band_words(band: Band) -> str:
    flow = band.flow
    ends = f"{band.producer.shard.place} → {band.consumer.shard.place}"
    if not flow.reads:
        return f"{ends}: release only"
    heads = sorted({held for read in flow.reads for held in read.heads}, key=astuple)
    lengths = {read.run_bytes for read in flow.reads if read.placing == band.placing}
    runs = ", ".join(sorted(f"{length} B" for length in lengths))
    size = decimal_bytes(band.num_bytes)
    return f"{ends}: heads {spans(heads)}, {size}, {band.placing}, runs of {runs}"


def _labels(bands: Sequence[Band]) -> Iterator[str]:
    """Labels with the bytes at the right end of wide bands, if there are few bands."""
    if len(bands) > _LABELS_UP_TO:
        return
    for band in bands:
        if band.width >= 13:
            label = f"{decimal_bytes(band.num_bytes)} {band.placing}"
            y = band.right_top + band.width / 2 + 3.5
            yield text(label, RIGHT - 10, y, 10, 'class="ink" text-anchor="end"')


def _card(card: Card) -> Iterator[str]:
    """A worker's name and part, and its map: the whole model, with the part that it holds filled."""
    shard = card.shard
    x = card.left
    hint = f"tokens: {format_tokens(shard.interleave)}"
    yield rect(x, card.top, CARD_WIDTH, card.height, 'rx="6" class="card grid"', hint)
    # The map is at the side of the flows.
    text_x = x + _MAP_WIDTH + 26
    map_x = x + 12
    fill = f'fill="{card.colour}"'
    if x == LEFT:
        yield rect(x + CARD_WIDTH - 5, card.top, 5, card.height, f'rx="2" {fill}')
        text_x = x + 12
        map_x = x + CARD_WIDTH - _MAP_WIDTH - 14
    held = f"heads {span(shard.heads)} · layers {span(shard.layers)}"
    yield text(str(shard.place), text_x, card.middle - 1, 12, _BOLD)
    yield text(held, text_x, card.middle + 10, 10, _MUTED)
    height = min(card.height - 8, _MAP_HEIGHT)
    top = card.middle - height / 2
    head_width = _MAP_WIDTH / max(1, card.side.heads)
    layer_height = height / max(1, card.side.layers)
    yield rect(map_x, top, _MAP_WIDTH, height, 'rx="2" class="paper"')
    yield rect(
        map_x + shard.heads.start * head_width,
        top + shard.layers.start * layer_height,
        max(len(shard.heads) * head_width, 0.5),
        max(len(shard.layers) * layer_height, 0.5),
        fill,
    )


def _legend(placings: Set[str], y: float) -> Iterator[str]:
    x = LEFT
    names = {
        "direct": "read in place",
        "staged": "staged, then put in place",
        "mapped": "copied from mapped memory",
        "release": "release only",
    }
    for placing, name in names.items():
        if placing not in placings:
            continue
        if placing == "release":
            yield f'<path d="M{x:.1f} {y - 4:.1f}h28" {_DOTTED}/>'
        else:
            yield rect(x, y - 10, 28, 12, f'rx="2" fill="#4269d0" {_OPACITY}')
        if placing == "staged":
            yield rect(x, y - 10, 28, 12, f'rx="2" fill={_HATCHED}')
        yield text(name, x + 36, y, 11.5, _MUTED)
        x += 60 + 7 * len(name)
    yield text("width of a band: its bytes", x, y, 11.5, _MUTED)
    about = "in each card the whole model: heads across, layers down; filled is what the worker holds"
    yield text(about, LEFT, y + 24, 11.5, _MUTED)


def rect(
    x: float, y: float, width: float, height: float, style: str, hint: str = ""
) -> str:
    """A rectangle with further attributes, and with a tooltip if there is a hint."""
    place = f'x="{_short(x)}" y="{_short(y)}"'
    size = f'width="{_short(width)}" height="{_short(height)}"'
    if not hint:
        return f"<rect {place} {size} {style}/>"
    return f"<rect {place} {size} {style}>{_title(hint)}</rect>"


def text(content: str, x: float, y: float, size: float, style: str) -> str:
    """A line of text with further attributes; `y` is its baseline."""
    place = f'x="{_short(x)}" y="{_short(y)}" font-size="{_short(size)}"'
    return f"<text {place} {style}>{_escaped(content)}</text>"


def _title(hint: str) -> str:
    return f"<title>{_escaped(hint)}</title>"


def _escaped(content: str) -> str:
    """Text from outside, such as names of engines, as content of an element."""
    return escape(visible_lines(content))


def _short(number: float) -> str:
    """A number with at most two decimals."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
