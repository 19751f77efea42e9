"""What the ledgers have the side channel do about a prompt that another engine prefills, or has the first part of."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.prompt_queries import PromptProgress, PromptQuery

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


SETTLING = (PromptProgress.TICKET, PromptProgress.OVER)
"""Answers that settle a query."""
