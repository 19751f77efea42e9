"""What the ledger has the side channel do about a prompt that another engine prefills."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.prompt_queries import PromptProgress, PromptQuery

Producer = tuple[str, int]
"""Host and port of a side channel."""


@dataclass(frozen=True, slots=True)
class StartQuery:
    """Query this producer, again and again until `StopQuery`."""

    producer: Producer
    query: PromptQuery


@dataclass(frozen=True, slots=True)
class StopQuery:
    """The query is settled."""

    number: int


QueryCommand = StartQuery | StopQuery


SETTLING = (PromptProgress.TICKET, PromptProgress.OVER)
"""Answers that settle a query."""
