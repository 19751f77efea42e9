"""Integrity of the two ledgers: what they count is what their leases and loads have.

The product does not look: a check that ran in it found bugs in tests alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.consumer.ledger import ConsumerLedger, QuarantinedBlocks
from kvferry.scheduler.producer.block_references import BlockReferences
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import (
    CLAIMING,
    IN_FLIGHT,
    KEEPS_BLOCKS,
    LeaseState,
    LeaseUse,
    RemotePromptState,
)


def check_ledgers(leases: ProducerLedger, loads: ConsumerLedger) -> None:
    """Both of an engine. Raises as the checks of each."""
    check_leases(leases)
    check_loads(loads)


def check_leases(ledger: ProducerLedger) -> None:
    """Every slot and every row is free or of one lease, and references on blocks are those of the leases.

    Raises:
        LocalProtocolError: with the sums.
    """
    leases = ledger.leases(*LeaseState)
    _check_slots(ledger)
    used = [lease.stream.row for lease in leases if lease.stream is not None]
    free = ledger.streams.free_rows
    if sorted(used + free) != list(range(ledger.streams.rows)):
        raise LocalProtocolError(
            f"stream rows: {len(used)} used and {len(free)} free of {ledger.streams.rows}"
        )
    prefixes = [lease for lease in leases if lease.use is LeaseUse.PREFIX]
    num_prefix_blocks = sum(len(lease.block_ids) for lease in prefixes)
    counted = (ledger.num_prefixes, ledger.num_prefix_blocks)
    if counted != (len(prefixes), num_prefix_blocks):
        raise LocalProtocolError(
            f"prefixes: {counted} leases and blocks counted, there are {len(prefixes)}, {num_prefix_blocks}"
        )
    kept = ledger.block_references.num_requests
    keeping = sum(lease.state in KEEPS_BLOCKS for lease in leases)
    if kept != keeping:
        states = Counter(lease.state.value for lease in leases)
        raise LocalProtocolError(
            f"leases: {dict(states)}, {kept} keep blocks, {keeping} must"
        )
    check_references(ledger.block_references)


def check_references(references: BlockReferences) -> None:
    """The sums are right, and every block has at least as many references as leases that keep it.

    Raises:
        LocalProtocolError: with the sums.
    """
    counted = references.snapshot()
    held = _count(lease.block_ids for lease in references.held.values())
    held.update(_count(counted.reserved))
    ending = _count(lease.block_ids for lease in references.ending.values())
    ending.update(_count(counted.returning))
    # As dicts: `Counter.__eq__` ignores counts of zero, which must have been removed.
    if (dict(held), dict(ending)) != (counted.held, counted.ending):
        raise LocalProtocolError(
            f"block references: {sum(counted.held.values())} held + {sum(counted.ending.values())} ending, "
            f"{held.total()} + {ending.total()} by lease"
        )
    if references.pool is None:
        return
    held.update(ending)
    for block, count in held.items():
        referred = references.pool.reference_count(block)
        if referred < count:
            raise LocalProtocolError(
                f"block {block}: {count} leases keep it, the pool counts {referred} references"
            )


def check_loads(ledger: ConsumerLedger) -> None:
    """Claims, counts and requests agree, and no block that may still be written is free.

    Raises:
        LocalProtocolError: with the sums.
    """
    prompts = [ledger.get(request_id) for request_id in ledger.requests(*CLAIMING)]
    claiming = {prompt.lease.key for prompt in prompts if prompt is not None}
    claims = ledger.snapshot()
    in_flight = len(ledger.requests(*IN_FLIGHT))
    loading = len(ledger.requests(RemotePromptState.LOADING))
    is_sound = (
        claiming == claims
        and in_flight == ledger.in_flight
        and loading == ledger.loading
    )
    if not is_sound:
        raise LocalProtocolError(
            f"loads: {len(claims)} claims, {ledger.in_flight} in flight, {ledger.loading} of them loading; "
            f"{len(claiming)}, {in_flight} and {loading} by request"
        )
    _check_quarantine(ledger.quarantine)


def _check_slots(ledger: ProducerLedger) -> None:
    seen = ledger.slots.snapshot()
    slots = [lease.slot for lease in seen.leases] + list(seen.free)
    if sorted(slots) != list(range(ledger.slots.count)):
        raise LocalProtocolError(
            f"lease table: {len(seen.leases)} leased and {len(seen.free)} free of {ledger.slots.count} slots"
        )


def _check_quarantine(quarantine: QuarantinedBlocks) -> None:
    pool = quarantine.pool
    if pool is None:
        return
    pinned = [block for pin in quarantine.snapshot().values() for block in pin.blocks]
    num_free = sum(pool.reference_count(block) < 1 for block in pinned)
    if num_free:
        raise LocalProtocolError(
            f"quarantine: {num_free} of {len(pinned)} pinned blocks are in the pool"
        )


def _count(blocks_of_leases: Iterable[Iterable[int]]) -> Counter[int]:
    references: Counter[int] = Counter()
    for block_ids in blocks_of_leases:
        references.update(block_ids)
    return references
