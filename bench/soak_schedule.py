"""The script of every request of a soak: it follows from the seed and the request's number alone."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Fault(enum.Enum):
    """Fault of a request, or of the fleet while the request is under way."""

    ABORTED_PREFILL = "aborted while it is prefilled"
    PREEMPTED = "preempted while it is prefilled and read"
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
    FROZEN_PRODUCER = "the producer stands still for a while"
    FROZEN_CONSUMER = "the consumer stands still for a while"
    KILLED_PRODUCER = "the producer ends without a word and restarts"
    KILLED_CONSUMER = "the consumer ends without a word and restarts"


WEIGHTS = dict.fromkeys(Fault, 12) | {
    Fault.ABORTED_PREFILL: 24,
    Fault.PREEMPTED: 36,
    Fault.PEER_LOST: 3,
    Fault.LOST_RENEWALS: 3,
    Fault.FROZEN_PRODUCER: 3,
    Fault.FROZEN_CONSUMER: 3,
    Fault.KILLED_PRODUCER: 2,
    Fault.KILLED_CONSUMER: 2,
}
"""How often each is drawn. Faults that hit all requests are rarer."""
MOST_TOKENS, MOST_PARTS = 48, 5
"""Tokens of a prompt that one step computes; steps of a streamed one, of 1 to 24 tokens each."""


@dataclass(frozen=True, slots=True)
class Script:
    """One request.

    Attributes:
        producer, consumer: which of each.
        hit_blocks: leading blocks that are in the consumer's cache already, at most.
        fault: what is done; None in most cases.
        choice: what the fault's particulars follow from.
        parts: the tokens that each step of the prefill computes.
        asked: the step before which the consumer asks for the prompt; the last one's, or any of them if it is streamed.
    """

    index: int
    seed: int
    producer: int
    consumer: int
    hit_blocks: int
    fault: Fault | None
    choice: int
    parts: tuple[int, ...]
    asked: int

    @property
    def tokens(self) -> int:
        return sum(self.parts)

    @property
    def is_streamed(self) -> bool:
        """Whether the consumer may read before the last step has ended."""
        return self.asked < len(self.parts) - 1


def script(
    seed: int,
    index: int,
    fault_rate: float,
    streamed: float,
    producers: int,
    consumers: int,
) -> Script:
    """Request number `index` of the soak with this seed. A preempted one is always streamed."""
    draw = random.Random(f"{seed}/{index}")
    fault = None
    if draw.random() < fault_rate:
        fault = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    is_streamed = fault is Fault.PREEMPTED or draw.random() < streamed
    if is_streamed:
        parts = tuple(
            draw.choice((16, 16, draw.randrange(1, 25)))
            for _ in range(draw.randrange(2, MOST_PARTS + 1))
        )
    else:
        parts = (
            draw.choice(
                (
                    1,
                    7,
                    16,
                    17,
                    31,
                    32,
                    40,
                    MOST_TOKENS,
                    draw.randrange(1, MOST_TOKENS + 1),
                )
            ),
        )
    return Script(
        index=index,
        seed=draw.getrandbits(40),
        producer=draw.randrange(producers),
        consumer=draw.randrange(consumers),
        hit_blocks=draw.choice((0, 0, 0, 1, 2)),
        fault=fault,
        choice=draw.getrandbits(30),
        parts=parts,
        asked=draw.randrange(len(parts) - 1) if is_streamed else len(parts) - 1,
    )
