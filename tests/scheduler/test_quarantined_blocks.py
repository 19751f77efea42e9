"""Blocks of failed loads are pinned by request, and the ids of requests may come again."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.link.commands import ReleaseLease, RemoteLease
from kvferry.link.counters import Counters
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from tests.harness.ledgers import check_loads
from tests.promises import promise
from tests.scheduler.test_consumer_properties import source_of


class Pool:
    """A block pool in which each request has one block of its own."""

    def __init__(self) -> None:
        self.pinned: list[int] = []

    def keep(self, blocks: Sequence[int]) -> None:
        self.pinned += blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pinned.remove(block)

    def reference_count(self, block: int) -> int:
        return self.pinned.count(block)

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        return (7,)


@promise(2)
def test_no_second_load_of_an_id_begins_while_the_blocks_of_the_first_are_pinned(
    counters: Counters,
) -> None:
    # Workers name loads by their requests. If both failed, the report would be that of one, and only its blocks would
    # be pinned, while both may still be written.
    ledger = ConsumerLedger(counters, pool=Pool())
    assert ledger.offer("d", source_of(0), 300, now_s=0.0) is None
    ledger.allocated("d", ledger.matched_tokens("d", 0), ((7,),))
    ledger.quarantine.update({0: frozenset({"d"})}, now_s=0.0)
    ledger.failed("d")
    ledger.finished("d")
    ledger.take_commands()

    again = source_of(1)
    assert ledger.offer("d", again, 300, now_s=1.0) == "blocks_pinned"
    assert not ledger.matched_tokens("d", 0)
    released = ReleaseLease(RemoteLease.from_params(again))
    assert ledger.take_commands() == (released,), (
        "its producer need not hold the blocks"
    )
    assert ledger.offer("e", source_of(2), 300, now_s=1.0) is None, "others are loaded"

    ledger.quarantine.update({0: frozenset()}, now_s=2.0)
    assert ledger.offer("d", source_of(3), 300, now_s=2.0) is None
    check_loads(ledger)
