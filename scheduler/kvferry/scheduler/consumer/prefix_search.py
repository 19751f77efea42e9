"""One search for a prefix: which engines are asked for the first part of a prompt, and the best that they have."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.link.commands import Producer
from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.params import RemotePrefill


@dataclass(slots=True, eq=False)
class PrefixSearch:
    """A request waits until engines have said what they have of its prompt, or its time is over.

    Attributes:
        number: of the query, the same for all engines that are asked.
        chain: the digests of the prompt. The side channel's thread makes them; the step thread reads them once there is
            a ticket.
        most_tokens: what the query covers: the whole chunks of the prompt.
        min_tokens: a shorter prefix is not worth a load.
        begun_s: when it began, on a monotonic clock.
        until_s: when the request stops waiting.
        unanswered: the engines that have not said what they have.
        queued: those of them that have something, and will have a ticket.
        best: the ticket with the most tokens so far.
        best_from: the engine that sent it.
        reason: why there is no ticket, as a label of metrics.
    """

    request_id: str
    number: int
    chain: GrowingChain
    most_tokens: int
    min_tokens: int
    begun_s: float
    until_s: float
    unanswered: set[Producer]
    queued: set[Producer]
    best: RemotePrefill | None = None
    best_from: Producer | None = None
    reason: str = "no_answer"
