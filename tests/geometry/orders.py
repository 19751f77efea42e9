"""Where the cells of a group lie in memory: any order of the axes, with or without gaps.

Axes are letters: `L`ayers, `B`locks, `H`eads, `N` tiles of a block, `E`lements of a cell. The kinds of a layer (K and
V) are one axis more: what is outside of it is common to all kinds, inside of it each kind has an order of its own. So

    outer "LB", kinds, inner "HNE"      K and V apart in every block, heads outside of tokens
    outer "LBHN", kinds, inner "E"      K and V of a token together
    outer "LBH", kinds, K "EN", V "NE"  what vLLM's CPU attention keeps
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.geometry.models import Group

_STYLES = st.sampled_from(("dense", "dense", "cpu", "elements"))
_PERMUTATIONS = {
    axes: st.sampled_from(["".join(order) for order in itertools.permutations(axes)])
    for axes in ("LB", "LBHN")
}
_CUTS = st.integers(0, 4)
_GAP_AXES = st.sampled_from(("", "B", "H", "NK", "LB", "E"))
_GAPS = st.sampled_from((0, 2, 6, 16))
_EITHER = st.booleans()


@dataclass(frozen=True)
class Order:
    """An order of the axes of a cache in memory.

    Attributes:
        outer: the axes outside of the kinds, outermost first.
        inner: per kind the others.
        gaps: bytes behind every row of an axis; `K` stands for the kinds.
        wide: kinds whose elements are kept in pairs: an element of twice the bytes.
    """

    outer: str
    inner: Mapping[str, str]
    gaps: Mapping[str, int]
    wide: frozenset[str]


@dataclass(frozen=True)
class Extent:
    """The shape of one kind: sizes by axis, and the bytes of an element."""

    sizes: Mapping[str, int]
    element_bytes: int


@dataclass(frozen=True)
class Strides:
    """Where one kind lies: the offset of its first byte, strides by axis, and the bytes of one element."""

    offset: int
    steps: Mapping[str, int]
    element_bytes: int


@st.composite
def orders(draw: st.DrawFn, group: Group) -> Order:
    """Any order. Heads of a state differ by kind, and so lie inside; blocks and layers may lie anywhere."""
    shared = "LB" if group.policy == "state" else "LBHN"
    style = draw(_STYLES)
    axes = list(draw(_PERMUTATIONS[shared]))
    cut = min(draw(_CUTS), len(axes))
    if style == "cpu" and group.policy != "state":
        axes, cut = [axis for axis in axes if axis != "N"], 3
    outer, rest = axes[:cut], axes[cut:]
    rest += [axis for axis in "HN" if axis not in axes]
    inner = {}
    for index, kind in enumerate(group.kinds):
        if style == "cpu":
            inner[kind.name] = "".join(axis for axis in rest if axis != "N") + (
                "NE" if index % 2 else "EN"
            )
        elif style == "elements":
            at = min(draw(_CUTS), len(rest))
            inner[kind.name] = "".join([*rest[:at], "E", *rest[at:]])
        else:
            inner[kind.name] = "".join(rest) + "E"
    gaps = {axis: draw(_GAPS) for axis in draw(_GAP_AXES)}
    wide = frozenset(kind.name for kind in group.kinds if kind.elements % 2 == 0)
    return Order(
        "".join(outer),
        inner,
        gaps,
        wide if style != "dense" and draw(_EITHER) else frozenset(),
    )


def lay_out(
    order: Order, extents: Mapping[str, Extent], without: str = ""
) -> tuple[int, dict[str, Strides]]:
    """Strides of every kind and the bytes of the whole, from the innermost axis to the outermost.

    Args:
        without: axes that are laid out elsewhere; they have no stride here.
    """
    found: dict[str, tuple[int, dict[str, int], int]] = {}
    end = 0
    for name, extent in extents.items():
        factor = 2 if name in order.wide else 1
        own = {**extent.sizes, "E": extent.sizes["E"] // factor}
        step, steps = _fold(
            order.inner[name], own, order.gaps, extent.element_bytes * factor, without
        )
        found[name] = (end, steps, extent.element_bytes * factor)
        end += step + order.gaps.get("K", 0)
    sizes = next(iter(extents.values())).sizes
    total, outer = _fold(order.outer, sizes, order.gaps, end, without)
    return total, {
        name: Strides(offset, {**steps, **outer}, item)
        for name, (offset, steps, item) in found.items()
    }


def _fold(
    axes: Sequence[str],
    sizes: Mapping[str, int],
    gaps: Mapping[str, int],
    step: int,
    without: str,
) -> tuple[int, dict[str, int]]:
    steps = {}
    for axis in reversed([axis for axis in axes if axis not in without]):
        steps[axis] = step
        step = step * max(1, sizes[axis]) + gaps.get(axis, 0)
    return step, steps
