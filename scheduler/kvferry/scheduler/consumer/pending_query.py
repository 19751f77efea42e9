"""One query about a prompt that another engine prefills."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.link.commands import Producer
from kvferry.protocol.queries import PromptQuery


@dataclass(slots=True, eq=False)
class PendingQuery:
    """One query that has no ticket yet.

    Attributes:
        host: of the producer that the request names, in one spelling.
        waits: whether its request waits for the answer; False when it has ended.
        unknown_why: what a producer has said that does not know of it, as a label of metrics.
        known_by: the producer that was the last to say that it has the prompt in its queue; None once it does not.
        is_crowded_out: it was given up for the query of another host.
    """

    request_id: str
    host: str
    query: PromptQuery
    waits: bool = True
    unknown_why: str = ""
    known_by: Producer | None = None
    is_crowded_out: bool = False
