"""The short form of an engine: `layers=32,heads=8,dim=128,tp=4,pp=2,block=16,layout=NHD,dtype=bfloat16`.

    text ── pairs_of ──► pairs ── with_model ──► pairs, those of the other side's model too ── form_of ──► form

What is wrong is found where it can first be known: a pair by itself, a value by itself, keys that contradict each other
by what was written, and sizes that do not fit together by what was derived, too. `short_engine` builds the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from kvferry.cli.arguments import InvalidArgument, whole_option
from kvferry.protocol.errors import MISSING, Shown, one_of

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
# Axes from the outermost to the innermost: layers, blocks, heads, tokens, content (`[K|V]`).
LAYOUTS = {
    "HND": "LBHNC",
    "NHD": "LBNHC",
    **{name: name for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "CPU": "LBHNC",
}

# A few characters must not ask for more than can be described in a moment.
MAX_LAYERS = 4096
MAX_RANKS = 4096
MAX_SIZE = 65536
MAX_WINDOW = 1 << 40

MAX_LENGTH = 4096

ALL_LAYERS = "*"


class ConvPart(NamedTuple):
    """A sub-projection of a convolution state.

    Example: `B128` has 128 channels, split over the ranks; of `B128*` every rank has all.
    """

    name: str
    channels: int
    replicated: bool


# Kinds of values. A reader gets the key, which its error names, and the text. Which layers a list names depends on
# their number, so a list stays text, and `_layers_in` reads it once that is known.


def _choice(key: str, text: str, accepted: Iterable[str]) -> str:
    """One of these names, in any case."""
    for name in accepted:
        if name.lower() == text.lower():
            return name
    raise InvalidArgument(key, text, one_of(text, accepted))


def _matching(key: str, text: str, pattern: str, expected: str) -> str:
    """Text that matches as a whole."""
    if not re.fullmatch(pattern, text):
        raise InvalidArgument(key, text, expected)
    return text


def _sizes(key: str, text: str, pattern: str, expected: str) -> tuple[int, ...]:
    """Whole numbers up to `MAX_SIZE` with + or x between them."""
    matched = _matching(key, text, pattern, expected)
    numbers = tuple(int(size) for size in re.split(r"[+x]", matched))
    if max(numbers) > MAX_SIZE:
        raise InvalidArgument(key, text, f"sizes up to {MAX_SIZE}")
    return numbers


_ITEM = r"[0-9]{1,5}(-[0-9]{1,5}(/[0-9]{1,5})?)?"
_SIZE = "[1-9][0-9]{0,4}"
_NAME = r"[A-Za-z0-9_./:-]{0,120}"
_CONV_PART = re.compile(r"([A-Za-z]{0,16})([1-9][0-9]{0,5})(\*?)")

_dtype = partial(_choice, accepted=DTYPE_BYTES)
_layer_list = partial(
    _matching,
    pattern=rf"\*|{_ITEM}(\+{_ITEM})*",
    expected="layers joined by +, e.g. 0-4+6, 0-30/2 for every second, or * for all",
)
_stages = partial(
    _sizes,
    pattern=rf"{_SIZE}(\+{_SIZE})*",
    expected="layers of every stage joined by +, e.g. 20+12",
)
_state_shape = partial(
    _sizes,
    pattern=rf"{_SIZE}(x{_SIZE}){{1,2}}",
    expected="heads and their shape joined by x, e.g. 24x64x128, or 1536x16",
)
# `str.format` reads attributes of what it is given, so nothing but a bare {} may pass.
_template = partial(
    _matching,
    pattern=rf"{_NAME}\{{\}}{_NAME}",
    expected="a name with {} where the layer's number goes, e.g. model.layers.{}.attn",
)


def _window(key: str, text: str) -> tuple[int, str]:
    """`n`, or `n@layers`, or `0`: the tokens, and the list of layers."""
    if text == "0":
        return 0, ALL_LAYERS
    tokens, at, layers = text.partition("@")
    listed = layers if at else ALL_LAYERS
    return whole_option(key, tokens, 1, MAX_WINDOW), _layer_list(key, listed)


def _conv_parts(key: str, text: str) -> tuple[ConvPart, ...]:
    """`x1536+B128+C128*`; one without a name is x."""
    parts = {}
    items = text.split("+")
    for item in items:
        match = _CONV_PART.fullmatch(item)
        if match is None:
            expected = "names with channels, e.g. x1536+B128+C128, with * where every rank has all"
            raise InvalidArgument(key, item, expected)
        name, channels, star = match.groups()
        part = ConvPart(name or "x", int(channels), bool(star))
        parts[part.name] = part
    if len(parts) != len(items):
        raise InvalidArgument(key, text, "a name of its own for every sub-projection")
    return tuple(parts.values())


# Keys.


class Key(NamedTuple):
    """A key: how its value is written, as in docs/cli.md, and read, and whether a form without `layers` takes it from
    the other side."""

    form: str
    read: Callable[[str, str], Any]
    of_model: bool


def _key(
    default: Any, form: str, read: Callable[[str, str], Any], *, of_model: bool = False
) -> Any:
    return field(default=default, metadata={"key": Key(form, read, of_model)})


def _number(
    default: int, high: int = MAX_SIZE, low: int = 1, *, of_model: bool = False
) -> Any:
    read = partial(whole_option, low=low, high=high)
    return _key(default, "number", read, of_model=of_model)


@dataclass(frozen=True, slots=True)
class ShortForm:
    """The values of a short form; docs/cli.md says what each key means.

    A default that is empty is derived, or means that the engine has no such thing.
    """

    # The model.
    layers: int = _number(0, MAX_LAYERS, of_model=True)
    heads: int = _number(0, of_model=True)
    dim: int = _number(0, of_model=True)
    mla: int = _number(0, of_model=True)
    dtype: str = _key("bfloat16", "name", _dtype, of_model=True)
    # Its ranks; `interleave`: tokens in a row on one dcp rank.
    tp: int = _number(1, MAX_RANKS)
    pp: int = _number(1, MAX_RANKS)
    stages: tuple[int, ...] = _key((), "`n+n+…`", _stages)
    pcp: int = _number(1, MAX_RANKS)
    dcp: int = _number(1, MAX_RANKS)
    interleave: int = _number(0)
    # Its cache; `block` is a scheduler block, `kernel_block` a physical one.
    block: int = _number(16)
    kernel_block: int = _number(0)
    blocks: int = _number(8192, 1 << 30, 2)
    layout: str = _key("HND", "name", partial(_choice, accepted=LAYOUTS))
    kv: str = _key("packed", "name", partial(_choice, accepted=("packed", "apart")))
    # Layers without full attention.
    window: int = _key(0, "`n` or `n@layers`", _window, of_model=True)
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = _key((), "layers", _layer_list, of_model=True)
    ssm: tuple[int, ...] = _key((), "`HxDxN` or `HxN`", _state_shape, of_model=True)
    conv: tuple[ConvPart, ...] = _key(
        (), "`x1536+B128+C128`", _conv_parts, of_model=True
    )
    conv_width: int = _number(3, of_model=True)
    conv_layout: str = _key("SD", "name", partial(_choice, accepted=("SD", "DS")))
    state_dtype: str = _key("", "name", _dtype, of_model=True)
    # Names of layers, which must be those of a description JSON on the other side.
    names: str = _key(
        "model.layers.{}.self_attn.attn", "text with `{}`", _template, of_model=True
    )
    state_names: str = _key(
        "model.layers.{}.mixer", "text with `{}`", _template, of_model=True
    )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention."""
        others = {*self.window_layers, *self.state_layers}
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def has_attention(self) -> bool:
        """Whether any layer has."""
        return len(self.state_layers) < self.layers


KEYS: dict[str, Key] = {
    option.name: option.metadata["key"]
    for option in fields(ShortForm)
    if option.metadata
}


def _layers_in(key: str, listed: str, layers: int) -> tuple[int, ...]:
    """The layers in a list like `0-30/2+31`: single layers, inclusive ranges, every n-th of a range.

    Raises:
        InvalidArgument: the model has fewer layers, or a range is empty.
    """
    if listed == ALL_LAYERS:
        return tuple(range(layers))
    chosen: set[int] = set()
    for item in listed.split("+"):
        span, _, every = item.partition("/")
        first, _, last = span.partition("-")
        low = int(first)
        high = int(last or first)
        step = int(every or 1)
        if not low <= high < layers or step < 1:
            raise InvalidArgument(
                key, item, f"layers from 0 to {layers - 1}, the lower one first"
            )
        chosen.update(range(low, high + 1, step))
    return tuple(sorted(chosen))


# Reading of a whole text.

# Keys that mean nothing without one of these.
_NEEDS = {
    "conv_width": ("conv",),
    "conv_layout": ("conv",),
    "state_dtype": ("ssm", "conv"),
    "state_names": ("ssm", "conv"),
    "state_layers": ("ssm", "conv"),
    "ssm": ("state_layers",),
    "conv": ("state_layers",),
}
# Keys, and those that would say once more beside them what they say.
_EXCLUDES = {"stages": ("pp",), "mla": ("heads", "dim", "kv")}
# Keys of attention alone. Not those that states have, too, or that may come with a model.
_OF_ATTENTION = ("heads", "dim", "mla", "kv")

# What is wrong with a form: keys, each with what was expected of it. The first is the error.
_Problems = Iterator[tuple[str, str]]


def pairs_of(text: str) -> dict[str, str]:
    """The keys of a short form with their values as text.

    Raises:
        InvalidArgument: a pair is none, or its key is unknown or there twice.
    """
    if len(text) > MAX_LENGTH:
        expected = f"at most {MAX_LENGTH} characters"
        raise InvalidArgument("text", Shown(f"{len(text)} characters"), expected)
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


def with_model(pairs: Mapping[str, str], model: Mapping[str, str]) -> dict[str, str]:
    """The pairs, and those of another engine's model that they do not say themselves."""
    said = set(pairs)
    # A latent says what heads say, and the other way round.
    if "mla" in pairs:
        said.update(("heads", "dim"))
    if "heads" in pairs or "dim" in pairs:
        said.add("mla")
    taken = {
        key: value
        for key, value in model.items()
        if KEYS[key].of_model and key not in said
    }
    return {**taken, **pairs}


def form_of(pairs: Mapping[str, str]) -> ShortForm:
    """The short form with these keys.

    Raises:
        InvalidArgument: a value is invalid, or keys contradict each other.
    """
    values = {key: KEYS[key].read(key, text) for key, text in pairs.items()}
    # It is written behind a model whose config.json has windows, and means none.
    if values.get("window") == (0, ALL_LAYERS):
        del values["window"]
    _refuse(_contradictions(values), pairs)
    form = _with_derived(values)
    _refuse(_misfits(form, values), pairs)
    return form


def _refuse(problems: _Problems, pairs: Mapping[str, str]) -> None:
    """Raise the first of these problems, with what was written."""
    for key, expected in problems:
        raise InvalidArgument(key, pairs.get(key, MISSING), expected)


def _contradictions(values: Mapping[str, Any]) -> _Problems:
    """Keys that are missing, or that say nothing beside others."""
    if "layers" not in values:
        yield "layers", "the number of layers, e.g. layers=32, or a model"
    for key, needed in _NEEDS.items():
        if key in values and not any(other in values for other in needed):
            yield key, f"{' or '.join(needed)} with it"
    for key, others in _EXCLUDES.items():
        for other in others:
            if key in values and other in values:
                yield other, f"no {other} beside {key}: {key} says it already"
    if "interleave" in values and values.get("dcp", 1) == 1:
        yield "interleave", "dcp above 1 with it"
    if values.get("layout") == "CPU":
        if "mla" in values:
            yield "layout", "another layout with mla: on the CPU it lies as LBHNC"
        if "kv" in values:
            yield "kv", "no kv with layout=CPU, which says how K and V lie"


def _with_derived(values: Mapping[str, Any]) -> ShortForm:
    """The form with everything that follows from what was written."""
    layers = values["layers"]
    block = values.get("block", 16)
    # What is written comes last and replaces what is derived.
    derived = {
        "stages": even_stages(layers, values.get("pp", 1)),
        "kernel_block": block,
        "interleave": block,
        "state_dtype": values.get("dtype", "bfloat16"),
        **values,
    }
    derived["pp"] = len(derived["stages"])
    if "window" in values:
        derived["window"], listed = values["window"]
        derived["window_layers"] = _layers_in("window", listed, layers)
    if "state_layers" in values:
        derived["state_layers"] = _layers_in(
            "state_layers", values["state_layers"], layers
        )
    return ShortForm(**derived)


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers per pipeline stage, as vLLM splits them: evenly, with the remainder on the stages before the last.

    Example: 34 layers in 4 stages are 8, 9, 9, 8.
    """
    size, rest = divmod(layers, pp)
    # vLLM spares the last one, which has a norm more, and as long as it can the first, which has the embeddings.
    last = pp - 1
    larger = range(last - rest, last)
    return tuple(size + 1 if stage in larger else size for stage in range(pp))


def _misfits(form: ShortForm, written: Container[str]) -> _Problems:
    """Sizes that do not fit together, and keys of what the engine does not have."""
    if form.pp > form.layers:
        yield "pp", f"at most layers={form.layers}"
    if sum(form.stages) != form.layers:
        yield "stages", f"sizes that add up to layers={form.layers}"
    if set(form.state_layers) & set(form.window_layers):
        yield "state_layers", "layers that are not in the list of window"
    for key in _OF_ATTENTION:
        if key in written and not form.has_attention:
            yield key, "a layer with attention: all are in state_layers"
    for key in ("heads", "dim"):
        if key not in written and form.has_attention and not form.mla:
            yield key, "heads and dim of the attention, or mla"
    for key in ("kernel_block", "interleave"):
        if form.block % getattr(form, key):
            yield key, f"a divisor of block={form.block}"
    ranks = form.pp * form.pcp * form.tp
    if ranks > MAX_RANKS:
        yield "tp", f"at most {MAX_RANKS} ranks; pp·pcp·tp is {ranks}"
    if form.pcp * form.tp % form.dcp:
        yield "dcp", f"a divisor of pcp·tp={form.pcp * form.tp}"
    # All ranks of a latent hold the same head, so its groups of dcp ranks may be any.
    is_free = form.mla or not form.heads or form.pcp % form.dcp == 0
    if not is_free and (form.dcp % form.pcp or form.tp % (form.dcp // form.pcp)):
        yield (
            "dcp",
            f"a divisor or a multiple of pcp={form.pcp} whose groups fill whole tensor-parallel ranks",
        )
