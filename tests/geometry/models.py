"""Small random models: which layers share a cache group, and what each layer keeps."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.protocol.geometry import Format

_DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}

_POLICIES = (
    *(("full",),) * 6,
    ("window",),
    ("state",),
    ("full", "full"),
    *(("full", "window"),) * 2,
    *(("full", "state"),) * 3,
    ("full", "window", "state"),
)


@dataclass(frozen=True)
class Kind:
    """One kind of state of a layer.

    Attributes:
        heads: over the whole model; channels of a convolution state.
        elements: of one head and token; a recurrent state counts its whole state as one token.
        element_bytes: of one element.
    """

    name: str
    heads: int
    elements: int
    element_bytes: int


@dataclass(frozen=True)
class Group:
    """A cache group: layers that share one block table.

    Attributes:
        tile_tokens: tokens per cell; without meaning for a recurrent state.
    """

    policy: str
    window_tokens: int
    layers: tuple[str, ...]
    kinds: tuple[Kind, ...]
    tile_tokens: int

    def format(self, kind: Kind) -> Format:
        packing = "plain" if self.tile_tokens == 1 else f"{self.tile_tokens} tokens a cell"
        return Format(dtype=_DTYPES[kind.element_bytes], packing=packing)


@dataclass(frozen=True)
class Model:
    """Attributes:
    layers: all of them, in the order in which pipeline stages divide them.
    """

    layers: tuple[str, ...]
    groups: tuple[Group, ...]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """One to four layers in one to three groups."""
    policies = draw(st.sampled_from(_POLICIES))
    members = [*range(len(policies)), *(draw(st.lists(st.integers(0, len(policies) - 1), max_size=4 - len(policies))))]
    layers = tuple(f"layers.{index}" for index in range(len(members)))
    groups = []
    for index, policy in enumerate(policies):
        own = tuple(layer for layer, member in zip(layers, members, strict=True) if member == index)
        window = draw(st.sampled_from((4, 7, 16, 33))) if policy == "window" else 0
        kinds, tile = (draw(_states()), 1) if policy == "state" else draw(_attention())
        groups.append(Group(policy, window, own, kinds, tile))
    return Model(layers, tuple(groups))


@st.composite
def _attention(draw: st.DrawFn) -> tuple[tuple[Kind, ...], int]:
    """Keys and values of some heads, or one latent that every rank has; and the tokens of a cell."""
    item = draw(st.sampled_from((2, 2, 1, 4)))
    size = draw(st.sampled_from((4, 1, 2, 3, 8)))
    tile = draw(st.sampled_from((1, 1, 1, 1, 2, 4)))
    if draw(st.sampled_from((False, False, True))):
        return (Kind("mla", 1, size, item),), tile
    heads = draw(st.integers(1, 8))
    value_size = size + 1 if draw(st.sampled_from((False, False, False, True))) else size
    return (Kind("k", heads, size, item), Kind("v", heads, value_size, item)), tile


@st.composite
def _states(draw: st.DrawFn) -> tuple[Kind, ...]:
    """A convolution state in its sub-projections, whose channels are its heads, and a temporal state."""
    window = draw(st.integers(1, 3))
    channels = draw(st.sampled_from(((4, 2, 2), (6, 3, 3), (8, 1, 1), (5, 5))))
    convolution = [Kind(f"conv.{name}", n, window, 2) for name, n in zip("xBC", channels, strict=False)]
    return (*convolution, Kind("ssm", draw(st.integers(1, 6)), draw(st.integers(1, 4)), 4))
