"""Integrity of a worker: everything that was taken belongs to a live owner.

| of | taken | by |
| --- | --- | --- |
| the entries for slot reads | all that are not free | loads that run or are quarantined, polls, first reads |
| the pages for block ids | all that are not free | loads that run or are quarantined |
| the staging pool | waves that are out | staged reads of these loads, quarantined ones by quarantined loads |
| the fabric's transfers | not released | these loads, polls (`slot_watch`), first reads |
| its prepared lists | not released | the slot reads, the pages, peers |
| its peers | not removed | peers |
| the lease table | words that are not empty | leases |
| the rows | headers that are not empty | leases |
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.fabric.port import LocalDescriptors, RemoteDescriptors, Transfer
from kvferry.worker.leases import LeaseTable
from kvferry.worker.loads.context import LoadContext
from kvferry.worker.loads.results import ResultBox
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.loads.state import LoadState

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Between the checks of an idle worker."""

_LISTS_OF_THE_WORKER = 2
"""Prepared lists that are no peer's: the entries for slot reads, and the pages for block ids."""


class WorkerIntegrity:
    """The integrity check of one worker. Belongs to the transfer thread.

    Args:
        results: where failed checks are counted.
        every_step: check after every step, not only when the worker is idle.
    """

    def __init__(
        self,
        context: LoadContext,
        table: LeaseTable,
        runner: LoadRunner,
        results: ResultBox,
        every_step: bool,
    ) -> None:
        self._context = context
        self._table = table
        self._runner = runner
        self._results = results
        self._every_step = every_step
        self._checked_s: float = -math.inf
        self._is_checked = True
        self._shown_error = ""

    def stepped(self, *, is_idle: bool) -> None:
        """Check after a step of the thread, if it is time. An error is counted each time, and logged if it is new."""
        self._is_checked = False
        # While loads run a check would cost them time: its sums grow with all that there is.
        is_due = is_idle and time.monotonic() >= self._checked_s + _INTERVAL_S
        if not is_due and not self._every_step:
            return
        self._checked_s = time.monotonic()
        self._is_checked = True
        try:
            self.check()
        except Exception as error:
            with self._results as results:
                results.counts["integrity_errors"] += 1
            # Once: a sum that is wrong stays wrong, and the check repeats every second.
            if str(error) != self._shown_error:
                self._shown_error = str(error)
                logger.exception("the integrity check of the transfer thread failed")

    def next_s(self) -> float | None:
        """When an idle worker checks next; None while nothing has changed since the last check."""
        if self._is_checked:
            return None
        return self._checked_s + _INTERVAL_S

    def check(self) -> None:
        """Check all sums, in time that grows with the loads, peers and leases that there are.

        Raises:
            LocalProtocolError: with all the sums.
        """
        wrong = self.errors()
        if wrong:
            raise LocalProtocolError(f"{'; '.join(wrong)}. {self.describe()}")

    def errors(self) -> list[str]:
        """The sums that are wrong."""
        return [
            *self._wrong_entries(),
            *self._wrong_pages(),
            *self._wrong_handles(),
            *self._wrong_waves(),
            *self._table.errors(),
        ]

    def describe(self) -> str:
        """All the sums in a line."""
        context = self._context
        registry = context.registry
        slot_reads = context.slot_reads
        fabric = context.reader.fabric
        loads = list(self._runner.begun())
        polls = list(self._runner.polls())
        first_reads = registry.first_reads.all()
        by_state = ", ".join(
            f"{count} {state.value}" for state, count in self._runner.loads.counts().items()
        )
        pool = "none"
        if context.staging is not None:
            free_bytes = context.staging.pool.free_bytes
            waves = context.staging.pool.waves()
            pool = f"{context.staging.pool.capacity} = {free_bytes} free + {waves}"
        return (
            f"loads: {by_state}; peers: {registry.describe()}; "
            f"entries: {len(slot_reads.words)} = {slot_reads.free()} free + "
            f"{sum(len(load.entries) for load in loads)} of loads + "
            f"{sum(len(poll.entries) for poll in polls)} of polls + "
            f"{sum(len(read.entries) for read in first_reads)} of first reads; "
            f"transfers: {sum(load.transfers() for load in loads)} of loads, "
            f"{sum(len(poll.reads) for poll in polls)} of polls, "
            f"{sum(len(read.reads) for read in first_reads)} of first reads; "
            f"not taken back: {len(context.reader.refused())}; "
            f"the fabric has {fabric.open_handles()}; "
            f"pool: {pool}; leases: {self._table.describe()}"
        )

    def _wrong_entries(self) -> list[str]:
        slot_reads = self._context.slot_reads
        owners = [load.entries for load in self._runner.begun()]
        owners += [poll.entries for poll in self._runner.polls()]
        owners += [read.entries for read in self._context.registry.first_reads.all()]
        taken = Counter(entry for entries in owners for entry in entries)
        wrong = [f"entry {entry} has {count} owners" for entry, count in taken.items() if count > 1]
        # A set of all free entries takes a while, and an idle worker has taken none.
        if taken:
            free_and_taken = slot_reads.free_entries() & taken.keys()
            wrong += [f"entry {entry} is free and taken" for entry in free_and_taken]
        free = slot_reads.free()
        if free + taken.total() != len(slot_reads.words):
            wrong.append(
                f"{len(slot_reads.words)} entries are not {free} free + {taken.total()} taken"
            )
        return wrong

    def _wrong_pages(self) -> list[str]:
        pages = self._context.id_pages
        taken = sum(len(load.lease_reads.pages) for load in self._runner.begun())
        if pages.free() + taken == len(pages.memory):
            return []
        return [f"{len(pages.memory)} pages are not {pages.free()} free + {taken} taken"]

    def _wrong_handles(self) -> list[str]:
        reader = self._context.reader
        registry = self._context.registry
        open_handles = reader.fabric.open_handles()
        # Handles that the fabric has not taken back yet are still open, but have no other owner.
        refused = reader.refused()
        refused_transfers = sum(isinstance(handle, Transfer) for handle in refused)
        refused_lists = sum(
            isinstance(handle, (LocalDescriptors, RemoteDescriptors)) for handle in refused
        )
        refused_agents = sum(isinstance(handle, str) for handle in refused)
        peers = list(registry.peers())
        agents = sum(len(peer.routes) for peer in peers)
        lists = sum(len(peer.made) for peer in peers) - agents
        transfers = sum(load.transfers() for load in self._runner.begun())
        transfers += sum(len(poll.reads) for poll in self._runner.polls())
        transfers += sum(len(read.reads) for read in registry.first_reads.all())
        sums = (
            ("transfers", open_handles.transfers, transfers + refused_transfers),
            ("prepared", open_handles.prepared, _LISTS_OF_THE_WORKER + lists + refused_lists),
            ("peers", open_handles.peers, agents + refused_agents),
        )
        return [
            f"the fabric has {count} {name}, {known} are known"
            for name, count, known in sums
            if count != known
        ]

    def _wrong_waves(self) -> list[str]:
        if self._context.staging is None:
            return []
        pool = self._context.staging.pool
        wrong: list[str] = []
        try:
            pool.check_integrity()
        except LocalProtocolError as error:
            wrong.append(str(error))
        begun = list(self._runner.begun())
        owned = Counter(wave for load in begun for wave in load.waves())
        if owned != Counter(pool.waves()):
            wrong.append(f"the pool gave out {pool.waves()}, loads have {list(owned)}")
        quarantined_bytes = sum(
            wave.num_bytes
            for load in self._runner.loads.of(LoadState.QUARANTINED)
            for wave in load.waves()
        )
        if quarantined_bytes != pool.quarantined_bytes:
            wrong.append(
                f"{pool.quarantined_bytes} B of the pool are quarantined, "
                f"{quarantined_bytes} B of quarantined loads"
            )
        unknown = set(pool.waiting) - {load.order.request_id for load in begun}
        if unknown:
            wrong.append(f"loads that wait for the pool do not run: {sorted(unknown)}")
        return wrong
