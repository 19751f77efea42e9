"""Decisions out of bytes: what a fuzzer changes is bytes, what a target needs is numbers and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

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
