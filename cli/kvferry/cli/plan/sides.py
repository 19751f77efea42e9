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


@dataclass(frozen=True, slots=True)
class PlanSide:
    """One side. `form`: the whole short form, if the command line has only a part of it."""

    engine: EngineDescription
    form: str = ""


def read_sides(
    producer: str, consumer: str, read_stdin: Callable[[], bytes]
) -> tuple[PlanSide, PlanSide]:
    """Read both sides.

    A short form has no facts about the weights: it takes those of the other side, except for the dtype of its cache.

    Raises:
        InvalidSide: naming the side and the field.
        InvalidArgument: both sides are standard input.
    """
    if producer == consumer == STDIN:
        raise InvalidArgument(
            "CONSUMER", STDIN, "another source: PRODUCER reads standard input already"
        )
    arguments = {"PRODUCER": producer, "CONSUMER": consumer}
    written: dict[str, EngineJson | Pairs] = {}
    for role, argument in arguments.items():
        with _blaming(role):
            written[role] = _read(role, argument, read_stdin)
    engines, forms = [], []
    for (role, argument), other in zip(arguments.items(), [*written.values()][::-1], strict=True):
        own, form = written[role], ""
        if not isinstance(own, EngineJson):
            pairs = (
                own if "layers" in own or isinstance(other, EngineJson) else with_model(own, other)
            )
            form = ",".join(f"{key}={value}" for key, value in pairs.items())
            with _blaming(role):
                own = engine_of_form(form_of(pairs), role.lower())
        engines.append(own)
        forms.append("" if form == argument.replace(" ", "") else form)
    sides = []
    for role, own, theirs, form in zip(arguments, engines, engines[::-1], forms, strict=True):
        described = from_engine_json(
            msgspec.structs.replace(own, facts=_reported(own.facts, theirs.facts))
        )
        with _blaming(role):
            check_description(described)
        sides.append(PlanSide(described, form))
    return sides[0], sides[1]


@contextlib.contextmanager
def _blaming(role: str) -> Iterator[None]:
    """An `InputError` becomes an `InvalidSide` of this role."""
    try:
        yield
    except InputError as wrong:
        raise InvalidSide(role, wrong) from None


def _read(role: str, argument: str, read_stdin: Callable[[], bytes]) -> EngineJson | Pairs:
    """A description, or the pairs of a short form, those of a model's config.json included.

    Raises:
        InvalidArgument: there is no such file or model, or it cannot be read.
        InvalidDescription, InvalidModel: the file is not one of these.
        InvalidArgument: a pair is invalid.
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
        raise InvalidArgument(
            role, model, f"{_ACCEPTED} ({hub}); there is none, and nothing is downloaded"
        )
    return path


def _hub_cache() -> Path:
    """As huggingface_hub finds it."""
    environ = os.environ
    home = environ.get("HF_HOME") or os.path.join(
        environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _reported(facts: ModelFacts, other: ModelFacts) -> ModelFacts:
    """Facts of a side: its own, or those of the other side if it has none. The dtype of its tensors is not changed."""
    if facts.model != UNKNOWN_MODEL or other.model == UNKNOWN_MODEL:
        return facts
    return other
