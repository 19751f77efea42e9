"""PRODUCER and CONSUMER of a command line: path of a description JSON, `-` for standard input, or a short form."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from kvferry.cli.arguments import InvalidArgument, read_file
from kvferry.cli.plan.short_engine import UNKNOWN_MODEL, engine_of_form
from kvferry.cli.plan.short_form import read_short_form
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import MAX_DESCRIPTION_JSON_BYTES, EngineJson, decode_engine_json, engine_of
from kvferry.protocol.handshake import EngineDescription, ModelFacts

STDIN = "-"


def read_pair(
    producer: str, consumer: str, read_stdin: Callable[[], bytes]
) -> tuple[EngineDescription, EngineDescription]:
    """Read both sides.

    A short form has no facts about the weights: it takes those of the other side, except for the dtype of its cache.

    Raises:
        InputError: the type depends on the kind of side; the text names the error.
    """
    if producer == consumer == STDIN:
        raise InvalidArgument("CONSUMER", STDIN, "another source: PRODUCER reads standard input already")
    here, there = read_side("consumer", consumer, read_stdin), read_side("producer", producer, read_stdin)
    facts_here, facts_there = _reported(here.facts, there.facts), _reported(there.facts, here.facts)
    pair = []
    for engine_json, facts in ((there, facts_there), (here, facts_here)):
        engine = engine_of(msgspec.structs.replace(engine_json, facts=facts))
        check_description(engine)
        pair.append(engine)
    return pair[0], pair[1]


def read_side(role: str, argument: str, read_stdin: Callable[[], bytes]) -> EngineJson:
    """Read one side; a short form gets its role as engine id.

    Raises:
        InvalidArgument: there is no such file, or it cannot be read.
        InvalidDescription: the file is not a description JSON.
        InvalidShortForm: the short form is invalid.
    """
    if argument == STDIN:
        return decode_engine_json(read_stdin())
    if os.path.exists(argument):
        return decode_engine_json(read_file(InvalidArgument, role.upper(), argument, MAX_DESCRIPTION_JSON_BYTES))
    if "=" in argument:
        return engine_of_form(read_short_form(argument), role)
    raise InvalidArgument(role.upper(), argument, "a description JSON, - for standard input, or layers=…,heads=…,dim=…")


def _reported(facts: ModelFacts, other: ModelFacts) -> ModelFacts:
    """Facts of a side: its own, or those of the other side if it has none. The dtype of its tensors is not changed."""
    if facts.model != UNKNOWN_MODEL or other.model == UNKNOWN_MODEL:
        return facts
    return other
