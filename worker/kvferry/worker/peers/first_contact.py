"""The first contact with a producer, without the fabric: its description is fetched, and the transfer planned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import msgspec

from kvferry.plan.cost import Costs
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, PeerRefused
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.peers.plan_cache import PlanCache
from kvferry.worker.settings import WorkerSettings

_PLANS_AT_ONCE = 4
"""Plans made at a time: planning holds the interpreter's lock, and any peer can describe engines that take seconds."""

_MOST_REHEARSED = 64
"""Most workers of an engine that plans a transfer from itself at its start; with more it takes seconds."""


class FirstContact:
    """First contacts of one worker. Any number of threads may use it.

    Args:
        engine: this engine, with this worker alone until `set_workers`.
    """

    def __init__(self, engine: EngineDescription, costs: Costs, settings: WorkerSettings) -> None:
        self._engine = engine
        self._costs = costs
        self._settings = settings
        self._planning = threading.Semaphore(_PLANS_AT_ONCE)
        self._side_channel = SideChannelClient(settings.secrets)
        self._plans = PlanCache(engine, 0, costs)

    def set_workers(self, workers: Sequence[WorkerDescription], index: int) -> None:
        """Set the workers of this engine, described as consumers; the worker at `index` plans its own reads."""
        self._engine = msgspec.structs.replace(self._engine, workers=tuple(workers))
        self._plans = PlanCache(self._engine, index, self._costs)

    def rehearse(self, workers: Sequence[WorkerDescription]) -> None:
        """Prepare the first contact: plan a transfer from a producer of this engine's own shape.

        Where that fails the engine starts all the same: the first contact does it, or reports the reason.

        Args:
            workers: this engine's, described as producers.
        """
        try:
            if len(workers) <= _MOST_REHEARSED:
                with contextlib.suppress(PlanRefused, InvalidMessage):
                    self._plans.plan(msgspec.structs.replace(self._engine, workers=tuple(workers)))
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log("a first contact could not be prepared; the engine starts without")

    def handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        """Fetch a producer's description and plan the transfer; waits, so it runs on a thread of its own.

        Raises:
            HandshakeFailed, InvalidMessage: as `SideChannelClient.fetch_description`.
            PeerRefused: likewise, or another engine or boot has answered.
            PlanRefused: this worker cannot read from it.
        """
        own, timeout_s = self._engine.engine_id, self._settings.handshake_timeout_s
        if key.engine_id == own:
            raise HandshakeFailed("the params name this very engine")
        description = self._side_channel.fetch_description(key.host, key.port, key.engine_id, own, timeout_s)
        if description.engine_id != key.engine_id:
            raise PeerRefused(f"{key.host}:{key.port} is engine {description.engine_id}, not {key.engine_id}")
        if description.boot != key.boot:
            raise PeerRefused(f"engine {key.engine_id} has restarted since it wrote these params")
        with self._planning:
            return description, self._plans.plan(description)

    def close(self) -> None:
        """End the side channel's connections. Idempotent."""
        self._side_channel.close()
