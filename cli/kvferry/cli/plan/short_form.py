"""The short form of an engine: `layers=32,heads=8,dim=128,tp=4,pp=2,block=16,layout=NHD,dtype=bfloat16`.

Pairs of key and value, separated by commas, in any order, none twice. This module reads the text; `short_engine` builds
the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_values import (
    CONV,
    DTYPE_BYTES,
    LAYER_LIST,
    LAYOUTS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SIZE,
    NAME_TEMPLATE,
    NO_WINDOW,
    STAGES,
    STATE_SHAPE,
    WINDOW,
    ConvPart,
    Value,
    choice,
    layers_of,
    whole,
)
from kvferry.protocol.errors import MISSING, Shown, one_of

MAX_LENGTH = 4096


class Key(NamedTuple):
    """A key of the short form: how its value is written and read, and its meaning."""

    value: Value
    meaning: str


def _key(default: Any, value: Value, meaning: str) -> Any:
    return field(default=default, metadata={"key": Key(value, meaning)})


_SIZE = whole(1, MAX_SIZE)
_RANKS = whole(1, MAX_RANKS)
_DTYPE = choice(*DTYPE_BYTES)
_NAMES = "model.layers.{}.self_attn.attn"
_STATE_NAMES = "model.layers.{}.mixer"
_OTHER_SIDE = "must match those of a description JSON on the other side"


@dataclass(frozen=True, slots=True)
class ShortForm:
    """The values of a short form. A default that is empty is derived, or means that the engine has no such thing."""

    layers: int = _key(
        0, whole(1, MAX_LAYERS), "layers of the model; required unless a side names a model"
    )
    heads: int = _key(0, _SIZE, "KV heads of the model, over all ranks")
    dim: int = _key(0, _SIZE, "elements of a head, K and V each")
    mla: int = _key(0, _SIZE, "elements of a token's latent, in place of heads and dim, e.g. 576")
    dtype: str = _key("bfloat16", _DTYPE, f"of the cache: {', '.join(DTYPE_BYTES)}")
    tp: int = _key(1, _RANKS, "tensor-parallel ranks; need not divide the heads, may exceed them")
    pp: int = _key(1, _RANKS, "pipeline stages, split as vLLM splits them")
    stages: tuple[int, ...] = _key((), STAGES, "layers of each pipeline stage, in place of pp")
    pcp: int = _key(1, _RANKS, "prefill context parallel ranks: replicas, unless dcp spans them")
    dcp: int = _key(1, _RANKS, "decode context parallel ranks: they share the tokens out")
    interleave: int = _key(
        0, _SIZE, "tokens in a row on one dcp rank, a divisor of block; default: block"
    )
    block: int = _key(
        16, _SIZE, "tokens of a scheduler block (`--block-size`), the unit of block ids"
    )
    kernel_block: int = _key(
        0, _SIZE, "tokens of a physical block, a divisor of block; default: block"
    )
    blocks: int = _key(
        8192, whole(2, 1 << 30), "scheduler blocks in the cache, of which block 0 is the null block"
    )
    layout: str = _key("HND", choice(*LAYOUTS), f"order of the axes: {', '.join(LAYOUTS)}")
    kv: str = _key(
        "packed",
        choice("packed", "apart"),
        "packed: a cell is `[K|V]`; apart: all of V behind all of K",
    )
    window: int = _key(
        0, WINDOW, "tokens of a sliding window (0: none), and which layers have it; default: all"
    )
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = _key(
        (), LAYER_LIST, "layers with a recurrent state in place of attention"
    )
    ssm: tuple[int, ...] = _key(
        (), STATE_SHAPE, "temporal state: heads (sharded) and the shape of one"
    )
    conv: tuple[ConvPart, ...] = _key(
        (), CONV, "convolution state: channels of sub-projections; `*`: on every rank"
    )
    conv_width: int = _key(3, _SIZE, "elements of a channel, the kernel's width less one")
    conv_layout: str = _key(
        "SD", choice("SD", "DS"), "SD: channels innermost; DS: a channel's elements together"
    )
    state_dtype: str = _key("", _DTYPE, "of the states; default: dtype")
    names: str = _key(_NAMES, NAME_TEMPLATE, f"names of the layers with attention; {_OTHER_SIDE}")
    state_names: str = _key(_STATE_NAMES, NAME_TEMPLATE, "names of the layers with states")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention."""
        others = {*self.window_layers, *self.state_layers}
        return tuple(layer for layer in range(self.layers) if layer not in others)


KEYS: dict[str, Key] = {
    option.name: option.metadata["key"] for option in fields(ShortForm) if option.metadata
}


def read_short_form(text: str) -> ShortForm:
    """Read a short form.

    Raises:
        InvalidArgument: with the key, its value and the accepted ones.
    """
    return form_of(pairs_of(text))


def pairs_of(text: str) -> dict[str, str]:
    """The keys of a short form with their values as text.

    Raises:
        InvalidArgument: a pair is none, or its key is unknown or there twice.
    """
    if len(text) > MAX_LENGTH:
        raise InvalidArgument(
            "text", Shown(f"{len(text)} characters"), f"at most {MAX_LENGTH} characters"
        )
    pairs: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise InvalidArgument("pair", pair, "key=value, pairs separated by commas")
        if key not in KEYS:
            raise InvalidArgument("key", key, one_of(key, KEYS, is_long=True))
        if key in pairs:
            raise InvalidArgument(key, value, "each key once")
        pairs[key] = value
    return pairs


def form_of(pairs: Mapping[str, str]) -> ShortForm:
    """The short form with these keys.

    Raises:
        InvalidArgument: a value is invalid, or keys contradict each other.
    """
    values = {key: KEYS[key].value.read(key, value) for key, value in pairs.items()}
    if values.get("window") == NO_WINDOW:
        del values["window"]
    return _filled(values)


def with_model(pairs: Mapping[str, str], model: Mapping[str, str]) -> dict[str, str]:
    """The pairs, and those of `MODEL_KEYS` of another engine that they do not say themselves."""
    said = set(pairs)
    # A latent says what heads say, and the other way round.
    if "mla" in pairs:
        said.update(("heads", "dim"))
    if "heads" in pairs or "dim" in pairs:
        said.add("mla")
    taken = {key: value for key, value in model.items() if key in MODEL_KEYS and key not in said}
    return {**taken, **pairs}


MODEL_KEYS = (
    "layers",
    "heads",
    "dim",
    "mla",
    "dtype",
    "window",
    "state_layers",
    "ssm",
    "conv",
    "conv_width",
    "state_dtype",
    "names",
    "state_names",
)
"""Keys that a form without `layers` takes from the other side."""


_NEEDS = {
    "conv_width": ("conv",),
    "conv_layout": ("conv",),
    "state_dtype": ("ssm", "conv"),
    "state_names": ("ssm", "conv"),
    "state_layers": ("ssm", "conv"),
    "ssm": ("state_layers",),
    "conv": ("state_layers",),
}
"""Keys that mean nothing without one of these."""
_EXCLUDES = {"stages": ("pp",), "mla": ("heads", "dim", "kv")}
"""Keys that say what these say."""


def _filled(values: dict[str, Any]) -> ShortForm:
    """The form with all derived values.

    Raises:
        InvalidArgument: keys contradict each other, or one is missing.
    """
    if "layers" not in values:
        raise InvalidArgument("layers", MISSING, "the number of layers, e.g. layers=32, or a model")
    for key, needed in _NEEDS.items():
        if key in values and not any(other in values for other in needed):
            raise InvalidArgument(key, values[key], f"{' or '.join(needed)} with it")
    for key, others in _EXCLUDES.items():
        for other in others:
            if key in values and other in values:
                raise InvalidArgument(
                    other, values[other], f"no {other} beside {key}: {key} says it already"
                )
    _fill_layers(values, values["layers"])
    _check_attention(values)
    block = values.get("block", 16)
    if "interleave" in values and values.get("dcp", 1) == 1:
        raise InvalidArgument("interleave", values["interleave"], "dcp above 1 with it")
    for key in ("kernel_block", "interleave"):
        if block % values.setdefault(key, block):
            raise InvalidArgument(key, values[key], f"a divisor of block={block}")
    values.setdefault("state_dtype", values.get("dtype", "bfloat16"))
    form = ShortForm(**values)
    _check_ranks(form)
    return form


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers per pipeline stage, as vLLM splits them: evenly, with the remainder on the stages before the last.

    Example: 34 layers in 4 stages are 8, 9, 9, 8.
    """
    size, rest = divmod(layers, pp)
    last = pp - 1
    larger = range(last - rest, last)
    return tuple(size + 1 if stage in larger else size for stage in range(pp))


def _fill_layers(values: dict[str, Any], layers: int) -> None:
    """The layers of stages, windows and states, in `values`.

    Raises:
        InvalidArgument: they do not fit to the number of layers.
    """
    pp = values.get("pp", 1)
    if pp > layers:
        raise InvalidArgument("pp", pp, f"at most layers={layers}")
    stages = values.setdefault("stages", even_stages(layers, pp))
    if sum(stages) != layers:
        raise InvalidArgument(
            "stages", "+".join(map(str, stages)), f"sizes that add up to layers={layers}"
        )
    values["pp"] = len(stages)
    if "window" in values:
        values["window"], listed = values["window"]
        values["window_layers"] = layers_of("window", listed, layers)
    if "state_layers" in values:
        values["state_layers"] = layers_of("state_layers", values["state_layers"], layers)
        in_both = sorted(set(values["state_layers"]) & set(values.get("window_layers", ())))
        if in_both:
            raise InvalidArgument(
                "state_layers", in_both[0], "layers that are not in the list of window"
            )


def _check_attention(values: dict[str, Any]) -> None:
    """Raises `InvalidArgument` if keys of attention are missing, or say what no layer has."""
    has_no_attention = len(values.get("state_layers", ())) == values["layers"]
    if has_no_attention:
        for key in ("heads", "dim", "mla", "kv"):
            if key in values:
                raise InvalidArgument(
                    key, values[key], "a layer with attention: all are in state_layers"
                )
        return
    if "mla" not in values:
        for key in ("heads", "dim"):
            if key not in values:
                raise InvalidArgument(key, MISSING, "heads and dim of the attention, or mla")
    if values.get("layout") == "CPU":
        if "mla" in values:
            raise InvalidArgument(
                "layout", "CPU", "another layout with mla: on the CPU it lies as LBHNC"
            )
        if "kv" in values:
            raise InvalidArgument(
                "kv", values["kv"], "no kv with layout=CPU, which says how K and V lie"
            )


def _check_ranks(form: ShortForm) -> None:
    """Raises `InvalidArgument` if the parallel sizes do not fit together."""
    ranks = form.pp * form.pcp * form.tp
    if ranks > MAX_RANKS:
        raise InvalidArgument("tp", form.tp, f"at most {MAX_RANKS} ranks; pp·pcp·tp is {ranks}")
    if form.pcp * form.tp % form.dcp:
        raise InvalidArgument("dcp", form.dcp, f"a divisor of pcp·tp={form.pcp * form.tp}")
    # All ranks of a latent hold the same head, so its groups of dcp ranks may be any.
    if form.mla or not form.heads:
        return
    if form.pcp % form.dcp == 0:
        return
    is_multiple = form.dcp % form.pcp == 0
    if not is_multiple or form.tp % (form.dcp // form.pcp):
        raise InvalidArgument(
            "dcp",
            form.dcp,
            f"a divisor or a multiple of pcp={form.pcp} whose groups fill whole tensor-parallel ranks",
        )


def defaults() -> dict[str, str]:
    """The default of every key that has one, as text for the documentation."""
    texts = {}
    for option in fields(ShortForm):
        is_written = isinstance(option.default, (int, str)) and bool(option.default)
        if option.name in KEYS and is_written:
            texts[option.name] = str(option.default)
    return texts
