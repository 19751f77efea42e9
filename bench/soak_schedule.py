"""The script of every request of a soak: it follows from the seed and the request's number alone."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Fault(enum.Enum):
    """Fault of a request, or of the fleet while the request is under way."""

    ABORTED_PREFILL = "aborted while it is prefilled"
    ABORTED_OFFER = "aborted before its load is ordered"
    ABORTED_LOAD = "aborted while it is loaded"
    DROPPED_PARAMS = "the router drops the params"
    LATE = "the params come after the lease"
    REVOKED = "the lease ends and the blocks get another owner during the read"
    LOST_RENEWALS = "renewals are lost for longer than the lease"
    STALL = "a read takes long"
    DEADLINE = "a read takes longer than the deadline"
    LOST_DONE = "a notification is lost"
    DOUBLED_DONE = "a notification arrives twice"
    FORGED_DONE = "forged and damaged notifications"
    RAISES = "NIXL raises"
    PEER_LOST = "NIXL says that the peer is lost"
    REPLAYED = "params of a lease that is over"
    TAMPERED = "params with a field changed"
    MIXED = "params with another producer's fields"
    KILLED_PRODUCER = "the producer ends without a word and restarts"
    KILLED_CONSUMER = "the consumer ends without a word and restarts"


WEIGHTS = dict.fromkeys(Fault, 12) | {
    Fault.PEER_LOST: 3,
    Fault.LOST_RENEWALS: 3,
    Fault.KILLED_PRODUCER: 2,
    Fault.KILLED_CONSUMER: 2,
}
"""How often each is drawn. Faults that hit all requests are rarer."""


@dataclass(frozen=True, slots=True)
class Script:
    """One request.

    Attributes:
        producer, consumer: which of each.
        hit_blocks: leading blocks that are in the consumer's cache already, at most.
        fault: what is done; None in most cases.
        choice: what the fault's particulars follow from.
    """

    index: int
    seed: int
    producer: int
    consumer: int
    tokens: int
    hit_blocks: int
    fault: Fault | None
    choice: int


def script(seed: int, index: int, fault_rate: float, producers: int, consumers: int, most_tokens: int) -> Script:
    """Request number `index` of the soak with this seed."""
    draw = random.Random(f"{seed}/{index}")
    fault = None
    if draw.random() < fault_rate:
        fault = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    return Script(
        index=index,
        seed=draw.getrandbits(40),
        producer=draw.randrange(producers),
        consumer=draw.randrange(consumers),
        tokens=draw.choice((1, 7, 16, 17, 31, 32, 40, most_tokens, draw.randrange(1, most_tokens + 1))),
        hit_blocks=draw.choice((0, 0, 0, 1, 2)),
        fault=fault,
        choice=draw.getrandbits(30),
    )
