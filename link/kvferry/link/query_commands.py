"""What the ledgers have the side channel do about a prompt that another engine prefills, or has the first part of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.queries import PromptProgress, PromptQuery

Producer = tuple[str, int]
"""Host and port of a side channel."""


@dataclass(frozen=True, slots=True)
class StartQuery:
    """Query this producer, again and again until `StopQuery`."""

    producer: Producer
    query: PromptQuery


@dataclass(frozen=True, slots=True)
class StartSearch:
    """Ask all of these engines what they have of a prompt, until `StopQuery`.

    Attributes:
        chain: grown on the thread that asks, up to `most_tokens`: a long prompt's digests take longer than a step may.
        min_tokens: a shorter prefix is of no use.
    """

    number: int
    producers: tuple[Producer, ...]
    chain: GrowingChain
    most_tokens: int
    min_tokens: int


@dataclass(frozen=True, slots=True)
class StopQuery:
    """The query, or the search, is settled."""

    number: int


QueryCommand = StartQuery | StartSearch | StopQuery


class QueryCommands:
    """Commands that the side channel has not taken yet, and the numbers of the queries in them.

    Queries about prompts and searches for prefixes have one together: an answer has a number, and nothing else that
    tells which it is of.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: list[QueryCommand] = []

    def next_number(self) -> int:
        """The number of a new query."""
        return next(self._numbers)

    def add(self, command: QueryCommand) -> None:
        """The side channel is to do this, after all that was added before."""
        self._waiting.append(command)

    def take(self) -> tuple[QueryCommand, ...]:
        """Commands since the last call, in order."""
        commands = tuple(self._waiting)
        self._waiting.clear()
        return commands


SETTLING = (PromptProgress.TICKET, PromptProgress.OVER)
"""Answers that settle a query."""
