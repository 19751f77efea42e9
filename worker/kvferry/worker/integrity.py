"""Integrity of a worker: everything that was taken belongs to a live owner.

| of | taken | by |
| --- | --- | --- |
| the entries for slot reads | all that are not free | loads that run or are quarantined, first reads |
| the staging pool | waves that are out | staged reads of these loads, quarantined ones by quarantined loads |
| the fabric's transfers | not released | these loads, first reads |
| its prepared lists | not released | the slot reads, peers |
| its peers | not removed | peers |
| the lease table | words that are not empty | leases |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.fabric.port import LocalDescriptors, RemoteDescriptors, Transfer
from kvferry.worker.fabric.reads import Reader
from kvferry.worker.leases.table import LeaseTable
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.memory.slot_reads import SlotReads
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.staging.buffer import Staging


@dataclass(frozen=True, slots=True)
class WorkerIntegrity:
    """The integrity check of one worker. Belongs to the transfer thread."""

    reader: Reader
    slot_reads: SlotReads
    staging: Staging | None
    table: LeaseTable
    runner: LoadRunner
    registry: PeerRegistry

    def check(self, *, idle: bool = False) -> None:
        """Check all sums, in time that grows with the loads, peers and leases that there are.

        Args:
            idle: also check that nothing is under way: no load, no first read, no quarantined load. Peers may be
                known and leases held.

        Raises:
            LocalProtocolError: with all the sums.
        """
        wrong = [*self._cells(), *self._handles(), *self._pool(), *self.table.errors()]
        if idle:
            wrong += self._unrest()
        if wrong:
            raise LocalProtocolError(f"{'; '.join(wrong)}. {self.describe()}")

    def describe(self) -> str:
        """All the sums in a line."""
        runner, slot_reads = self.runner, self.slot_reads
        first_reads, loads = self.registry.first_reads(), list(runner.alive())
        pool = self.staging.pool if self.staging is not None else None
        return (
            f"loads: {runner.waiting()} waiting, {len(loads) - len(runner.quarantined) - runner.flushing()} running, "
            f"{runner.flushing()} flushing, {len(runner.quarantined)} quarantined; peers: {self.registry.describe()}; "
            f"entries: {len(slot_reads.words)} = {slot_reads.free()} free + "
            f"{sum(len(one.entries) for one in loads)} of loads + "
            f"{sum(len(one.entries) for one in first_reads)} of first reads; "
            f"transfers: {sum(one.transfers() for one in loads)} of loads, "
            f"{sum(len(one.reads) for one in first_reads)} of first reads; "
            f"not taken back: {len(self.reader.refused())}; the fabric has {self.reader.fabric.open_handles()}; "
            f"pool: {f'{pool.capacity} = {pool.free_bytes} free + {pool.waves()}' if pool is not None else 'none'}; "
            f"leases: {self.table.describe()}"
        )

    def _cells(self) -> list[str]:
        slot_reads = self.slot_reads
        owners = [one.entries for one in self.runner.alive()] + [one.entries for one in self.registry.first_reads()]
        taken = Counter(entry for entries in owners for entry in entries)
        wrong = [f"entry {entry} has {count} owners" for entry, count in taken.items() if count > 1]
        if taken:  # a set of all free entries takes a while, and an idle worker has taken none
            wrong += [f"entry {entry} is free and taken" for entry in slot_reads.free_entries() & taken.keys()]
        if slot_reads.free() + sum(taken.values()) != len(slot_reads.words):
            wrong.append(
                f"{len(slot_reads.words)} entries are not {slot_reads.free()} free + {sum(taken.values())} taken"
            )
        return wrong

    def _handles(self) -> list[str]:
        has, refused = self.reader.fabric.open_handles(), self.reader.refused()
        peers = list(self.registry.peers())
        agents = sum(len(peer.routes) for peer in peers)
        lists = sum(isinstance(one, (LocalDescriptors, RemoteDescriptors)) for one in refused)
        expected = {
            "transfers": sum(one.transfers() for one in self.runner.alive())
            + sum(len(one.reads) for one in self.registry.first_reads())
            + sum(isinstance(one, Transfer) for one in refused),
            "prepared": self.slot_reads.is_prepared + sum(len(peer.made) for peer in peers) - agents + lists,
            "peers": agents + sum(isinstance(one, str) for one in refused),
        }
        found = {"transfers": has.transfers, "prepared": has.prepared, "peers": has.peers}
        return [
            f"the fabric has {found[name]} {name}, {count} are known"
            for name, count in expected.items()
            if found[name] != count
        ]

    def _pool(self) -> list[str]:
        if self.staging is None:
            return []
        pool, wrong = self.staging.pool, []
        try:
            pool.check_integrity()
        except LocalProtocolError as error:
            wrong.append(str(error))
        running = [one for one in self.runner.alive() if one.staged is not None]
        owned = Counter(wave for one in running for wave in one.waves())
        if owned != Counter(pool.waves()):
            wrong.append(f"the pool gave out {pool.waves()}, loads have {list(owned)}")
        aside = sum(wave.num_bytes for one in self.runner.quarantined for wave in one.waves())
        if aside != pool.quarantined_bytes:
            wrong.append(f"{pool.quarantined_bytes} B of the pool are quarantined, {aside} B of quarantined loads")
        unknown = set(pool.waiting) - {one.order.request_id for one in running}
        if unknown:
            wrong.append(f"loads that wait for the pool do not run: {sorted(unknown)}")
        return wrong

    def _unrest(self) -> list[str]:
        has = self.reader.fabric.open_handles()
        left = {
            "loads wait": self.runner.waiting(),
            "loads run or are quarantined": len(list(self.runner.alive())),
            "first reads have not ended": len(self.registry.first_reads()),
            "handles were not taken back": len(self.reader.refused()),
            "transfers are open": has.transfers,
            "peers are leaving": has.leaving,
        }
        return [f"{count} {what}" for what, count in left.items() if count]
