"""How a load reads: into the request's blocks, through the staging pool, or from the producer's mapped memory.

A `Load` has one `Reading`: of a whole prompt at once (`WholeRead`), or part by part while it is computed
(`streamed_read.py`). Either has its bytes read by `DataReads`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvferry.plan.blocks import RequestBlocks, UnitPairs, Wanted, every, pair_request
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.worker.loads.data_reads import DataReads
from kvferry.worker.loads.fence import LeaseFence, LeaseReads
from kvferry.worker.loads.results import LoadRecord
from kvferry.worker.loads.slot_watch import Wait
from kvferry.worker.loads.state import LoadFailed, Progress
from kvferry.worker.peers.peer import Peer

Units: TypeAlias = dict[TokenMap, UnitPairs]
"""The units of a request, by how their tokens are mapped."""

ReadSteps: TypeAlias = Generator[Wait | None, None, Units]
"""Steps that read, and return the units that they have read."""


class Reading(Protocol):
    """How a load reads from a peer."""

    @property
    def blocks(self) -> RequestBlocks:
        """All that is loaded."""

    def prepare(self, peer: Peer) -> None:
        """Check the params against the peer, before anything is read.

        Raises:
            LoadFailed: they do not fit.
        """

    def steps(self, peer: Peer) -> ReadSteps:
        """Read everything; ends when the slot has said READY and every byte is in place.

        Raises:
            LoadFailed: the lease has ended.
            FabricError: a read failed.
        """


@dataclass(slots=True, eq=False)
class LoadParts:
    """The parts of one load that its reading uses."""

    order: LoadOrder
    groups: tuple[CacheGroup, ...]
    fence: LeaseFence
    lease_reads: LeaseReads
    data: DataReads
    record: LoadRecord
    progress: Progress

    def pair_units(
        self, peer: Peer, blocks: RequestBlocks, wanted: Wanted = every
    ) -> Units:
        """The units of these blocks on both sides.

        Raises:
            LoadFailed: the producer's blocks do not fit.
        """
        try:
            return pair_request(
                peer.plan, self.groups, peer.description.groups, blocks, wanted=wanted
            )
        except InvalidParams as invalid:
            raise LoadFailed(FailureReason.PARAMS, str(invalid)) from None


class WholeRead:
    """Reads a prompt when all of it is complete."""

    __slots__ = ("_parts", "_units", "blocks")

    def __init__(self, parts: LoadParts) -> None:
        order = parts.order
        self.blocks = RequestBlocks(
            local=order.local_blocks,
            remote=order.source.remote_block_ids,
            first_token=order.first_token,
            stop_token=order.stop_token,
            num_tokens=order.source.remote_num_tokens,
        )
        self._parts = parts
        self._units: Units = {}

    def prepare(self, peer: Peer) -> None:
        # Not after the fence: pairing takes time that grows with the blocks, and the producer may not be ready yet.
        self._units = self._parts.pair_units(peer, self.blocks)

    def steps(self, peer: Peer) -> ReadSteps:
        yield from self._parts.fence.wait_until_ready(peer)
        yield from self._parts.data.steps(peer, self._units)
        return self._units
