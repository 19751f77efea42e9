"""Decisions out of bytes, and plain objects (dicts, lists, numbers, text) with hostile values in them.

A fuzzer changes bytes; a target needs numbers and choices.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Source:
    """Takes decisions from bytes; when they are used up, every decision is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there are bytes left."""
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """Up to `count` bytes."""
        taken = self._data[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def number(self, stop: int) -> int:
        """A number in `[0, stop)`, of as many bytes as that needs."""
        size = max(1, ((stop - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(size), "little") % stop

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.number(len(options))]


INTEGERS: tuple[int, ...] = (
    *(
        0,
        1,
        2,
        3,
        5,
        7,
        8,
        16,
        64,
        100,
        255,
        256,
        4095,
        4096,
        4097,
        65535,
        65536,
        65537,
    ),
    *(
        -1,
        -2,
        -(2**31),
        -(2**63),
        2**16,
        2**20,
        2**24 - 1,
        2**24,
        2**31 - 1,
        2**31,
        2**32,
        2**40,
        2**40 + 1,
    ),
    *(2**47, 2**48 - 1, 2**48, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
"""All of them fit into msgpack."""

HOSTILE: tuple[Any, ...] = (
    *INTEGERS,
    *(
        0.0,
        -0.0,
        1.0,
        7.0,
        0.5,
        1e-300,
        1e300,
        float(2**53),
        float("nan"),
        float("inf"),
        float("-inf"),
    ),
    *(
        None,
        True,
        False,
        "",
        "a",
        "x" * 513,
        "a\nb",
        "\x00",
        "\x7f",
        "\u2028",
        "é" * 300,
        "0" * 32,
        "f" * 15,
        "0" * 15,
    ),
    *(
        [],
        [[]],
        {},
        {"": None},
        [None],
        [0, 1, 2],
        [[0]],
        ["a"],
        {"type": "hello"},
        {"a": {"a": {"a": []}}},
    ),
)


def mutate(source: Source, plain: Any, most_edits: int = 4) -> Any:
    """A copy of plain objects with up to so many places changed, removed, repeated or exchanged."""
    holder = [copy.deepcopy(plain)]
    for _ in range(1 + source.number(most_edits)):
        _edit(source, holder)
    return holder[0]


def _edit(source: Source, root: list[Any]) -> None:
    container, key = _place(source, root)
    kind = source.number(8)
    value = container[key]
    if kind <= 2:
        container[key] = copy.deepcopy(source.pick(HOSTILE))
    elif kind == 3 and isinstance(value, int):
        container[key] = value + source.pick((1, -1, 2, 16, -16, 4096, 2**32))
    elif kind == 3 and isinstance(value, str):
        container[key] = value + source.pick(("x", "", "0", "\n"))
    elif kind == 4 and isinstance(value, list):
        container[key] = value * source.pick((0, 2, 3, 17))
    elif kind == 5 and container is not root:
        del container[key]
    elif kind == 6 and isinstance(value, (list, dict)) and value:
        other, other_key = _place(source, root)
        container[key], other[other_key] = (
            copy.deepcopy(other[other_key]),
            copy.deepcopy(value),
        )
    elif kind == 7 and isinstance(value, dict):
        value[source.pick(("later", "type", "base", ""))] = copy.deepcopy(
            source.pick(HOSTILE)
        )
    else:
        container[key] = source.number(2**64)


def _place(source: Source, root: list[Any]) -> tuple[Any, Any]:
    """A container and a key in it: some leaf, or a branch on the way to it."""
    container: Any = root
    key: Any = 0
    while isinstance(container[key], (dict, list)) and container[key]:
        inner = container[key]
        if source.number(8) == 7:
            break
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        container, key = inner, source.pick(keys)
    return container, key
