"""One worker's half of kvferry: its memory, its lease table, its transfer thread."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Sequence

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
from kvferry.protocol.orders import FailureReason, decode_head
from kvferry.protocol.params_mac import MAC_KEY_BYTES
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.inbox import ThreadSnapshot
from kvferry.worker.loads.results import StepResults
from kvferry.worker.loads.state import LoadState
from kvferry.worker.loads.watchdog import LoadWatchdog
from kvferry.worker.peers.first_contact import FirstContact
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.transfer_thread import TransferThread
from kvferry.worker.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)

MakeFabric = Callable[[str], Fabric]
"""Makes a fabric whose agent has the given name."""


class FerryWorker:
    """One worker: made once the caches exist, runs until `close`.

    Args:
        engine_id: this engine.
        place, index: this worker's place, and its index among the engine's workers.
        topology, facts, groups: of this engine.
        caches: this worker's caches, registered here and kept until `close`.
        make_fabric: the fabric; made, filled and prepared on the calling thread, then given to the transfer thread.

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
        self._index = index
        # What has been made is undone if anything that follows fails: else the engine's memory would stay pinned.
        with contextlib.ExitStack() as undo:
            self._memory = WorkerMemory.allocate(caches, groups, settings)
            undo.callback(self._memory.unpin)
            self._fabric = make_fabric(f"{engine_id}/{place}/{uuid.uuid4().hex[:12]}")
            undo.callback(self._fabric.close)
            self._memory.register(self._fabric)
            self.description = self._describe(place)
            # Boot and key do not matter to the planner.
            engine = EngineDescription(
                engine_id=engine_id,
                boot="0" * 32,
                mac_key=bytes(MAC_KEY_BYTES),
                facts=facts,
                topology=topology,
                groups=groups,
                workers=(self._as_consumer(),),
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
            self._device = caches.device
            self._thread = TransferThread(
                self._fabric,
                self._memory,
                groups,
                index,
                self._first_contact.begin,
                settings,
            )
            undo.pop_all()
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
        consumers = list(workers)
        consumers[self._index] = self._as_consumer()
        self._first_contact.set_workers(consumers, self._index, workers)

    def start(self) -> None:
        """Take notifications from now on, also before the first orders. Call it when the engine has captured its graphs
        (the thread uses the device), before peers learn of this worker. Idempotent."""
        # Not only with the first orders: an idle worker took no notifications, and NIXL keeps them, of any size and
        # from any agent. 79,540 of 60 kB were 4.5 GB.
        self._thread.start()

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
            with self._thread.results as results:
                results.counts["lost_orders"] += 1
            return
        self._watchdog.ordered(decoded.loads)
        self._watchdog.cancelled(decoded.cancels)
        # Here, not on the transfer thread, which may be stuck in a call.
        if decoded.fails:
            with self._thread.results as results:
                results.failed.update(
                    dict.fromkeys(decoded.fails, FailureReason.PREFILL)
                )
        # The mark is made before this step's work is launched: only what was launched earlier may still write into the
        # blocks of its loads.
        self._thread.submit(decoded, frame, self._device.mark())
        self._step_marks = decoded.marks

    def end_step(self) -> None:
        """All of the step's work on the device has been launched, on this thread. What it computes becomes readable
        when the device has finished."""
        if self._step_marks:
            self._step_marks = False
            self._thread.complete(self._device.mark())

    def fail_step(self) -> None:
        """The step has raised: nothing that it was to compute, or that steps before it have begun, may be read."""
        self._step_marks = False
        ended = self._memory.table.distrust()
        if not ended:
            return
        logger.error(
            "a step has raised: %d leases end that consumers could not read yet",
            len(ended),
        )
        with self._thread.results as results:
            results.sent.update(
                request_id for request_id in ended if request_id is not None
            )

    def take_results(self, timeout_s: float = 0.0) -> StepResults:
        """Return the results since the last call.

        Args:
            timeout_s: while loads are under way, wait at most this long for one of them to end; 0 returns at once.
        """
        # Only while loads are under way: nothing else ends this wait.
        if timeout_s and self._watchdog:
            self._thread.results.wait_for_load(timeout_s)
        results = self._thread.results.take()
        self._watchdog.poll(results, self._thread.results.turned_s)
        return results

    def snapshot(self, timeout_s: float) -> ThreadSnapshot | None:
        """The state of the transfer thread between two of its turns, for tests and debugging; waits.

        Returns:
            None if the thread does not run.

        Raises:
            TimeoutError: it is stuck in a call.
        """
        if not self._thread.is_running:
            return None
        return self._thread.snapshot().result(timeout_s)

    def count_loads(self, *states: LoadState) -> int:
        """How many loads are in these states now."""
        return self._thread.runner.loads.count(*states)

    def close(self) -> None:
        """Stop the thread and give the memory back to the engine. Idempotent."""
        self._first_contact.close()
        # Memory that a stuck thread may still read into must not go back to the engine: it leaks.
        if not self._thread.close():
            logger.error(
                "the transfer thread is stuck in a call; what it uses is left alone"
            )
            return
        self._fabric.close()
        self._memory.unpin()

    def _describe(self, place: Place) -> WorkerDescription:
        """This worker's description as a producer."""
        exported = self._memory.exported
        return WorkerDescription(
            place=place,
            agent=self._fabric.agent_name,
            agent_metadata=self._fabric.metadata(),
            memory=exported.kind.value,
            device=exported.device_index,
            lease_table=self._memory.table.address,
            tensors=exported.tensors,
            stream_rows=self._memory.rows.address,
            shared=self._memory.shared,
        )

    def _as_consumer(self) -> WorkerDescription:
        """This worker's description as a consumer: with the addresses of the caches themselves, not of the copy."""
        return msgspec.structs.replace(
            self.description, tensors=self._memory.caches.tensors
        )
