"""PRODUCER and CONSUMER of a command line.

| argument | read as |
| --- | --- |
| `-`, or a file with `kvferry_description` | a description JSON |
| `./config.json`, `./folder`, `meta-llama/Llama-3.1-8B`, each also with `,tp=4,…` behind it | a model's config.json |
| `layers=32,heads=8,dim=128,tp=4` | a short form |
| `tp=4,…` | a short form with the model of the other side |

A model's name is looked up in the local hub cache. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from kvferry.cli.arguments import InvalidArgument, InvalidSide, read_file
from kvferry.cli.plan.model_config import read_model_config
from kvferry.cli.plan.short_engine import UNKNOWN_MODEL, engine_of_form
from kvferry.cli.plan.short_form import form_of, pairs_of, with_model
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import MAX_DESCRIPTION_JSON_BYTES, EngineJson, decode_engine_json, engine_of
from kvferry.protocol.errors import InputError
from kvferry.protocol.handshake import EngineDescription, ModelFacts

STDIN = "-"
CONFIG = "config.json"
_ACCEPTED = (
    "layers=…,heads=…,dim=…, a description JSON, - for standard input, a model's config.json or folder, "
    "or a model in the local hub cache"
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_COMMIT = re.compile(rb"[0-9a-f]{40}")


Pairs = Mapping[str, str]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Side:
    """One side. `form`: the whole short form, if the command line has only a part of it."""

    engine: EngineDescription
    form: str = ""


def read_pair(
    producer: str, consumer: str, read_stdin: Callable[[], bytes]
) -> tuple[EngineDescription, EngineDescription]:
    """Both engines; raises as `read_sides`."""
    there, here = read_sides(producer, consumer, read_stdin)
    return there.engine, here.engine


def read_sides(producer: str, consumer: str, read_stdin: Callable[[], bytes]) -> tuple[Side, Side]:
    """Read both sides.

    A short form has no facts about the weights: it takes those of the other side, except for the dtype of its cache.

    Raises:
        InvalidSide: naming the side and the field.
        InvalidArgument: both sides are standard input.
    """
    if producer == consumer == STDIN:
        raise InvalidArgument("CONSUMER", STDIN, "another source: PRODUCER reads standard input already")
    written = [_blaming(role, _read, role, argument, read_stdin) for role, argument in _roles(producer, consumer)]
    pairs = [None if isinstance(one, EngineJson) else one for one in written]
    engines, forms = [], []
    for (role, argument), one, mine, other in zip(_roles(producer, consumer), written, pairs, pairs[::-1], strict=True):
        whole = with_model(mine, other) if mine is not None and other is not None and "layers" not in mine else mine
        engines.append(one if isinstance(one, EngineJson) else _blaming(role, _build, whole or {}, role))
        form = ",".join(f"{key}={value}" for key, value in (whole or {}).items())
        forms.append("" if form == argument.replace(" ", "") else form)
    sides = []
    for (role, _), own, theirs, form in zip(_roles(producer, consumer), engines, engines[::-1], forms, strict=True):
        described = engine_of(msgspec.structs.replace(own, facts=_reported(own.facts, theirs.facts)))
        _blaming(role, check_description, described)
        sides.append(Side(described, form))
    return sides[0], sides[1]


def _roles(producer: str, consumer: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("PRODUCER", producer), ("CONSUMER", consumer)


def _blaming(role: str, read: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The result; an `InputError` becomes an `InvalidSide` of this role."""
    try:
        return read(*arguments, **options)
    except InputError as wrong:
        raise InvalidSide(role, wrong) from None


def _build(pairs: Pairs, role: str) -> EngineJson:
    """The engine of a short form; its id is its role."""
    return engine_of_form(form_of(pairs), role.lower())


def _read(role: str, argument: str, read_stdin: Callable[[], bytes]) -> EngineJson | Pairs:
    """A description, or the pairs of a short form, those of a model's config.json included.

    Raises:
        InvalidArgument: there is no such file or model, or it cannot be read.
        InvalidDescription, InvalidModel: the file is not one of these.
        InvalidShortForm: a pair is invalid.
    """
    if argument == STDIN:
        return decode_engine_json(read_stdin())
    model, _, keys = (argument, "", "") if os.path.exists(argument) else argument.partition(",")
    if "=" in model and not os.path.exists(model):
        return pairs_of(argument)
    given = pairs_of(keys) if keys else {}
    text = read_file(InvalidArgument, role, str(_file_of(role, model)), MAX_DESCRIPTION_JSON_BYTES)
    if b'"kvferry_description"' in text:
        if given:
            raise InvalidArgument(role, argument, "no keys behind a description JSON")
        return decode_engine_json(text)
    return with_model(given, read_model_config(text, given))


def _file_of(role: str, model: str) -> Path:
    """A file, the config.json of a folder, or that of a model in the local hub cache. Raises `InvalidArgument`."""
    if os.path.isdir(model):
        return Path(model, CONFIG)
    if os.path.exists(model):
        return Path(model)
    hub, commit = _hub_cache(), b""
    folder = hub / f"models--{model.replace('/', '--')}"
    if _NAME.fullmatch(model) and ".." not in model:
        with contextlib.suppress(OSError):
            commit = (folder / "refs" / "main").read_bytes()[:80].strip()
    path = folder / "snapshots" / commit.decode(errors="replace") / CONFIG
    if not _COMMIT.fullmatch(commit) or not path.is_file():
        raise InvalidArgument(role, model, f"{_ACCEPTED} ({hub}); there is none, and nothing is downloaded")
    return path


def _hub_cache() -> Path:
    """As huggingface_hub finds it."""
    environ = os.environ
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _reported(facts: ModelFacts, other: ModelFacts) -> ModelFacts:
    """Facts of a side: its own, or those of the other side if it has none. The dtype of its tensors is not changed."""
    if facts.model != UNKNOWN_MODEL or other.model == UNKNOWN_MODEL:
        return facts
    return other
