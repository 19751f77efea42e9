"""The consumer of `bench.transfer`: loads through a `FerryWorker`, from the order to the result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from bench.transfer_engine import HOST, Lease, ProducerAddress, make_worker
from bench.transfer_memory import Memory
from bench.transfer_shapes import Scenario
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.orders import LoadOrder, StepOrders, encode_head, encode_orders
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.params_mac import sign_params
from kvferry.worker import transfer_thread
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric, PeerAgent
from kvferry.worker.loads.record import LoadRecord
from kvferry.worker.loads.results import ResultBox
from kvferry.worker.peers.peer import Peer
from kvferry.worker.worker import MakeFabric

_LOAD_S = 60.0
Stamp = tuple[str, int, int]
"""A call of the fabric: its name, when it began and when it returned, ns."""


class StampedBox(ResultBox):
    """Notes when results are put in, on the thread that does it, and wakes who waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted = self._unreported = 0
        self.reported_ns = self.notified_ns = 0
        self._over = threading.Lock()
        self._over.acquire()

    def expect(self, loads: int, notifications: int) -> None:
        """Expect so many reports of loads, and so many notifications of producer workers."""
        self._wanted, self._unreported = loads, notifications

    def wait(self, timeout_s: float) -> bool:
        """Until they are. A bare lock: whatever else a waiting thread did, the transfer thread would wait for."""
        return self._over.acquire(timeout=timeout_s)

    def reported(self) -> None:
        """A producer worker was notified."""
        self.notified_ns = time.perf_counter_ns()
        self._unreported -= 1
        self._poll()

    def __exit__(self, *exc: object) -> None:
        over, failed = len(self._results.loaded), len(self._results.failed)
        super().__exit__(*exc)
        if self._wanted and over + failed >= self._wanted:
            self.reported_ns, self._wanted = time.perf_counter_ns(), 0
            self._unreported = 0 if failed else self._unreported
            self._poll()

    def _poll(self) -> None:
        if self._wanted == 0 and self._unreported <= 0 and self._over.locked():
            self._over.release()


@dataclass(frozen=True)
class Loaded:
    """Times of a batch of loads.

    Attributes:
        seconds: from the call that brings the order to the last result and the last notification of a producer worker.
        result_s: until the last result is there.
        stamps: calls of the fabric, where they were asked for; and the two ends.
    """

    seconds: float
    result_s: float
    records: tuple[LoadRecord, ...]
    stamps: tuple[Stamp, ...] = ()


class Loads:
    """One consumer engine of one worker."""

    def __init__(
        self, scenario: Scenario, memory: Memory, address: ProducerAddress, make_fabric: MakeFabric = NixlFabric
    ) -> None:
        self.scenario = scenario
        self._from = address
        self._boot = new_boot_id()
        self._number = 0
        self.worker = make_worker("consumer", scenario, scenario.consumer, 0, memory, make_fabric)
        self.worker.add_siblings((self.worker.description,))
        with mock.patch.object(transfer_thread, "ResultBox", StampedBox):
            self._box()
        fabric = self.worker._fabric
        notify = fabric.notify

        def noted(peer: PeerAgent, message: bytes) -> None:
            notify(peer, message)
            self._box().reported()

        fabric.notify = noted  # type: ignore[method-assign]

    @property
    def peer(self) -> Peer:
        """The producer, once connected."""
        registry = self.worker._registry
        if registry is None:
            raise RuntimeError("nothing has been loaded yet")
        return next(registry.peers())

    def order(self, lease: Lease, request_bytes: int, share: int = 0) -> LoadOrder:
        """The order to load a request of so many bytes under a lease."""
        scenario, source = self.scenario, self._from
        ticket = Ticket(
            version=1,
            boot=source.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.epoch,
            lease_s=600.0,
            digests=("0" * 32,),
            mac="0" * 64,
        )
        tokens = scenario.tokens(request_bytes)
        params = RemotePrefill(
            remote_engine_id=source.engine_id,
            remote_request_id=lease.request_id,
            remote_block_ids=(scenario.request_blocks(scenario.producer, request_bytes, 1, share),),
            remote_host=HOST,
            remote_port=source.port,
            tp_size=scenario.producer.tp,
            remote_num_tokens=tokens,
            kvferry=ticket,
        )
        self._number += 1
        return LoadOrder(
            request_id=f"decode-{self._number}",
            source=sign_params(params, source.mac_key),
            local_blocks=(scenario.request_blocks(scenario.consumer, request_bytes, 2, share),),
            first_token=0,
            stop_token=tokens,
        )

    def load(self, orders: Sequence[LoadOrder], *, stamped: bool = False) -> Loaded:
        """Carry them out, all at once.

        Raises:
            RuntimeError: one of them failed, or they are not over in time.
        """
        step = StepOrders(boot=self._boot, loads=tuple(orders))
        head, frame = encode_head(step), encode_orders(step)
        box = self._box()
        registry = self.worker._registry
        routes = len(self.peer.routes) if registry is not None and any(registry.peers()) else self.scenario.producer.tp
        box.expect(len(orders), len(orders) * routes)
        stamps: list[Stamp] = []
        undo = _stamp(self.worker._fabric, stamps) if stamped else None
        begun_ns = time.perf_counter_ns()
        self.worker.carry_out(head, frame)
        in_time = box.wait(_LOAD_S)
        if undo is not None:
            undo()
        results = self.worker.take_results()
        if not in_time or results.failed or len(results.loaded) != len(orders):
            raise RuntimeError(f"loads failed: {results.failed or 'late'}")
        ends = (("order", begun_ns, begun_ns), *stamps, ("report", box.reported_ns, box.reported_ns))
        return Loaded(
            seconds=(max(box.reported_ns, box.notified_ns) - begun_ns) / 1e9,
            result_s=(box.reported_ns - begun_ns) / 1e9,
            records=tuple(results.good_loads),
            stamps=ends if stamped else (),
        )

    def cpu_s(self) -> float:
        """CPU time of the transfer thread so far."""
        ident = self.worker._started(self._boot)._thread.ident
        if ident is None:
            raise RuntimeError("the transfer thread has not started")
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    def _box(self) -> StampedBox:
        box = self.worker._started(self._boot).results
        if not isinstance(box, StampedBox):
            raise TypeError("the worker's results are not stamped")
        return box

    def close(self) -> None:
        self.worker.close()


def _stamp(fabric: Fabric, stamps: list[Stamp]) -> Callable[[], None]:
    """Note the calls of a fabric from now on. Returns what ends that."""
    names = ("post_read", "poll", "release", "notify", "telemetry")

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            begun_ns = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                stamps.append((name, begun_ns, time.perf_counter_ns()))

        return noted

    former = {name: getattr(fabric, name) for name in names}
    for name, call in former.items():
        setattr(fabric, name, noting(name, call))

    def undo() -> None:
        for name, call in former.items():
            setattr(fabric, name, call)

    return undo
