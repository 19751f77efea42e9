"""Small random models: which layers share a cache group, and what each layer keeps."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.protocol.geometry import Format

MAX_LAYERS = 4
ITEM_BYTES = {
    "float8_e4m3": 1,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}
_DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}

_POLICIES = (
    *(("full",),) * 6,
    *(("window",),) * 3,
    ("state",),
    *(("full", "full"),) * 2,
    *(("full", "window"),) * 3,
    *(("full", "state"),) * 3,
    ("full", "window", "state"),
)

# Strategies are made once: making them is half of what a draw costs.
_GROUPS = st.sampled_from(_POLICIES)
_MORE, _THIRDS = st.integers(0, 3), st.integers(0, 2)
_WINDOWS = st.sampled_from((4, 2, 7, 12, 1))
_ITEMS = st.sampled_from((2, 2, 1, 4))
_HEAD_SIZES = st.sampled_from((4, 1, 2, 3, 8))
_VALUE_MORE = st.sampled_from((0, 0, 0, 1))
_TILES = st.sampled_from((1, 1, 1, 1, 2, 4))
_ONE_OF_THREE = st.sampled_from((False, False, True))
_HEADS = st.sampled_from((2, 1, 2, 3, 4, 5, 6, 8))
_CHANNELS = st.sampled_from(((4, 2, 2), (6, 3, 3), (8, 1, 1), (5, 5)))
_CONVOLUTIONS = st.integers(1, 3)
_STATE_HEADS = st.integers(1, 6)


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

    def format(self, kind: Kind, cache_dtype: str = "") -> Format:
        """The format of a kind; 16-bit attention caches may be kept in another dtype, cells of several tokens not."""
        if self.tile_tokens > 1:
            return Format(
                dtype=_DTYPES[kind.element_bytes],
                packing=f"{self.tile_tokens} tokens a cell",
            )
        if not cache_dtype or self.policy == "state" or kind.element_bytes != 2:
            return Format(dtype=_DTYPES[kind.element_bytes])
        return Format(
            dtype=cache_dtype,
            quantization="fp8_per_tensor" if ITEM_BYTES[cache_dtype] == 1 else "none",
        )


@dataclass(frozen=True)
class Model:
    """A model, as far as its caches depend on it.

    Attributes:
        layers: all of them, in the order in which pipeline stages divide them.
    """

    layers: tuple[str, ...]
    groups: tuple[Group, ...]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """One to four layers in one to three groups."""
    policies = draw(_GROUPS)
    members = [
        *range(len(policies)),
        *(draw(_THIRDS) % len(policies) for _ in range(draw(_MORE))),
    ][:MAX_LAYERS]
    layers = tuple(f"layers.{index}" for index in range(len(members)))
    groups = []
    for index, policy in enumerate(policies):
        own = tuple(
            layer
            for layer, member in zip(layers, members, strict=True)
            if member == index
        )
        window = draw(_WINDOWS) if policy == "window" else 0
        kinds, tile = (draw(_states()), 1) if policy == "state" else draw(_attention())
        groups.append(Group(policy, window, own, kinds, tile))
    return Model(layers, tuple(groups))


@st.composite
def _attention(draw: st.DrawFn) -> tuple[tuple[Kind, ...], int]:
    """Keys and values of some heads, or one latent that every rank has; and the tokens of a cell."""
    item, size, tile = draw(_ITEMS), draw(_HEAD_SIZES), draw(_TILES)
    if draw(_ONE_OF_THREE):
        return (Kind("mla", 1, size, item),), tile
    heads = draw(_HEADS)
    value_size = size + draw(_VALUE_MORE)
    return (Kind("k", heads, size, item), Kind("v", heads, value_size, item)), tile


@st.composite
def _states(draw: st.DrawFn) -> tuple[Kind, ...]:
    """A convolution state in its sub-projections, whose channels are its heads, and a temporal state."""
    window, channels = draw(_CONVOLUTIONS), draw(_CHANNELS)
    convolution = [
        Kind(f"conv.{name}", n, window, 2)
        for name, n in zip("xBC", channels, strict=False)
    ]
    return (*convolution, Kind("ssm", draw(_STATE_HEADS), draw(_CONVOLUTIONS), 4))
