"""`--svg`: ranks, head ranges and flows at a glance.

Producers are on the left, each with its own colour; consumers on the right. In a card, the small map is the whole
model, heads from left to right and layers from top to bottom; the worker's part is filled, on the right with the
colours of its producers. A band's width is its bytes; a hatched one is staged.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator

from kvferry.cli.formatting import counted, decimal_bytes, span, spans
from kvferry.cli.plan.formatting import format_group, sizes
from kvferry.cli.plan.picture_layout import (
    CARD_WIDTH,
    LEFT,
    RIGHT,
    WIDTH,
    Band,
    Block,
    Card,
    Column,
    Scene,
    arrange,
    patches,
)
from kvferry.cli.plan.summary import PlanSummary, Shard, Side
from kvferry.cli.svg import FONT, element, plain, text
from kvferry.protocol.geometry import Interleave

_PALETTE = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951"),
    *("#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#64748b"),
)
_INK, _MUTED, _FAINT, _PAPER, _CARD = "#0f172a", "#64748b", "#e2e8f0", "#fbfcfe", "#ffffff"
_MAP_WIDTH = 92.0
_LABELS_UP_TO = 40
_ROOMY_FROM = 44.0
_LEGEND_HEIGHT = 88.0


def draw(summary: PlanSummary) -> str:
    """The picture of a plan as one SVG document."""
    scene = arrange(summary)
    colours = palette(len(scene.left.cards))
    height = scene.bottom + _LEGEND_HEIGHT
    parts = [
        element("rect", width=WIDTH, height=height, fill=_PAPER),
        *_heading(summary),
        *(_band(scene, band, colours[band.producer]) for band in _back_to_front(scene.bands)),
        *_labels(scene),
        *_column(scene.left, LEFT, colours),
        *_column(scene.right, RIGHT, None),
        *_sources(scene, summary, colours),
        *_legend(scene),
    ]
    body = "\n".join(parts)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" font-family="{FONT}">\n{_HATCH}\n{body}\n</svg>\n'
    )


def palette(count: int) -> list[str]:
    """A colour for every producer worker: a fixed palette, or hues around the circle if it is too small."""
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    colours = []
    for index in range(count):
        rgb = colorsys.hls_to_rgb(index / count, 0.48 if index % 2 else 0.60, 0.62)
        colours.append("#" + "".join(f"{round(part * 255):02x}" for part in rgb))
    return colours


_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="7" fill="#ffffff" fill-opacity="0.5"/></pattern></defs>'
)


def _heading(summary: PlanSummary) -> Iterator[str]:
    producer, consumer = summary.producer, summary.consumer
    yield text(
        f"{sizes(producer)}  →  {sizes(consumer)}", WIDTH / 2, 38, size=24, weight=700, anchor="middle", fill=_INK
    )
    facts = f"{counted(consumer.layers, 'layer')} · {counted(consumer.heads, 'head')} · {'/'.join(consumer.dtypes)}"
    yield text(
        f"{facts} · a prompt of {counted(summary.tokens, 'token')}: {decimal_bytes(summary.bytes)} in "
        f"{counted(summary.descriptors, 'descriptor')}, {summary.predicted_ms:.3g} ms over {summary.link_gb_s:g} GB/s",
        WIDTH / 2,
        62,
        size=13,
        fill=_MUTED,
        anchor="middle",
    )
    for role, side, x in (("producer", producer, LEFT), ("consumer", consumer, RIGHT)):
        name = role if side.engine_id == role else f"{role} {side.engine_id}"
        yield text(_cut(name, 34), x, 90, size=13, weight=700, fill=_INK)
        yield text(_cut("; ".join(format_group(group) for group in side.groups), 42), x, 106, size=11, fill=_MUTED)


def _back_to_front(bands: tuple[Band, ...]) -> list[Band]:
    """Draw wide bands first, so that thin ones are visible."""
    return sorted(bands, key=lambda band: -band.width)


def _band(scene: Scene, band: Band, colour: str) -> str:
    start, end = LEFT + CARD_WIDTH, RIGHT
    middle = (start + end) / 2
    title = element("title", plain(_band_words(scene, band)))
    if not band.width:
        left, right = scene.left.cards[band.producer].middle, scene.right.cards[band.consumer].middle
        path = f"M{start:.1f} {left:.1f}C{middle:.1f} {left:.1f} {middle:.1f} {right:.1f} {end:.1f} {right:.1f}"
        return element("path", title, d=path, fill="none", stroke="#94a3b8", stroke_width=1.2, stroke_dasharray="3 5")
    top, bottom = band.left_top, band.left_top + band.width
    far_top, far_bottom = band.right_top, band.right_top + band.width
    path = (
        f"M{start:.1f} {top:.2f}C{middle:.1f} {top:.2f} {middle:.1f} {far_top:.2f} {end:.1f} {far_top:.2f}"
        f"L{end:.1f} {far_bottom:.2f}C{middle:.1f} {far_bottom:.2f} {middle:.1f} {bottom:.2f} {start:.1f} {bottom:.2f}Z"
    )
    shown = [element("path", d=path, fill=colour, fill_opacity=0.55)]
    if band.placing == "staged":
        shown.append(element("path", d=path, fill="url(#hatch)"))
    return element("g", title, *shown)


def _band_words(scene: Scene, band: Band) -> str:
    flow = band.flow
    ends = f"{scene.left.cards[band.producer].shard.place} → {scene.right.cards[band.consumer].shard.place}"
    if not flow.reads:
        return f"{ends}: release only"
    heads = spans(sorted({heads for read in flow.reads for heads in read.heads}, key=lambda one: (one.start, one.stop)))
    runs = ", ".join(sorted({f"{read.run_bytes} B" for read in flow.reads if read.placing == band.placing}))
    return f"{ends}: heads {heads}, {decimal_bytes(band.num_bytes)}, {band.placing}, runs of {runs}"


def _labels(scene: Scene) -> Iterator[str]:
    """Labels with the bytes at the right end of wide bands, if there are few bands."""
    if len(scene.bands) > _LABELS_UP_TO:
        return
    for band in scene.bands:
        if band.width >= 13:
            middle = band.right_top + band.width / 2
            content = f"{decimal_bytes(band.num_bytes)} {band.placing}"
            yield text(content, RIGHT - 10, middle + 3.5, size=10, anchor="end", fill=_INK, fill_opacity=0.8)


def _column(column: Column, x: float, colours: list[str] | None) -> Iterator[str]:
    is_left = colours is not None
    for block in column.blocks:
        if block.label:
            yield from _block(block, x, is_left)
    for index, card in enumerate(column.cards):
        colour = colours[index] if colours is not None else _MUTED
        yield from _card(column, card, x, colour, is_left)


def _block(block: Block, x: float, is_left: bool) -> Iterator[str]:
    edge = x - 12 if is_left else x + CARD_WIDTH + 12
    tick = 5 if is_left else -5
    path = f"M{edge + tick:.1f} {block.top:.1f}H{edge:.1f}V{block.bottom:.1f}H{edge + tick:.1f}"
    yield element("path", d=path, fill="none", stroke="#94a3b8", stroke_width=1.4)
    at = edge - 10 if is_left else edge + 10
    middle = (block.top + block.bottom) / 2
    turn = f"rotate({-90 if is_left else 90} {at:.1f} {middle:.1f})"
    yield text(block.label, at, middle + 4, size=12, weight=600, anchor="middle", fill=_MUTED, transform=turn)


def _card(column: Column, card: Card, x: float, colour: str, is_left: bool) -> Iterator[str]:
    yield element(
        "rect", x=x, y=card.top, width=CARD_WIDTH, height=card.height, rx=6, fill=_CARD, stroke=_FAINT, stroke_width=1.2
    )
    if is_left:
        yield element("rect", x=x + CARD_WIDTH - 5, y=card.top, width=5, height=card.height, rx=2, fill=colour)
    at = x + 12 if is_left else x + _MAP_WIDTH + 26
    shard = card.shard
    name = f"tp{shard.place.tp}" + (f" dcp{shard.place.dcp}" if column.side.topology.dcp > 1 else "")
    if card.height < _ROOMY_FROM:
        baseline, beside = card.middle + 4, at + (62 if column.side.topology.dcp > 1 else 46)
        yield text(name, at, baseline, size=11, weight=700, fill=_INK)
        yield text(_held(column.side, shard, short=True), beside, baseline, size=9.5, fill=_MUTED)
    else:
        yield text(name, at, card.middle - 6, size=14, weight=700, fill=_INK)
        yield text(_held(column.side, shard, short=False), at, card.middle + 10, size=10.5, fill=_MUTED)
        yield text(f"layers {span(shard.layers)}", at, card.middle + 23, size=10.5, fill=_MUTED)
    left, top, height = _map_at(card, x, column, is_left)
    yield element("rect", x=left, y=top, width=_MAP_WIDTH, height=height, rx=2, fill="#f1f5f9")
    if is_left:
        yield _filled(column.side, shard, left, top, height, colour)
    yield from _token_strip(shard.interleave, left, top + height + 2.5, colour)


def _held(side: Side, shard: Shard, *, short: bool) -> str:
    heads = f"{'head' if len(shard.heads) == 1 else 'heads'} {span(shard.heads)}"
    return heads if short else f"{heads} of {side.heads}"


def _map_at(card: Card, x: float, column: Column, is_left: bool) -> tuple[float, float, float]:
    """Left, top and height of a card's map."""
    left = x + CARD_WIDTH - _MAP_WIDTH - 14 if is_left else x + 12
    strip = 6.0 if column.side.topology.dcp > 1 else 0.0
    room = card.height - (8 if card.height < _ROOMY_FROM else 18) - strip
    height = min(room, 64.0)
    return left, card.middle - (height + strip) / 2, height


def _filled(side: Side, shard: Shard, left: float, top: float, height: float, colour: str) -> str:
    heads, layers = max(1, side.heads), max(1, side.layers)
    return element(
        "rect",
        x=left + shard.heads.start / heads * _MAP_WIDTH,
        y=top + shard.layers.start / layers * height,
        width=len(shard.heads) / heads * _MAP_WIDTH,
        height=len(shard.layers) / layers * height,
        rx=1.5,
        fill=colour,
    )


def _token_strip(interleave: Interleave, left: float, top: float, colour: str) -> Iterator[str]:
    """The tokens, if ranks share them: one box per rank, the worker's own filled."""
    if interleave.ranks == 1:
        return
    cell = _MAP_WIDTH / interleave.ranks
    yield element("rect", x=left, y=top, width=_MAP_WIDTH, height=3.5, fill=_FAINT)
    yield element("rect", x=left + interleave.rank * cell, y=top, width=cell, height=3.5, fill=colour)


def _sources(scene: Scene, summary: PlanSummary, colours: list[str]) -> Iterator[str]:
    """The maps of the consumers, in the colours of their sources."""
    for card, reader in zip(scene.right.cards, summary.workers, strict=True):
        left, top, height = _map_at(card, RIGHT, scene.right, is_left=False)
        for patch in patches(reader, summary.consumer):
            yield element(
                "rect",
                x=left + patch.x * _MAP_WIDTH,
                y=top + patch.y * height,
                width=max(patch.width * _MAP_WIDTH, 0.5),
                height=max(patch.height * height, 0.5),
                fill=colours[patch.producer],
            )


def _legend(scene: Scene) -> Iterator[str]:
    y = scene.bottom + 34
    placings = {band.placing for band in scene.bands}
    x = LEFT
    for placing, content in (
        ("direct", "read in place"),
        ("staged", "staged, then put in place"),
        ("release", "release only"),
    ):
        if placing not in placings:
            continue
        if placing == "release":
            yield element(
                "line", x1=x, y1=y - 4, x2=x + 28, y2=y - 4, stroke="#94a3b8", stroke_width=1.2, stroke_dasharray="3 5"
            )
        else:
            yield element("rect", x=x, y=y - 10, width=28, height=12, rx=2, fill="#4269d0", fill_opacity=0.55)
        if placing == "staged":
            yield element("rect", x=x, y=y - 10, width=28, height=12, rx=2, fill="url(#hatch)")
        yield text(content, x + 36, y, size=11.5, fill=_MUTED)
        x += 36 + 7 * len(content) + 24
    yield text("width of a band: its bytes", x, y, size=11.5, fill=_MUTED)
    strip = "; the strip below: tokens" if any(c.side.topology.dcp > 1 for c in (scene.left, scene.right)) else ""
    content = f"in each card the whole model: heads across, layers down; filled is what the worker holds{strip}"
    yield text(content, LEFT, y + 24, size=11.5, fill=_MUTED)


def _cut(content: str, length: int) -> str:
    return content if len(content) <= length else content[: length - 1] + "…"
