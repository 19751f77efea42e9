"""The first contact with a producer: its description is fetched, the transfer planned, and something small is read.

`FirstContact` does what needs no fabric, on threads of its own; `FirstReads` connects the agents on the transfer
thread, and ends with a small real read from every worker of the producer. Nothing else in NIXL shows a connection:
`make_connection` does not connect (measured), and the first read from a peer that does not answer hangs without an
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvferry.link import limits
from kvferry.link.awake_clock import LONGEST_TURN_S, AwakeClock
from kvferry.link.client import SideChannelClient, read_description
from kvferry.link.connection import Connection
from kvferry.plan.cost import Costs
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, PeerRefused
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from kvferry.protocol.hosts import host_port
from kvferry.protocol.slots import EMPTY
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import (
    Indices,
    RemoteDescriptors,
    Transfer,
    TransferState,
)
from kvferry.worker.fabric.reads import FabricReader, Reads, SlotReads
from kvferry.worker.peers.handshakes import OnHandshakeEnd
from kvferry.worker.peers.mapped_route import Mapper
from kvferry.worker.peers.peer import Peer, PeerKey, connect, disconnect
from kvferry.worker.peers.plan_cache import PlanCache
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.staging.buffer import Staging


@dataclass(slots=True, eq=False)
class FirstRead:
    """The first read of one peer.

    Attributes:
        reads: reads that may still write `entries`: a slot of each worker, then the proofs of what is mapped.
        asked_s: when the peer was first asked for.
        arrived_s: when its description and plan arrived.
        begun_s: when it began, by the clock of the time awake.
        prepared_s: how long the fabric took to prepare it.
        transfers: the reads that were posted.
    """

    peer: Peer
    reads: Reads
    entries: tuple[int, ...]
    asked_s: float
    arrived_s: float
    begun_s: float
    prepared_s: float
    transfers: list[Transfer] = field(default_factory=list)


class FirstReads:
    """The first reads of a worker. Used on the transfer thread.

    Args:
        timeout_s: for one of them.
        mapper: see `connect`.
        on_end: called with every peer whose first read can write no more, or was not posted.

    Attributes:
        under_way: by peer.
        given_up: those that were given up and may still write.
    """

    def __init__(
        self,
        reader: FabricReader,
        caches: KvCaches,
        staging: Staging | None,
        slot_reads: SlotReads,
        timeout_s: float,
        mapper: Mapper | None = None,
        on_end: Callable[[PeerKey], None] = lambda _: None,
    ) -> None:
        self._mapper = mapper
        self._on_end = on_end
        self.reader = reader
        self.timeout_s = timeout_s
        self._caches = caches
        self._staging = staging
        self._slot_reads = slot_reads
        self.under_way: dict[PeerKey, FirstRead] = {}
        self.given_up: list[FirstRead] = []
        self._clock = AwakeClock(LONGEST_TURN_S)

    def all(self) -> list[FirstRead]:
        """Those under way, and those that were given up and may still write."""
        return [*self.under_way.values(), *self.given_up]

    def has_room(self) -> bool:
        """True if half of the entries are free."""
        return 2 * self._slot_reads.free() >= len(self._slot_reads.words)

    def begin(
        self,
        key: PeerKey,
        description: EngineDescription,
        plan: TransferPlan,
        asked_s: float,
        now_s: float,
    ) -> None:
        """Make a planned peer known to the fabric and post its first read.

        Raises:
            HandshakeFailed: there are too few entries.
            FabricError, InvalidMessage: as `connect` and `Fabric.post_read`.
        """
        prepare_begun_s = time.perf_counter()
        try:
            peer = connect(
                self.reader,
                self._caches,
                self._staging,
                key,
                description,
                plan,
                self._mapper,
            )
        except Exception:
            self._on_end(key)
            raise
        proofs = sum(len(route.mapping.files) for route in peer.mapped_routes)
        entries = self._slot_reads.try_take(len(peer.routes) + proofs, key.address)
        if entries is None:
            disconnect(self.reader, peer)
            self._on_end(key)
            raise HandshakeFailed("too many reads in flight")
        first_read = FirstRead(
            peer=peer,
            reads=Reads(self.reader),
            entries=entries,
            asked_s=asked_s,
            arrived_s=now_s,
            begun_s=self._clock.wind(now_s),
            prepared_s=time.perf_counter() - prepare_begun_s,
        )
        # Any slot will do: slot 0 of each lease table.
        slot = np.zeros(1, dtype=np.int32)
        # A proof that is not read must not be one that an earlier read has left here.
        self._slot_reads.memory[list(entries)] = EMPTY
        try:
            for entry, route in zip(entries, peer.routes, strict=False):
                self._post(first_read, [entry], route.slots.descriptors, slot)
            next_proof = len(peer.routes)
            for mapped in peer.mapped_routes:
                numbers = np.arange(len(mapped.mapping.files), dtype=np.int32)
                into = entries[next_proof : next_proof + len(numbers)]
                self._post(first_read, into, mapped.proofs, numbers)
                next_proof += len(numbers)
        except Exception:
            self._give_up(first_read)
            raise
        self.under_way[key] = first_read

    def step(self, now_s: float) -> list[tuple[FirstRead, Exception | None]]:
        """Those that have ended, each with its error, or None for a peer that is connected."""
        ended: list[tuple[FirstRead, Exception | None]] = []
        # Time awake: a pause of this process is not the peer's fault.
        awake_s = self._clock.wind(now_s)
        for first_read in list(self.under_way.values()):
            error: Exception | None = None
            try:
                if not self._is_done(first_read):
                    if awake_s < first_read.begun_s + self.timeout_s:
                        continue
                    # A frozen peer is never reported by NIXL: the deadline is ours.
                    error = HandshakeFailed(
                        f"the first read took longer than {self.timeout_s:g} s"
                    )
            except Exception as failed:  # noqa: BLE001 - handled by the caller
                error = failed
            del self.under_way[first_read.peer.key]
            if error is None:
                for transfer in first_read.transfers:
                    first_read.reads.finished(transfer)
                self._slot_reads.give_back(
                    first_read.entries, first_read.peer.key.address
                )
                self._on_end(first_read.peer.key)
            else:
                self._give_up(first_read)
            ended.append((first_read, error))
        self.given_up = [
            first_read for first_read in self.given_up if not self._try_end(first_read)
        ]
        return ended

    def give_up_all(self) -> None:
        """Give up all that are under way; those that may still write are left in `given_up`."""
        given_up = list(self.under_way.values())
        self.under_way.clear()
        for first_read in given_up:
            self._give_up(first_read)

    def _post(
        self,
        first_read: FirstRead,
        entries: Sequence[int],
        remote: RemoteDescriptors,
        wanted: Indices,
    ) -> None:
        local = np.array(entries, dtype=np.int32)
        transfer = first_read.reads.post(
            self._slot_reads.descriptors, local, remote, wanted
        )
        first_read.transfers.append(transfer)

    def _is_done(self, first_read: FirstRead) -> bool:
        """Whether all have ended.

        Raises:
            HandshakeFailed: what is mapped is not the memory that the fabric reads.
        """
        # Each is polled, whatever the others are: a transfer is sure to advance only if polled.
        states = [
            self.reader.fabric.poll(transfer) for transfer in first_read.transfers
        ]
        if not all(state is TransferState.DONE for state in states):
            return False
        peer = first_read.peer
        next_proof = len(peer.routes)
        for mapped in peer.mapped_routes:
            expected = mapped.mapping.proofs()
            entries = first_read.entries[next_proof : next_proof + len(expected)]
            if not np.array_equal(self._slot_reads.memory[list(entries)], expected):
                raise HandshakeFailed(
                    "the memory that is mapped is not that which the fabric reads"
                )
            next_proof += len(expected)
        return True

    def _give_up(self, first_read: FirstRead) -> None:
        if not self._try_end(first_read):
            self.given_up.append(first_read)

    def _try_end(self, first_read: FirstRead) -> bool:
        """Give everything back if the first read can write no more.

        Returns:
            True if it did.
        """
        if not first_read.reads.settle():
            return False
        self._slot_reads.give_back(first_read.entries, first_read.peer.key.address)
        disconnect(self.reader, first_read.peer)
        self._on_end(first_read.peer.key)
        return True


_MAX_REHEARSED_WORKERS = 64
"""Workers of an engine that plans a transfer from itself at its start, at most; with more it takes seconds."""


class FirstContact:
    """First contacts of one worker.

    kvferry-side-channel     fetches descriptions: a coroutine each, so that a silent peer costs a socket and no thread
    kvferry-planner          decodes and plans them: `PLANS_AT_ONCE` threads, since that is CPU work

    Args:
        engine: this engine, with this worker alone until `set_workers`.

    Attributes:
        link: to the producers' side channels.
    """

    def __init__(
        self, engine: EngineDescription, costs: Costs, settings: WorkerSettings
    ) -> None:
        self._engine = engine
        self._costs = costs
        self.settings = settings
        self._planners = ThreadPoolExecutor(
            limits.PLANS_AT_ONCE, thread_name_prefix="kvferry-planner"
        )
        self.link = SideChannelClient(settings.secrets, settings.allowed_hosts)
        self._plans = PlanCache(engine, 0, costs)
        # Of producers that have described themselves, while their agents are connected. Used on the link's loop.
        self._kept: dict[PeerKey, Connection] = {}

    def set_workers(
        self,
        consumers: Sequence[WorkerDescription],
        index: int,
        producers: Sequence[WorkerDescription],
    ) -> None:
        """Set the workers of this engine, and plan a transfer from a producer of its own shape, to have that plan.

        Where that fails the engine starts nevertheless: the first contact does it, or reports the reason.

        Args:
            consumers: described as consumers; the worker at `index` plans its own reads.
            producers: the same workers described as producers.
        """
        self._engine = msgspec.structs.replace(self._engine, workers=tuple(consumers))
        self._plans = PlanCache(self._engine, index, self._costs)
        if len(producers) > _MAX_REHEARSED_WORKERS:
            return
        twin = msgspec.structs.replace(self._engine, workers=tuple(producers))
        try:
            with contextlib.suppress(PlanRefused, InvalidMessage):
                self._plans.plan(twin)
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log(
                "a first contact could not be prepared; the engine starts without"
            )

    def begin(self, key: PeerKey, on_end: OnHandshakeEnd) -> None:
        """Begin the handshake with a producer; `on_end` is called once, on another thread. Never waits."""
        self.link.start(self._handshake(key), on_end)

    def over(self, key: PeerKey) -> None:
        """This producer's agents are connected, or will not be. May be called on any thread; never waits."""
        self.link.call_soon(lambda: self._let_go(key))

    async def _handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        """Fetch a producer's description and plan the transfer.

        Raises:
            HandshakeFailed: as `SideChannelClient.fetch_description`, or there are no more threads.
            InvalidMessage: as `SideChannelClient.fetch_description`.
            PeerRefused: likewise, or another engine or boot has answered.
            PlanRefused: this worker cannot read from it.
        """
        # `waits=False`: the params are of a listener that was there, so a closed port is the end of
        # that boot. Clients choose ports, too, and each would keep a place for the whole timeout.
        frame = await self.link.describe(
            key.host,
            key.port,
            key.engine_id,
            self._engine.engine_id,
            self.settings.handshake_timeout_s,
            queries_prompts=True,
            waits=False,
            keep=lambda connection: self._keep(key, connection),
        )
        loop = asyncio.get_running_loop()
        try:
            planning = loop.run_in_executor(self._planners, self._plan, key, frame)
        except RuntimeError as error:
            self._let_go(key)
            raise HandshakeFailed(f"no thread to plan the transfer: {error}") from None
        # By itself: a RuntimeError of the plan is a bug, and is shown as one.
        try:
            return await planning
        except BaseException:
            self._let_go(key)
            raise

    def _keep(self, key: PeerKey, connection: Connection) -> None:
        """Keep a connection until `over`: its producer does not close its agents meanwhile."""
        self._let_go(key)
        self._kept[key] = connection

        # Nobody says that it is over where the plan was not taken: the worker has fallen asleep.
        def give_up() -> None:
            if self._kept.get(key) is connection:
                self._let_go(key)

        timeout_s = self.settings.handshake_timeout_s
        asyncio.get_running_loop().call_later(timeout_s, give_up)

    def _let_go(self, key: PeerKey) -> None:
        connection = self._kept.pop(key, None)
        if connection is not None:
            connection.close()

    def _plan(
        self, key: PeerKey, frame: bytes
    ) -> tuple[EngineDescription, TransferPlan]:
        description = read_description(frame, key.host, key.port)
        if description.engine_id != key.engine_id:
            where = host_port(key.host, key.port)
            raise PeerRefused(
                f"{where} is engine {description.engine_id}, not {key.engine_id}"
            )
        if description.boot != key.boot:
            raise PeerRefused(
                f"engine {key.engine_id} has restarted since it wrote these params"
            )
        mappable: frozenset[int] = frozenset()
        if self.settings.mapped_reads is not MappedReadsOption.OFF:
            mappable = frozenset(
                index
                for index, worker in enumerate(description.workers)
                if worker.shared is not None and worker.shared.allocations
            )
        return description, self._plans.plan(description, mappable)

    def close(self) -> None:
        """End the side channel's connections, and begin no further plan. Idempotent."""
        self.link.close()
        self._planners.shutdown(wait=False, cancel_futures=True)
