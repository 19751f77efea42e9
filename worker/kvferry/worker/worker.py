"""One worker's half of kvferry: its memory, its lease table, its transfer thread.

The memory is the same from the first day to the last. The agent that has registered it, the thread that uses the agent,
and all that both know of peers are of one generation: they end when the engine sleeps (`registration.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.plan.cost import Costs
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import (
    CacheGroup,
    EngineDescription,
    ModelFacts,
    WorkerDescription,
)
from kvferry.protocol.ids import NO_BOOT
from kvferry.protocol.orders import (
    FailureReason,
    OrdersHead,
    decode_head,
    decode_orders,
)
from kvferry.protocol.params import MAC_KEY_BYTES
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.loads.results import LoadWatchdog, ResultBox, StepResults
from kvferry.worker.loads.state import LoadState
from kvferry.worker.peers.first_contact import FirstContact
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.registration import MemoryEvent, MemoryState, Registration
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.thread_snapshot import ThreadSnapshot
from kvferry.worker.transfer_thread import StepLaunched, TransferThread
from kvferry.worker.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)

MakeFabric = Callable[[str], Fabric]
"""Makes a fabric whose agent has the given name."""

DRAIN_MARGIN_S = 5.0
"""How much longer than the grace of a failed read a withdrawal waits for reads to end."""


@dataclass(frozen=True, slots=True)
class _Generation:
    """What is made anew whenever the memory is registered."""

    fabric: Fabric
    thread: TransferThread
    description: WorkerDescription


class FerryWorker:
    """One worker: made once the caches exist, runs until `close`.

    Args:
        engine_id: this engine.
        place, index: this worker's place, and its index among the engine's workers.
        topology, facts, groups: of this engine.
        caches: this worker's caches, registered here, and used until `close` except while they are withdrawn.
        make_fabric: the fabric; made, filled and prepared on the calling thread, then given to the transfer thread.

    Attributes:
        description: of this worker's registered memory, as peers and siblings get it.
        registration: the life of this worker's registered memory.

    Raises:
        FabricError: the fabric is not available, or refuses the memory.
        InvalidConfig: the host memory that the settings require cannot be allocated.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        place: Place,
        index: int,
        topology: Topology,
        facts: ModelFacts,
        groups: tuple[CacheGroup, ...],
        caches: KvCaches,
        settings: WorkerSettings,
        make_fabric: MakeFabric,
    ) -> None:
        self._engine_id = engine_id
        self._place = place
        self._index = index
        self._groups = groups
        self._settings = settings
        self._make_fabric = make_fabric
        self._device = caches.device
        self._results = ResultBox()
        self._siblings: tuple[WorkerDescription, ...] = ()
        self._static_peers: tuple[PeerKey, ...] = ()
        self.registration = Registration()
        # What has been made is undone if anything that follows fails: else the engine's memory would stay pinned.
        with contextlib.ExitStack() as undo:
            self._memory = WorkerMemory.allocate(caches, groups, settings)
            undo.callback(self._memory.unpin)
            fabric = self._registered_fabric()
            undo.callback(fabric.close)
            description = self._describe(fabric)
            # Boot and key do not matter to the planner.
            engine = EngineDescription(
                engine_id=engine_id,
                boot=NO_BOOT,
                mac_key=bytes(MAC_KEY_BYTES),
                facts=facts,
                topology=topology,
                groups=groups,
                workers=(self._as_consumer(description),),
            )
            staging = self._memory.staging
            longest_staged_run = 0
            if staging is not None:
                longest_staged_run = staging.longest_run
            costs = Costs(
                direct_min_bytes=settings.direct_min_bytes,
                staged_run_bytes=longest_staged_run,
                reaches_caches=not settings.host_buffer,
            )
            self._first_contact = FirstContact(engine, costs, settings)
            undo.callback(self._first_contact.close)
            thread = self._new_thread(fabric)
            self._now: _Generation | None = _Generation(fabric, thread, description)
            undo.pop_all()
        self.description = description
        self._watchdog = LoadWatchdog(settings.load_timeout_s)
        # Whether the step that is under way completes parts of prompts.
        self._step_marks = False

    def add_siblings(self, workers: Sequence[WorkerDescription]) -> None:
        """Set the workers of this engine, this one at its own index: reads are spread over all of them.

        Without it, a worker plans as if it were the only one, and reports a wrong number of readers to producers with
        several. Call it before the first orders.

        Raises:
            InvalidMessage: this worker's own description is not at its index.
        """
        is_known = self._index < len(workers)
        if not is_known or workers[self._index] != self.description:
            raise InvalidMessage(
                "workers",
                f"{len(workers)} workers",
                f"this one's own description at {self._index}",
            )
        # Plans depend on shapes and addresses, which a new generation leaves as they were: they are kept.
        siblings = tuple(map(_without_agent, workers))
        if siblings == self._siblings:
            return
        self._siblings = siblings
        consumers = list(workers)
        consumers[self._index] = self._as_consumer(self.description)
        self._first_contact.set_workers(consumers, self._index, workers)

    def start(self) -> None:
        """Take notifications from now on, also before the first orders. Call it when the engine has captured its graphs
        (the thread uses the device), before peers learn of this worker. Idempotent."""
        # Not only with the first orders: an idle worker took no notifications, and NIXL keeps them, of any size and
        # from any agent. 79,540 of 60 kB were 4.5 GB.
        if self._now is not None:
            self._now.thread.start()

    def carry_out(self, head: bytes, frame: bytes) -> None:
        """Take a step's orders; returns at once, however many blocks they name. Call it on the thread that launches the
        device's work.

        Args:
            head: the head of the orders, decoded here (`encode_head`).
            frame: the orders, decoded by the transfer thread (`encode_orders`).
        """
        try:
            decoded = decode_head(head)
        except InvalidMessage:
            internal_errors.log("a step's orders are lost")
            with self._results as results:
                results.counts["lost_orders"] += 1
            return
        self._watchdog.ordered(decoded.loads)
        if decoded.cancels:
            self._watchdog.cancelled(decoded.cancels)
        # Here, not on the transfer thread, which may be stuck in a call.
        if decoded.fails:
            with self._results as results:
                results.failed.update(
                    dict.fromkeys(decoded.fails, FailureReason.PREFILL)
                )
        if self._now is None:
            self._refuse(decoded, frame)
            return
        # The mark is made before this step's work is launched: only what was launched earlier may still write into the
        # blocks of its loads.
        self._now.thread.submit(decoded, frame, self._device.mark())
        self._step_marks = decoded.marks

    def end_step(self) -> None:
        """All of the step's work on the device has been launched, on this thread. What it computes becomes readable
        when the device has finished."""
        if self._step_marks and self._now is not None:
            self._now.thread.inbox.put(StepLaunched(self._device.mark()))
        self._step_marks = False

    def fail_step(self) -> None:
        """The step has raised: nothing that it was to compute, or that steps before it have begun, may be read."""
        self._step_marks = False
        ended = self._memory.table.distrust()
        if not ended:
            return
        logger.error(
            "a step has raised: %d leases end, whose prompts it may not have computed",
            len(ended),
        )
        with self._results as results:
            results.sent.update(
                request_id for request_id in ended if request_id is not None
            )

    def take_results(self, timeout_s: float = 0.0) -> StepResults:
        """Return the results since the last call.

        Args:
            timeout_s: while loads are under way, wait at most this long for one of them to end; 0 returns at once.
        """
        # Only while loads are under way: nothing else ends this wait.
        if not self._watchdog.ordered_s:
            timeout_s = 0.0
        results = self._results.take(timeout_s)
        self._watchdog.poll(results, self._results.turned_s)
        return results

    def snapshot(self, timeout_s: float) -> ThreadSnapshot | None:
        """The state of the transfer thread between two of its turns, for tests and debugging; waits.

        Returns:
            None if the thread does not run.

        Raises:
            TimeoutError: it is stuck in a call.
        """
        if self._now is None or not self._now.thread.is_running:
            return None
        return self._now.thread.snapshot().result(timeout_s)

    def count_loads(self, *states: LoadState) -> int:
        """How many loads are in these states now."""
        if self._now is None:
            return 0
        return self._now.thread.runner.loads.count(*states)

    def withdraw(self) -> None:
        """Withdraw the memory: when it returns, the pages of the caches may go. Idempotent.

        For an engine of several workers: `drain` on all of them, and then `deregister` on all or `keep` on all.

        Raises:
            WithdrawalRefused: as `drain`.
        """
        self.drain()
        self.deregister()

    def drain(self) -> None:
        """End all leases, fail all loads, and wait until nothing of this worker writes into its memory. Idempotent.

        It takes as long as the slowest read that was posted, at most `failed_read_grace_s` and `DRAIN_MARGIN_S`. Before
        it, let no peer be described this worker's agent any more.

        Raises:
            WithdrawalRefused: reads may still write then, or the thread is stuck in a call. The worker goes on; its
                leases are over, and so are its loads, unless the thread is stuck.
        """
        now = self._now
        if now is None or not self.registration.is_registered:
            return
        self.registration.apply(MemoryEvent.WITHDRAW)
        # Here, not on the transfer thread, which may be stuck in a call: no consumer may read from now on.
        ended = self._memory.table.end_all()
        with self._results as results:
            results.sent.update(ended)
        try:
            now.thread.drain(self._settings.failed_read_grace_s + DRAIN_MARGIN_S)
        except BaseException:
            self.registration.apply(MemoryEvent.KEPT)
            raise
        self.registration.apply(MemoryEvent.QUIET)

    def keep(self) -> None:
        """Go on after `drain`: the pages stay. Idempotent."""
        if self._now is None or self.registration.state is not MemoryState.QUIET:
            return
        self.registration.apply(MemoryEvent.KEPT)
        self._now.thread.resume()

    def deregister(self) -> None:
        """Close the agent: when it returns, the pages of the caches may go. Idempotent.

        Raises:
            LocalProtocolError: `drain` has not been called, or has raised.
        """
        now = self._now
        if now is None:
            return
        self.registration.check(MemoryEvent.DEREGISTERED)
        self._static_peers = now.thread.registry.static
        # Not only its registrations: with transports that emulate remote reads by messages (TCP), the agent of the
        # memory's owner answers them, registered or not, and would read pages that are gone.
        now.thread.close()
        now.fabric.close()
        self._now = None
        self._fail_unreported()
        self.registration.apply(MemoryEvent.DEREGISTERED)

    def restore(self) -> None:
        """Register the memory again, whose pages are back at their addresses: `description` is of a new generation,
        which the others of this engine are to be given (`add_siblings`). Idempotent.

        Raises:
            FabricError: as when it was made; the memory stays withdrawn.
        """
        if self._now is not None:
            return
        fabric = self._registered_fabric()
        try:
            description = self._describe(fabric)
            thread = self._new_thread(fabric)
        except BaseException:
            fabric.close()
            raise
        self._now = _Generation(fabric, thread, description)
        self.description = description
        self.registration.apply(MemoryEvent.REGISTERED)
        now_s = time.monotonic()
        for key in self._static_peers:
            thread.registry.prewarm_static(key, now_s)
        thread.start()

    def close(self) -> None:
        """Stop the thread and give the memory back to the engine. Idempotent."""
        self._first_contact.close()
        if self._now is not None:
            # Memory that a stuck thread may still read into must not go back to the engine: it leaks.
            if not self._now.thread.close():
                logger.error(
                    "the transfer thread is stuck in a call; its memory is not freed"
                )
                return
            self._now.fabric.close()
        self._memory.unpin()

    def _registered_fabric(self) -> Fabric:
        """A new fabric that has registered the memory."""
        name = f"{self._engine_id}/{self._place}/{uuid.uuid4().hex[:12]}"
        fabric = self._make_fabric(name)
        try:
            self._memory.register(fabric)
        except BaseException:
            fabric.close()
            raise
        return fabric

    def _new_thread(self, fabric: Fabric) -> TransferThread:
        return TransferThread(
            fabric,
            self._memory,
            self._groups,
            self._index,
            self._first_contact,
            self._settings,
            self._results,
        )

    def _refuse(self, head: OrdersHead, frame: bytes) -> None:
        """Orders that come while the memory is withdrawn: what they hold is over, and what they load has failed."""
        try:
            orders = decode_orders(frame)
        except InvalidMessage:
            internal_errors.log("a step's orders are lost")
            with self._results as results:
                results.counts["lost_orders"] += 1
            return
        with self._results as results:
            for hold in (*orders.holds, *orders.completions):
                results.sent.add(hold.request_id)
            for request_id in head.loads:
                results.failed[request_id] = FailureReason.WITHDRAWN

    def _fail_unreported(self) -> None:
        """What was loaded goes with the pages. A step that hears of it later must not take it for there."""
        with self._results as results:
            results.failed.update(
                dict.fromkeys(results.loaded, FailureReason.WITHDRAWN)
            )
            results.loaded.clear()

    def _describe(self, fabric: Fabric) -> WorkerDescription:
        """This worker's description as a producer."""
        exported = self._memory.exported
        return WorkerDescription(
            place=self._place,
            agent=fabric.agent_name,
            agent_metadata=fabric.metadata(),
            memory=exported.kind.value,
            device=exported.device_index,
            lease_table=self._memory.table.address,
            tensors=exported.tensors,
            stream_rows=self._memory.rows.address,
            shared=self._memory.shared,
        )

    def _as_consumer(self, description: WorkerDescription) -> WorkerDescription:
        """This worker's description as a consumer: with the addresses of the caches themselves, not of the copy."""
        return msgspec.structs.replace(description, tensors=self._memory.caches.tensors)


def _without_agent(worker: WorkerDescription) -> WorkerDescription:
    return msgspec.structs.replace(worker, agent="", agent_metadata=b"")
