"""The short form of an engine: `layers=32,heads=8,dim=128,tp=4,pp=2,block=16,layout=NHD,dtype=bfloat16`.

Pairs of key and value, separated by commas, in any order, none twice. This module reads the text; `short_engine` builds
the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kvferry.cli.arguments import InvalidShortForm
from kvferry.cli.plan.short_values import (
    DTYPE_BYTES,
    LAYOUTS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SIZE,
    NO_WINDOW,
    ConvPart,
    Read,
    choice,
    conv_parts,
    layer_list,
    layers_of,
    name_template,
    stages,
    state_shape,
    whole,
    window_of,
)
from kvferry.protocol.errors import MISSING, Shown, one_of

MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class ShortForm:
    """The values of a short form with all defaults. Keys and meanings: `KEYS`."""

    layers: int
    heads: int = 0
    dim: int = 0
    mla: int = 0
    dtype: str = "bfloat16"
    tp: int = 1
    pp: int = 1
    stages: tuple[int, ...] = ()
    pcp: int = 1
    dcp: int = 1
    interleave: int = 0
    block: int = 16
    kernel_block: int = 0
    blocks: int = 8192
    layout: str = "HND"
    kv: str = "packed"
    window: int = 0
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    ssm: tuple[int, ...] = ()
    conv: tuple[ConvPart, ...] = ()
    conv_width: int = 3
    conv_layout: str = "SD"
    state_dtype: str = ""
    names: str = "model.layers.{}.self_attn.attn"
    state_names: str = "model.layers.{}.mixer"

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention."""
        others = {*self.window_layers, *self.state_layers}
        return tuple(layer for layer in range(self.layers) if layer not in others)


class Key(NamedTuple):
    """A key of the short form: the function that reads its value, the value's form, and its meaning."""

    read: Read
    form: str
    meaning: str


def read_short_form(text: str) -> ShortForm:
    """Read a short form. Raises `InvalidShortForm` with the key, its value and the accepted ones."""
    return form_of(pairs_of(text))


def pairs_of(text: str) -> dict[str, str]:
    """The keys of a short form with their values as text. Raises `InvalidShortForm`."""
    if len(text) > MAX_LENGTH:
        raise InvalidShortForm("text", Shown(f"{len(text)} characters"), f"at most {MAX_LENGTH} characters")
    pairs: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise InvalidShortForm("pair", pair, "key=value, pairs separated by commas")
        if key not in KEYS:
            raise InvalidShortForm("key", key, one_of(key, KEYS, is_long=True))
        if key in pairs:
            raise InvalidShortForm(key, value, "each key once")
        pairs[key] = value
    return pairs


def form_of(pairs: Mapping[str, str]) -> ShortForm:
    """The short form with these keys. Raises `InvalidShortForm`."""
    values = {key: KEYS[key].read(key, value) for key, value in pairs.items()}
    if values.get("window") == NO_WINDOW:
        del values["window"]
    return _filled(values)


def with_model(pairs: Mapping[str, str], model: Mapping[str, str]) -> dict[str, str]:
    """The pairs, and those of `MODEL_KEYS` of another engine that they do not say themselves."""
    said = {*pairs, *(("heads", "dim") if "mla" in pairs else ()), *(("mla",) if {"heads", "dim"} & {*pairs} else ())}
    return {**{key: value for key, value in model.items() if key in MODEL_KEYS and key not in said}, **pairs}


MODEL_KEYS = (
    *("layers", "heads", "dim", "mla", "dtype", "window", "state_layers", "ssm", "conv", "conv_width", "state_dtype"),
    *("names", "state_names"),
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
    """The form with all derived values; raises for keys that contradict each other."""
    if "layers" not in values:
        raise InvalidShortForm("layers", MISSING, "the number of layers, e.g. layers=32, or a model")
    for key, needed in _NEEDS.items():
        if key in values and not any(other in values for other in needed):
            raise InvalidShortForm(key, values[key], f"{' or '.join(needed)} with it")
    for key, others in _EXCLUDES.items():
        for other in others:
            if key in values and other in values:
                raise InvalidShortForm(other, values[other], f"no {other} beside {key}: {key} says it already")
    _fill_layers(values, values["layers"])
    _check_attention(values)
    block = values.get("block", 16)
    if "interleave" in values and values.get("dcp", 1) == 1:
        raise InvalidShortForm("interleave", values["interleave"], "dcp above 1 with it")
    for key in ("kernel_block", "interleave"):
        if block % values.setdefault(key, block):
            raise InvalidShortForm(key, values[key], f"a divisor of block={block}")
    values.setdefault("state_dtype", values.get("dtype", "bfloat16"))
    form = ShortForm(**values)
    _check_ranks(form)
    return form


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers per pipeline stage, as vLLM splits them: evenly, with the remainder on the stages before the last.

    Example: 34 layers in 4 stages are 8, 9, 9, 8.
    """
    size, rest = divmod(layers, pp)
    return tuple(size + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp))


def _fill_layers(values: dict[str, Any], layers: int) -> None:
    """The layers of stages, windows and states."""
    pp = values.get("pp", 1)
    if pp > layers:
        raise InvalidShortForm("pp", pp, f"at most layers={layers}")
    stages = values.setdefault("stages", even_stages(layers, pp))
    if sum(stages) != layers:
        raise InvalidShortForm("stages", "+".join(map(str, stages)), f"sizes that add up to layers={layers}")
    values["pp"] = len(stages)
    if "window" in values:
        values["window"], listed = values["window"]
        values["window_layers"] = layers_of("window", listed, layers)
    if "state_layers" in values:
        values["state_layers"] = layers_of("state_layers", values["state_layers"], layers)
        both = sorted(set(values["state_layers"]) & set(values.get("window_layers", ())))
        if both:
            raise InvalidShortForm("state_layers", both[0], "layers that are not in the list of window")


def _check_attention(values: dict[str, Any]) -> None:
    if len(values.get("state_layers", ())) == values["layers"]:
        for key in ("heads", "dim", "mla", "kv"):
            if key in values:
                raise InvalidShortForm(key, values[key], "a layer with attention: all are in state_layers")
        return
    for key in () if "mla" in values else ("heads", "dim"):
        if key not in values:
            raise InvalidShortForm(key, MISSING, "heads and dim of the attention, or mla")
    if values.get("layout") == "CPU":
        if "mla" in values:
            raise InvalidShortForm("layout", "CPU", "another layout with mla: on the CPU it lies as LBHNC")
        if "kv" in values:
            raise InvalidShortForm("kv", values["kv"], "no kv with layout=CPU, which says how K and V lie")


def _check_ranks(form: ShortForm) -> None:
    ranks = form.pp * form.pcp * form.tp
    if ranks > MAX_RANKS:
        raise InvalidShortForm("tp", form.tp, f"at most {MAX_RANKS} ranks; pp·pcp·tp is {ranks}")
    if form.pcp * form.tp % form.dcp:
        raise InvalidShortForm("dcp", form.dcp, f"a divisor of pcp·tp={form.pcp * form.tp}")
    if form.mla or not form.heads:
        return
    if form.pcp % form.dcp and (form.dcp % form.pcp or form.tp % (form.dcp // form.pcp)):
        text = f"a divisor or a multiple of pcp={form.pcp} whose groups fill whole tensor-parallel ranks"
        raise InvalidShortForm("dcp", form.dcp, text)


_SIZE = whole(1, MAX_SIZE)

KEYS = {
    "layers": Key(whole(1, MAX_LAYERS), "number", "layers of the model; required unless a side names a model"),
    "heads": Key(_SIZE, "number", "KV heads of the model, over all ranks"),
    "dim": Key(_SIZE, "number", "elements of a head, K and V each"),
    "mla": Key(_SIZE, "number", "elements of a token's latent, in place of heads and dim, e.g. 576"),
    "dtype": Key(choice(*DTYPE_BYTES), "name", f"of the cache: {', '.join(DTYPE_BYTES)}"),
    "tp": Key(whole(1, MAX_RANKS), "number", "tensor-parallel ranks; need not divide the heads, may exceed them"),
    "pp": Key(whole(1, MAX_RANKS), "number", "pipeline stages, split as vLLM splits them"),
    "stages": Key(stages, "`n+n+…`", "layers of each pipeline stage, in place of pp"),
    "pcp": Key(whole(1, MAX_RANKS), "number", "prefill context parallel ranks: replicas, unless dcp spans them"),
    "dcp": Key(whole(1, MAX_RANKS), "number", "decode context parallel ranks: they share the tokens out"),
    "interleave": Key(_SIZE, "number", "tokens in a row on one dcp rank, a divisor of block; default: block"),
    "block": Key(_SIZE, "number", "tokens of a scheduler block (`--block-size`), the unit of block ids"),
    "kernel_block": Key(_SIZE, "number", "tokens of a physical block, a divisor of block; default: block"),
    "blocks": Key(whole(2, 1 << 30), "number", "scheduler blocks in the cache, of which block 0 is the null block"),
    "layout": Key(choice(*LAYOUTS), "name", f"order of the axes: {', '.join(LAYOUTS)}"),
    "kv": Key(choice("packed", "apart"), "name", "packed: a cell is `[K|V]`; apart: all of V behind all of K"),
    "window": Key(
        window_of,
        "`n` or `n@layers`",
        "tokens of a sliding window (0: none), and which layers have it; default: all",
    ),
    "state_layers": Key(layer_list, "layers", "layers with a recurrent state in place of attention"),
    "ssm": Key(state_shape, "`HxDxN` or `HxN`", "temporal state: heads (sharded) and the shape of one"),
    "conv": Key(
        conv_parts, "`x1536+B128+C128`", "convolution state: channels of its sub-projections; `*`: on every rank"
    ),
    "conv_width": Key(_SIZE, "number", "elements of a channel, the kernel's width less one"),
    "conv_layout": Key(choice("SD", "DS"), "name", "SD: channels innermost; DS: a channel's elements together"),
    "state_dtype": Key(choice(*DTYPE_BYTES), "name", "of the states; default: dtype"),
    "names": Key(
        name_template,
        "text with `{}`",
        "names of the layers with attention; must match those of a description JSON on the other side",
    ),
    "state_names": Key(name_template, "text with `{}`", "names of the layers with states"),
}


def defaults() -> dict[str, str]:
    """The default of every key that has one, as text for the documentation."""
    shown = {}
    for option in fields(ShortForm):
        if option.name in KEYS and isinstance(option.default, (int, str)) and option.default:
            shown[option.name] = str(option.default)
    return shown
