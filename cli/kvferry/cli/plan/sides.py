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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.cli.arguments import InvalidArgument, InvalidSide, read_file
from kvferry.cli.plan.model_config import read_model_config
from kvferry.cli.plan.short_engine import UNKNOWN_MODEL, engine_of_form
from kvferry.cli.plan.short_form import form_of, pairs_of, with_model
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import (
    MAX_DESCRIPTION_JSON_BYTES,
    EngineJson,
    decode_engine_json,
    from_engine_json,
)
from kvferry.protocol.errors import InputError
from kvferry.protocol.handshake import EngineDescription

STDIN = "-"
CONFIG = "config.json"
_ACCEPTED = (
    "layers=…,heads=…,dim=…, a description JSON, - for standard input, a model's config.json or folder, "
    "or a model in the local hub cache"
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_COMMIT = re.compile(rb"[0-9a-f]{40}")

Pairs = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReadSide:
    """One side.

    Attributes:
        form: the whole short form, if the command line has only a part of it.
    """

    engine: EngineDescription
    form: str = ""


def read_sides(
    producer: str, consumer: str, read_stdin: Callable[[], bytes]
) -> tuple[ReadSide, ReadSide]:
    """Read both sides.

    Raises:
        InvalidSide: naming the side and the field.
        InvalidArgument: both sides are standard input.
    """
    if producer == consumer == STDIN:
        expected = "another source: PRODUCER reads standard input already"
        raise InvalidArgument("CONSUMER", STDIN, expected)
    with _naming_side("PRODUCER"):
        there = _read("PRODUCER", producer, read_stdin)
    with _naming_side("CONSUMER"):
        here = _read("CONSUMER", consumer, read_stdin)
    # Both are read before either is completed: each may need the model of the other, and then its facts.
    there, here = _with_layers(there, here), _with_layers(here, there)
    there_json = _engine_json("PRODUCER", there)
    here_json = _engine_json("CONSUMER", here)
    return (
        _side("PRODUCER", there_json, here_json, _completed(producer, there)),
        _side("CONSUMER", here_json, there_json, _completed(consumer, here)),
    )


def _with_layers(
    own: EngineJson | Pairs, other: EngineJson | Pairs
) -> EngineJson | Pairs:
    """A form without a model has that of the other side's form."""
    if isinstance(own, EngineJson) or isinstance(other, EngineJson) or "layers" in own:
        return own
    return with_model(own, other)


def _completed(argument: str, read: EngineJson | Pairs) -> str:
    """The whole short form, if the argument has only a part of it."""
    if isinstance(read, EngineJson):
        return ""
    form = ",".join(f"{key}={value}" for key, value in read.items())
    return "" if form == argument.replace(" ", "") else form


def _engine_json(role: str, read: EngineJson | Pairs) -> EngineJson:
    if isinstance(read, EngineJson):
        return read
    with _naming_side(role):
        return engine_of_form(form_of(read), role.lower())


def _side(role: str, own: EngineJson, other: EngineJson, form: str) -> ReadSide:
    # A short form has no facts about the weights: it takes those of the other side, if that has any.
    if own.facts.model == UNKNOWN_MODEL != other.facts.model:
        own = msgspec.structs.replace(own, facts=other.facts)
    engine = from_engine_json(own)
    with _naming_side(role):
        check_description(engine)
    return ReadSide(engine, form)


@contextlib.contextmanager
def _naming_side(role: str) -> Iterator[None]:
    """An `InputError` becomes an `InvalidSide` of this role."""
    try:
        yield
    except InputError as wrong:
        raise InvalidSide(role, wrong) from None


def _read(
    role: str, argument: str, read_stdin: Callable[[], bytes]
) -> EngineJson | Pairs:
    """A description, or the pairs of a short form, those of a model's config.json included."""
    if argument == STDIN:
        return decode_engine_json(read_stdin())
    model = argument
    keys = ""
    # A file's name may contain a comma.
    if not os.path.exists(argument):
        model, _, keys = argument.partition(",")
    if "=" in model and not os.path.exists(model):
        return pairs_of(argument)
    pairs: Pairs = {}
    if keys:
        pairs = pairs_of(keys)
    file = _file_of(role, model)
    text = read_file(InvalidArgument, role, str(file), MAX_DESCRIPTION_JSON_BYTES)
    # Both are JSON, and a description may have 256 MiB: looking for its key costs less than parsing it twice.
    if b'"kvferry_description"' in text:
        if pairs:
            raise InvalidArgument(role, argument, "no keys behind a description JSON")
        return decode_engine_json(text)
    return with_model(pairs, read_model_config(text, pairs))


def _file_of(role: str, model: str) -> Path:
    """A file, the config.json of a folder, or that of a model in the local hub cache."""
    if os.path.isdir(model):
        return Path(model, CONFIG)
    if os.path.exists(model):
        return Path(model)
    hub = _hub_cache()
    folder = hub / f"models--{model.replace('/', '--')}"
    commit = b""
    # Only a name of the hub becomes a path: the argument must not lead out of the cache.
    if _NAME.fullmatch(model) and ".." not in model:
        with contextlib.suppress(OSError):
            commit = (folder / "refs" / "main").read_bytes()[:80].strip()
    if _COMMIT.fullmatch(commit):
        file = folder / "snapshots" / commit.decode() / CONFIG
        if file.is_file():
            return file
    expected = f"{_ACCEPTED} ({hub}); there is none, and nothing is downloaded"
    raise InvalidArgument(role, model, expected)


def _hub_cache() -> Path:
    """As huggingface_hub finds it, which is not imported: `kvferry plan` must start in a fraction of a second."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache_home, "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(hub).expanduser()
