"""The first contact with a producer, without the fabric: its description is fetched, and the transfer planned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import msgspec

from kvferry.link.client import SideChannelClient
from kvferry.plan.cost import Costs
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import InvalidMessage, PeerRefused
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from kvferry.protocol.hosts import host_port
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.peers.plan_cache import PlanCache
from kvferry.worker.settings import WorkerSettings

_PLANS_AT_ONCE = 4
"""Plans made at a time: planning holds the interpreter's lock, and any peer can describe engines that take seconds."""

_MAX_REHEARSED_WORKERS = 64
"""Workers of an engine that plans a transfer from itself at its start, at most; with more it takes seconds."""


class FirstContact:
    """First contacts of one worker. Any number of threads may use it.

    Args:
        engine: this engine, with this worker alone until `set_workers`.
    """

    def __init__(self, engine: EngineDescription, costs: Costs, settings: WorkerSettings) -> None:
        self._engine = engine
        self._costs = costs
        self.settings = settings
        self._planning = threading.Semaphore(_PLANS_AT_ONCE)
        self._side_channel = SideChannelClient(settings.secrets, settings.allowed_hosts)
        self._plans = PlanCache(engine, 0, costs)

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
            internal_errors.log("a first contact could not be prepared; the engine starts without")

    def handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        """Fetch a producer's description and plan the transfer; waits, so it runs on a thread of its own.

        Raises:
            HandshakeFailed: as `SideChannelClient.fetch_description`.
            InvalidMessage: as `SideChannelClient.fetch_description`.
            PeerRefused: likewise, or another engine or boot has answered.
            PlanRefused: this worker cannot read from it.
        """
        # `waits=False`: the params are of a listener that was there, so a closed port is the end of
        # that boot. Clients choose ports, too, and each would keep a thread for the whole timeout.
        description = self._side_channel.fetch_description(
            key.host,
            key.port,
            key.engine_id,
            self._engine.engine_id,
            self.settings.handshake_timeout_s,
            queries_prompts=True,
            waits=False,
        )
        if description.engine_id != key.engine_id:
            where = host_port(key.host, key.port)
            raise PeerRefused(f"{where} is engine {description.engine_id}, not {key.engine_id}")
        if description.boot != key.boot:
            raise PeerRefused(f"engine {key.engine_id} has restarted since it wrote these params")
        with self._planning:
            return description, self._plans.plan(description)

    def close(self) -> None:
        """End the side channel's connections. Idempotent."""
        self._side_channel.close()
