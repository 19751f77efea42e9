"""Streams: prompts that consumers read while they are computed, and the rows where workers list their blocks.

A lease whose request is preempted has published blocks that vLLM gives to others. So it goes on under a new epoch, with
its slot and its row: the epoch under which those blocks were published never becomes READY. Consumers know the lease by
its first epoch, which stays its name until it is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.link.counters import Counters
from kvferry.protocol.orders import LeaseOpen, LeaseProgress
from kvferry.scheduler.producer.lease_slots import LeaseOrders, LeaseSlots
from kvferry.scheduler.requests import ProducerLease, PublishedStream


class PublishedStreams:
    """The streams of one engine.

    Args:
        orders: of the ledger, to be sent with the next step.
        counters: counts `streams`, `stream_restarts`, and `streams_refused` for lack of `rows`.
        rows: how many there are.

    Attributes:
        rows: as given.
        free_rows: the rows of no lease; the next to be used is last.
    """

    def __init__(
        self, slots: LeaseSlots, orders: LeaseOrders, counters: Counters, rows: int
    ) -> None:
        self._slots = slots
        self._orders = orders
        self._counters = counters
        self.rows = rows
        self.free_rows = list(range(rows - 1, -1, -1))

    def begin(self, lease: ProducerLease) -> PublishedStream | None:
        """A consumer reads this prompt from now on, while it is computed; None if all rows are used."""
        if not self.free_rows:
            self._counters.add("streams_refused", "rows")
            return None
        lease.stream = PublishedStream(self.free_rows.pop())
        self._counters.add("streams")
        return lease.stream

    def publish(
        self,
        lease: ProducerLease,
        stream: PublishedStream,
        tokens: int,
        blocks: tuple[Sequence[int], ...],
    ) -> None:
        """The next step completes the first `tokens` tokens of a prompt.

        Args:
            blocks: all blocks of these tokens that are listed, per cache group; they go on with those before.
        """
        # A row lists blocks in order, and workers only add to it: each order names those that the ones before did not.
        num_listed = [0] * len(blocks)
        if stream.blocks:
            num_listed = [len(ids) for ids in stream.blocks]
        new_blocks = [
            tuple(ids[first:]) for first, ids in zip(num_listed, blocks, strict=True)
        ]
        stream.tokens = tokens
        stream.blocks = blocks
        self._orders.progress.append(
            LeaseProgress(
                slot=lease.slot,
                epoch=lease.name.epoch,
                row=stream.row,
                origin=lease.origin.epoch,
                tokens=tokens,
                first_blocks=tuple(num_listed),
                blocks=tuple(new_blocks),
            )
        )

    def restart(self, lease: ProducerLease, stream: PublishedStream) -> None:
        """The published part is not valid any more: go on under another epoch.

        Must be called before the next step's orders are taken: in that step other requests may write the blocks.
        """
        if not stream.blocks:
            return
        stream.tokens = 0
        stream.blocks = ()
        # The slot and the row stay: consumers have them from the ticket. A consumer that has read under the old epoch
        # finds no READY with it, ever.
        self._slots.renew_epoch(lease)
        order = LeaseOpen(
            slot=lease.slot,
            epoch=lease.name.epoch,
            row=stream.row,
            origin=lease.origin.epoch,
        )
        self._orders.opens.append(order)
        self._counters.add("stream_restarts")

    def end(self, lease: ProducerLease, stream: PublishedStream) -> None:
        """The lease is over: its row is free."""
        self.free_rows.append(stream.row)
        lease.stream = None
