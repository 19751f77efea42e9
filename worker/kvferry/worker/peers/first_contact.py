"""The first contact with a producer, without the fabric: its description is fetched, and the transfer planned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvferry.link import limits
from kvferry.link.client import SideChannelClient, read_description
from kvferry.link.connection import Connection
from kvferry.plan.cost import Costs
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, PeerRefused
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from kvferry.protocol.hosts import host_port
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.peers.handshakes import OnHandshakeEnd
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.peers.plan_cache import PlanCache
from kvferry.worker.settings import MappedReadsOption, WorkerSettings

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
            return await loop.run_in_executor(self._planners, self._plan, key, frame)
        except RuntimeError as error:
            self._let_go(key)
            raise HandshakeFailed(f"no thread to plan the transfer: {error}") from None
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
