"""Params that someone has changed on their way are read, or refused by a typed error; nothing else."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.params import read_params, read_turn, sign_params
from tests.draws import draws
from tests.protocol.samples import KEY, make_params


class Whole(int):
    """An integer of another type."""


class Named(str):
    """A text of another type."""


class Objects(dict[object, object]):
    """An object of another type."""


class One(enum.IntEnum):
    """An integer with a name."""

    ONE = 1


HASHABLE: list[object] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7.0,
        -0.0,
        0.05,
        0.049999,
        1.5,
        1e300,
        float("nan"),
        float("inf"),
        10**400,
    ),
    *(
        2.0**53,
        2**53 + 2,
        65535,
        65536,
        2**24 - 1,
        2**24,
        2**31 - 1,
        2**31,
        2**40,
        2**40 + 1,
        86400 * 7,
        86400 * 7 + 1,
    ),
    *(
        "",
        "x",
        "\ud800",
        "a\n",
        "pull",
        "push",
        "x" * 512,
        "x" * 513,
        "a1" * 16,
        b"x",
        Whole(5),
        Named("pull"),
        One.ONE,
    ),
]
NESTED: list[object] = [
    *(
        [],
        {},
        [[]],
        ((1,), (2,)),
        [(1, 2)],
        {1},
        frozenset([1]),
        [[1.0, 2], [3]],
        [[True]],
        [[Whole(3)]],
        [None],
    ),
    *(
        ["a1" * 16] * 2,
        ("a1" * 16,) * 2,
        [0.0, 1],
        [0] * 64,
        [0] * 65,
        [[]] * 64,
        [[]] * 65,
        {"version": 1},
    ),
    *(Objects(), MappingProxyType({}), object()),
]
SIGNED = sign_params(make_params(), KEY).to_json()
KEYS = st.sampled_from(
    [
        *SIGNED,
        *SIGNED["kvferry"],
        "later",
        "\ud800",
        1,
        None,
        "",
        Named("tp_size"),
        b"tp_size",
    ]
)
VALUES = (
    st.sampled_from([*HASHABLE, *NESTED])
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.sampled_from(HASHABLE), max_size=3)
)


def drop(held: dict[Any, Any], key: object, _: object) -> None:
    """The key is gone."""
    held.pop(key, None)


def replace(held: dict[Any, Any], key: object, value: object) -> None:
    """The key is there, with this value."""
    held[key] = value


def freeze(held: dict[Any, Any], key: object, _: object) -> None:
    """Another type of the same value."""
    if isinstance(held.get(key), list):
        held[key] = tuple(held[key])
    elif isinstance(held.get(key), int):
        with contextlib.suppress(OverflowError):
            held[key] = float(held[key])
    elif isinstance(held.get(key), dict):
        held[key] = MappingProxyType(held[key])


def turn_round(held: dict[Any, Any], _: object, __: object) -> None:
    """Another order of the keys."""
    pairs = list(held.items())
    held.clear()
    held.update(reversed(pairs))


CHANGES = st.tuples(
    st.booleans(), st.sampled_from([drop, replace, freeze, turn_round]), KEYS, VALUES
)


@settings(deadline=None, max_examples=draws(400))
@given(st.lists(CHANGES, max_size=4))
@example([(True, replace, "version", True)])
@example([(True, replace, "digests", ["a1" * 16] * 3)])
@example([(False, replace, "remote_block_ids", [[]] * 65)])
@example([(True, replace, "\ud800", 1)])
def test_changed_params_are_read_or_refused_by_a_typed_error(
    changes: list[tuple[bool, Callable[..., None], object, object]],
) -> None:
    raw: dict[Any, Any] = sign_params(make_params(), KEY).to_json()
    for is_inside, change, key, value in changes:
        ticket = raw.get("kvferry")
        change(ticket if is_inside and isinstance(ticket, dict) else raw, key, value)
    for arrived in (
        raw,
        MappingProxyType(raw),
        raw | {"do_remote_prefill": False, "do_remote_decode": True},
    ):
        for read in (read_params, read_turn):
            try:
                found = read(arrived)
            except InvalidParams:
                event("refused")
            else:
                check_types(found)
                event("read")


def check_types(found: object) -> None:
    """What was read fits its type: the planner and the workers take every field as it is."""
    if isinstance(found, msgspec.Struct):
        msgspec.convert(msgspec.to_builtins(found), type(found))
