"""The parts of a worker that its loads share, and how a load runs and fails."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.orders import FailureReason
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.entries import IdPages, SlotReads
from kvferry.worker.fabric.reads import FabricReader
from kvferry.worker.loads.slot_watch import Wait
from kvferry.worker.loads.tail_zeroing import TailZeroing
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.staging.buffer import Staging

Steps = Generator[Wait | None, None, None]
"""The steps of a load: None where it wants to be resumed soon, a `Wait` where it is parked until that is over."""


class LoadFailed(KvferryError):
    """A load has failed: the contents of its blocks must not be used."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


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
