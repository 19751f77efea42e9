"""The parts of a worker that its loads share, and how a load runs and fails."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.entries import IdPages, SlotReads
from kvferry.worker.fabric.reads import FabricReader
from kvferry.worker.loads.tail_zeroing import TailZeroing
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.staging.buffer import Staging


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The parts of a worker that its loads share.

    Attributes:
        groups: this engine's cache groups.
        worker: this worker's index in its engine.
    """

    reader: FabricReader
    registry: PeerRegistry
    slot_reads: SlotReads
    id_pages: IdPages
    staging: Staging | None
    caches: KvCaches
    tail_zeroing: TailZeroing
    groups: tuple[CacheGroup, ...]
    worker: int
