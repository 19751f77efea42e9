"""How the text of a short form becomes a `ShortForm`.

    text ── pairs_of ──► pairs ── with_model ──► pairs, those of the other side's model too ── form_of ──► form

What is wrong is found on the way, each where it can first be known: a pair by itself, a value by itself, keys that
contradict each other by what was written, and sizes that do not fit together by what was derived, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_form import KEYS, MAX_RANKS, ShortForm, layers_in
from kvferry.protocol.errors import MISSING, Shown, one_of

# A few characters must not ask for more than can be described in a moment.
MAX_LENGTH = 4096

# Keys that a form without `layers` takes from the other side.
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
    """The pairs, and those of `MODEL_KEYS` of another engine that they do not say themselves."""
    said = set(pairs)
    # A latent says what heads say, and the other way round.
    if "mla" in pairs:
        said.update(("heads", "dim"))
    if "heads" in pairs or "dim" in pairs:
        said.add("mla")
    taken = {
        key: value
        for key, value in model.items()
        if key in MODEL_KEYS and key not in said
    }
    return {**taken, **pairs}


def form_of(pairs: Mapping[str, str]) -> ShortForm:
    """The short form with these keys.

    Raises:
        InvalidArgument: a value is invalid, or keys contradict each other.
    """
    values = {key: KEYS[key].read(key, text) for key, text in pairs.items()}
    # It is written behind a model whose config.json has windows, and means none.
    if "window" in values and not values["window"].tokens:
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
        derived["window_layers"] = layers_in("window", listed, layers)
    if "state_layers" in values:
        derived["state_layers"] = layers_in(
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
    yield from _misfits_of_attention(form, written)
    for key, size in (
        ("kernel_block", form.kernel_block),
        ("interleave", form.interleave),
    ):
        if form.block % size:
            yield key, f"a divisor of block={form.block}"
    yield from _misfits_of_ranks(form)


def _misfits_of_attention(form: ShortForm, written: Container[str]) -> _Problems:
    if not form.has_attention:
        for key in _OF_ATTENTION:
            if key in written:
                yield key, "a layer with attention: all are in state_layers"
    elif not form.mla:
        for key in ("heads", "dim"):
            if key not in written:
                yield key, "heads and dim of the attention, or mla"


def _misfits_of_ranks(form: ShortForm) -> _Problems:
    ranks = form.pp * form.pcp * form.tp
    if ranks > MAX_RANKS:
        yield "tp", f"at most {MAX_RANKS} ranks; pp·pcp·tp is {ranks}"
    if form.pcp * form.tp % form.dcp:
        yield "dcp", f"a divisor of pcp·tp={form.pcp * form.tp}"
    # All ranks of a latent hold the same head, so its groups of dcp ranks may be any.
    if form.mla or not form.heads or form.pcp % form.dcp == 0:
        return
    if form.dcp % form.pcp or form.tp % (form.dcp // form.pcp):
        yield (
            "dcp",
            f"a divisor or a multiple of pcp={form.pcp} whose groups fill whole tensor-parallel ranks",
        )
