"""The drawings of the exchanges against the types of their messages (`scripts/exchanges.py` reads them)."""

from __future__ import annotations

import typing
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import inspect as types

from kvferry.protocol import (
    handshake,
    orders,
    params,
    queries,
)
from scripts.exchanges import (
    MODULES,
    DrawnMessage,
    Exchange,
    drawn_messages,
    exchanges,
    message_within,
)
from scripts.generate_docs import DOCS, parts_of
from scripts.protocol_reference import PARTS, drawings

SIDE_CHANNEL: tuple[ModuleType, ...] = (
    handshake,
    queries,
)
MESSAGES: tuple[type[msgspec.Struct], ...] = (
    *PARTS["params"],
    *PARTS["side channel"],
    *PARTS["notifications"],
    params.NamedPrefill,
    params.RemoteDecode,
    orders.OrdersHead,
    orders.StepOrders,
    orders.Prewarm,
)
"""The types of which every field must be in a drawing of their own module."""

DRAWN = [
    pytest.param(module, exchange, id=exchange.title)
    for module in MODULES
    for exchange in exchanges(module)
]


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every message type by its name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                found[name] = value
    return found


def faults(message: DrawnMessage) -> Iterator[str]:
    """What a drawn message has that its type has not, and the other way round where it is drawn as a whole."""
    known = structs().get(message.name)
    if known is None:
        yield f"no type {message.name}"
        return
    fields = {field.name: field for field in msgspec.structs.fields(known)}
    for name, value in message.fields.items():
        if name not in fields:
            yield f"{message.name} has no field {name}"
        elif value:
            yield from value_faults(f"{message.name}.{name}", value, fields[name].type)
    if message.is_whole:
        missing = fields.keys() - message.fields.keys()
        yield from (f"{message.name}.{name} is missing" for name in sorted(missing))


def value_faults(where: str, value: str, kind: Any) -> Iterator[str]:
    """What is wrong with the text behind a field's colon."""
    within = message_within(value)
    if within is not None:
        names = {inner.__name__ for inner in structs_within(types.type_info(kind))}
        if within not in names:
            yield f"{where} holds no {within}"
        return
    plain = int(value) if value.isdecimal() else value
    try:
        msgspec.convert(plain, kind)
    except msgspec.ValidationError as wrong:
        yield f"{where}: {wrong}"


def structs_within(kind: types.Type) -> Iterator[type]:
    """The message types in a field's type."""
    if isinstance(kind, types.StructType):
        yield kind.cls
    elif isinstance(kind, types.UnionType):
        for one in kind.types:
            yield from structs_within(one)
    elif isinstance(kind, types.VarTupleType):
        yield from structs_within(kind.item_type)


@pytest.mark.parametrize(("module", "exchange"), DRAWN)
def test_a_drawing_names_only_messages_and_fields_that_there_are(
    module: ModuleType, exchange: Exchange
) -> None:
    found = list(drawn_messages(exchange.drawing))
    assert found, module.__name__
    assert [fault for message in found for fault in faults(message)] == []


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_field_of_a_message_is_in_a_drawing_of_its_module(
    message: type[msgspec.Struct],
) -> None:
    (module,) = (module for module in MODULES if module.__name__ == message.__module__)
    found = [
        drawn
        for exchange in exchanges(module)
        for drawn in drawn_messages(exchange.drawing)
        if drawn.name == message.__name__
    ]
    assert found, f"{message.__name__} is in no drawing of {module.__name__}"
    shown = {name for drawn in found for name in drawn.fields}
    assert sorted(shown) == sorted(message.__struct_fields__)


def test_requests_point_to_the_listener_and_its_answers_away_from_it() -> None:
    directions: dict[bool, set[str]] = defaultdict(set)
    for module in SIDE_CHANNEL:
        for exchange in exchanges(module):
            for message in drawn_messages(exchange.drawing):
                if structs()[message.name].__struct_config__.tag is not None:
                    directions[message.is_answer].add(message.name)
    assert directions[False] == names_in(handshake.Request)
    assert directions[True] == names_in(handshake.Reply) | {
        "DescriptionPart",
        "Answers",
    }


def names_in(union: Any) -> set[str]:
    return {one.__name__ for one in typing.get_args(union)}


def test_the_drawn_answers_to_a_query_are_all_that_there_are() -> None:
    query, _ = exchanges(queries)
    answers = [one for one in drawn_messages(query.drawing) if one.name == "Answer"]
    drawn = [answer.fields["progress"] for answer in answers]
    assert drawn == [progress.value for progress in queries.PromptProgress]


def test_each_exchange_is_drawn_once_and_is_on_one_page() -> None:
    titles = [exchange.title for module in MODULES for exchange in exchanges(module)]
    assert len(set(titles)) == len(titles) >= 10
    on_pages = [
        name for page in DOCS.glob("*.md") for name in parts_of(page.name, "exchange")
    ]
    assert sorted(on_pages) == sorted(drawings())


@pytest.mark.parametrize(
    ("drawn", "fault"),
    [
        ("Done{slot, epoch, consumer, worker}", "Done.expected is missing"),
        ("Done{slot, …}", None),
        ("Done{slot, boot, …}", "Done has no field boot"),
        ("Goodbye{…}", "no type Goodbye"),
        ("Answer{progress: asleep, …}", "Answer.progress: Invalid enum value 'asleep'"),
        ("Renew{boot, leases: [Answer{…}]}", "Renew.leases holds no Answer"),
        ("Renew{boot,\n  │    leases: [LeaseName{slot, …}]} ──►", None),
        ("Hello{at: -1, …}", "Hello.at: Expected `int | null`, got `str`"),
    ],
)
def test_a_drawing_that_does_not_fit_its_types_is_told_so(
    drawn: str, fault: str | None
) -> None:
    found = [fault for message in drawn_messages(drawn) for fault in faults(message)]
    assert found == ([] if fault is None else [fault])
