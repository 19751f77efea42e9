"""The consumer of `bench.transfer`: loads through a `FerryWorker`, from the order to the result and the `done`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from bench.transfer_engines import HOST, Bench, Lease, ProducerAddress, make_worker
from bench.transfer_shapes import Scenario
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.orders import LoadOrder, StepOrders, encode_head, encode_orders
from kvferry.protocol.params import RemotePrefill, Ticket, sign_params
from kvferry.worker import worker as worker_module
from kvferry.worker.fabric.port import PeerAgent
from kvferry.worker.loads.results import LoadRecord, ResultBox
from kvferry.worker.peers.peer import Peer
from tests.harness.inside import thread_of

_LOAD_S = 60.0


class _SignallingBox(ResultBox):
    """Wakes the benchmark when all results are in and every producer worker has been notified."""

    def __init__(self) -> None:
        super().__init__()
        self._unreported = self._unnotified = 0
        self.result_ns = 0
        self.over_ns = 0
        self._over = threading.Lock()
        self._over.acquire()

    def expect(self, loads: int, notifications: int) -> None:
        self._unreported, self._unnotified = loads, notifications

    def wait(self, timeout_s: float) -> bool:
        """Until they are. A bare lock: whatever else a waiting thread did, the transfer thread would wait for."""
        return self._over.acquire(timeout=timeout_s)

    def notified(self) -> None:
        """A producer worker was notified."""
        self._unnotified -= 1
        self._signal()

    def __exit__(self, *exc: object) -> None:
        over, failed = len(self._results.loaded), len(self._results.failed)
        super().__exit__(*exc)
        if self._unreported and over + failed >= self._unreported:
            self.result_ns = time.perf_counter_ns()
            self._unreported = 0
            self._unnotified = 0 if failed else self._unnotified
            self._signal()

    def _signal(self) -> None:
        if self._unreported == 0 and self._unnotified <= 0 and self._over.locked():
            self.over_ns = time.perf_counter_ns()
            self._over.release()


class Loads:
    """One consumer engine of one worker, whose loads are measured from the order to the result and the `done`.

    Attributes:
        records: of the last loads.
        result_s: how long they took to their results, which the engine waits for; the `done` comes after them.
    """

    def __init__(
        self, scenario: Scenario, memory: torch.Tensor, address: ProducerAddress
    ) -> None:
        self.scenario = scenario
        self._from = address
        self._boot = new_boot_id()
        self._number = 0
        self.records: Sequence[LoadRecord] = ()
        self.result_s = 0.0
        with mock.patch.object(worker_module, "ResultBox", _SignallingBox):
            self.worker = make_worker(
                "consumer", scenario, scenario.consumer, 0, memory
            )
        self.worker.add_siblings((self.worker.description,))
        self._box: Any = thread_of(self.worker).results
        fabric = thread_of(self.worker).reader.fabric
        notify = fabric.notify

        def noted(peer: PeerAgent, message: bytes) -> None:
            notify(peer, message)
            self._box.notified()

        fabric.notify = noted  # type: ignore[method-assign]

    @property
    def peer(self) -> Peer:
        """The producer, once connected."""
        registry = thread_of(self.worker).registry
        return next(registry.peers())

    def order(self, lease: Lease, request_bytes: int, share: int = 0) -> LoadOrder:
        """The order to load a request of so many bytes under a lease."""
        scenario, source = self.scenario, self._from
        tokens = scenario.tokens(request_bytes)
        params = RemotePrefill(
            remote_engine_id=source.engine_id,
            remote_request_id=lease.request_id,
            remote_block_ids=(
                scenario.request_blocks(scenario.producer, request_bytes, 1, share),
            ),
            remote_host=HOST,
            remote_port=source.port,
            tp_size=scenario.producer.tp,
            remote_num_tokens=tokens,
            kvferry=Ticket(
                version=1,
                boot=source.boot,
                lease_slot=lease.slot,
                lease_epoch=lease.epoch,
                lease_s=600.0,
                digests=("0" * 32,),
                mac="0" * 64,
            ),
        )
        self._number += 1
        return LoadOrder(
            request_id=f"decode-{self._number}",
            source=sign_params(params, source.mac_key),
            local_blocks=(
                scenario.request_blocks(scenario.consumer, request_bytes, 2, share),
            ),
            first_token=0,
            stop_token=tokens,
        )

    def load(self, orders: Sequence[LoadOrder]) -> float:
        """Carry them out, all at once; returns seconds to the last `done`.

        Raises:
            RuntimeError: one of them failed, or they are not over in time.
        """
        step = StepOrders(boot=self._boot, loads=tuple(orders))
        head, frame = encode_head(step), encode_orders(step)
        registry = thread_of(self.worker).registry
        routes = (
            len(self.peer.routes)
            if any(registry.peers())
            else self.scenario.producer.tp
        )
        self._box.expect(len(orders), len(orders) * routes)
        begun_ns = time.perf_counter_ns()
        self.worker.carry_out(head, frame)
        in_time = self._box.wait(_LOAD_S)
        results = self.worker.take_results()
        if not in_time or results.failed or len(results.loaded) != len(orders):
            raise RuntimeError(f"loads failed: {results.failed or 'late'}")
        self.records = [load for load in results.load_records if load.reason is None]
        self.result_s = (self._box.result_ns - begun_ns) / 1e9
        seconds: float = (self._box.over_ns - begun_ns) / 1e9
        return seconds

    def close(self) -> None:
        self.worker.close()


@contextmanager
def connected(bench: Bench, scenario: Scenario, first_bytes: int) -> Iterator[Loads]:
    """A consumer of a new producer that has loaded `first_bytes` once."""
    loads = Loads(scenario, bench.target, bench.produce(scenario))
    try:
        loads.load([loads.order(bench.leases(1)[0], first_bytes)])
        yield loads
    finally:
        loads.close()
