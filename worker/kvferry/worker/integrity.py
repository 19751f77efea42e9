"""Integrity of a worker: everything that was taken belongs to a live owner.

| of | taken | by |
| --- | --- | --- |
| the entries for slot reads | all that are not free | loads that run or are quarantined, looks, first reads |
| the pages for block ids | all that are not free | loads that run or are quarantined |
| the staging pool | waves that are out | staged reads of these loads, quarantined ones by quarantined loads |
| the fabric's transfers | not released | these loads, looks (`slot_watch`), first reads |
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

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Between the checks of an idle worker."""


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
        if not self._every_step and not (
            is_idle and time.monotonic() >= self._checked_s + _INTERVAL_S
        ):
            return
        self._checked_s, self._is_checked = time.monotonic(), True
        try:
            self.check()
        except Exception as error:
            with self._results as results:
                results.counts["integrity_errors"] += 1
            if str(error) != self._shown_error:
                self._shown_error = str(error)
                logger.exception("the integrity check of the transfer thread failed")

    def next_s(self) -> float | None:
        """When an idle worker checks next; None while nothing has changed since the last check."""
        return None if self._is_checked else self._checked_s + _INTERVAL_S

    def check(self) -> None:
        """Check all sums, in time that grows with the loads, peers and leases that there are.

        Raises:
            LocalProtocolError: with all the sums.
        """
        wrong = [*self._entries(), *self._handles(), *self._pool(), *self._table.errors()]
        if wrong:
            raise LocalProtocolError(f"{'; '.join(wrong)}. {self.describe()}")

    def describe(self) -> str:
        """All the sums in a line."""
        context, runner = self._context, self._runner
        slot_reads, registry, reader = context.slot_reads, context.registry, context.reader
        first_reads, loads, looks = (
            registry.first_reads.all(),
            list(runner.alive()),
            list(runner.looks()),
        )
        running = len(loads) - runner.parked() - len(runner.quarantined) - runner.flushing()
        pool = context.staging.pool if context.staging is not None else None
        return (
            f"loads: {runner.waiting()} waiting, {running} running, {runner.parked()} parked, "
            f"{runner.flushing()} flushing, {len(runner.quarantined)} quarantined; peers: {registry.describe()}; "
            f"entries: {len(slot_reads.words)} = {slot_reads.free()} free + "
            f"{sum(len(one.entries) for one in loads)} of loads + "
            f"{sum(len(one.entries) for one in looks)} of looks + "
            f"{sum(len(one.entries) for one in first_reads)} of first reads; "
            f"transfers: {sum(one.transfers() for one in loads)} of loads, "
            f"{sum(len(one.reads) for one in looks)} of looks, "
            f"{sum(len(one.reads) for one in first_reads)} of first reads; "
            f"not taken back: {len(reader.refused())}; the fabric has {reader.fabric.open_handles()}; "
            f"pool: {f'{pool.capacity} = {pool.free_bytes} free + {pool.waves()}' if pool is not None else 'none'}; "
            f"leases: {self._table.describe()}"
        )

    def _entries(self) -> list[str]:
        slot_reads = self._context.slot_reads
        owners = [one.entries for one in self._runner.alive()]
        owners += [one.entries for one in self._runner.looks()]
        owners += [one.entries for one in self._context.registry.first_reads.all()]
        taken = Counter(entry for entries in owners for entry in entries)
        wrong = [f"entry {entry} has {count} owners" for entry, count in taken.items() if count > 1]
        if taken:  # a set of all free entries takes a while, and an idle worker has taken none
            wrong += [
                f"entry {entry} is free and taken"
                for entry in slot_reads.free_entries() & taken.keys()
            ]
        if slot_reads.free() + sum(taken.values()) != len(slot_reads.words):
            wrong.append(
                f"{len(slot_reads.words)} entries are not {slot_reads.free()} free + {sum(taken.values())} taken"
            )
        pages, held = (
            self._context.id_pages,
            sum(len(one.lease_reads.pages) for one in self._runner.alive()),
        )
        if pages.free() + held != len(pages.memory):
            wrong.append(f"{len(pages.memory)} pages are not {pages.free()} free + {held} taken")
        return wrong

    def _handles(self) -> list[str]:
        has, refused = self._context.reader.fabric.open_handles(), self._context.reader.refused()
        peers = list(self._context.registry.peers())
        agents = sum(len(peer.routes) for peer in peers)
        lists = sum(isinstance(one, (LocalDescriptors, RemoteDescriptors)) for one in refused)
        expected = {
            "transfers": sum(one.transfers() for one in self._runner.alive())
            + sum(len(one.reads) for one in self._runner.looks())
            + sum(len(one.reads) for one in self._context.registry.first_reads.all())
            + sum(isinstance(one, Transfer) for one in refused),
            "prepared": 2 + sum(len(peer.made) for peer in peers) - agents + lists,
            "peers": agents + sum(isinstance(one, str) for one in refused),
        }
        found = {"transfers": has.transfers, "prepared": has.prepared, "peers": has.peers}
        return [
            f"the fabric has {found[name]} {name}, {count} are known"
            for name, count in expected.items()
            if found[name] != count
        ]

    def _pool(self) -> list[str]:
        if self._context.staging is None:
            return []
        pool, wrong = self._context.staging.pool, []
        try:
            pool.check_integrity()
        except LocalProtocolError as error:
            wrong.append(str(error))
        running = [one for one in self._runner.alive() if one.staged is not None]
        owned = Counter(wave for one in running for wave in one.waves())
        if owned != Counter(pool.waves()):
            wrong.append(f"the pool gave out {pool.waves()}, loads have {list(owned)}")
        aside = sum(wave.num_bytes for one in self._runner.quarantined for wave in one.waves())
        if aside != pool.quarantined_bytes:
            wrong.append(
                f"{pool.quarantined_bytes} B of the pool are quarantined, {aside} B of quarantined loads"
            )
        unknown = set(pool.waiting) - {one.order.request_id for one in running}
        if unknown:
            wrong.append(f"loads that wait for the pool do not run: {sorted(unknown)}")
        return wrong
