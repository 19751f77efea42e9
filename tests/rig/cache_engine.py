"""Engines without a model, with any caches: all of kvferry is real, only vLLM is missing.

One engine has one scheduler (both ledgers, a listener and a renewer on loopback) and a `FerryWorker` with an agent of
its own for every rank. The test runs the step loop of both engines.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from kvferry.protocol.ids import epoch_to_text, new_boot_id
from kvferry.protocol.orders import FailureReason, encode_head, encode_orders
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.params_mac import new_mac_key, sign_params
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters
from kvferry.scheduler.step import next_orders, receive_messages
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.loads.record import LoadRecord
from kvferry.worker.memory.caches import KvCaches
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker
from tests.geometry.pairs import FACTS
from tests.geometry.requests import Request
from tests.worker.engine import free_port
from tests.worker.until_idle import wait_until_idle

HOST = "127.0.0.1"
LEASE_S = 120.0
SETTINGS = WorkerSettings(
    lease_slots=8, handshake_timeout_s=60.0, load_timeout_s=120.0, max_loads=8, staging_pool_bytes=1 << 16
)


class CacheEngine:
    """One engine. Its methods are called on one thread.

    Attributes:
        sent, loaded: per request, how many workers have reported it.
        failed: per request the reason of the first worker that failed.
        totals: records of every worker's good loads.
        counts: the workers' other counters.
    """

    def __init__(
        self,
        name: str,
        groups: tuple[CacheGroup, ...],
        topology: Topology,
        caches: Sequence[tuple[Place, KvCaches]],
        make_fabric: Callable[[str], Fabric],
        settings: WorkerSettings,
    ) -> None:
        """One worker for each of the `caches`."""
        self.name, self.groups, self.topology = name, groups, topology
        self.boot, self.port = new_boot_id(), free_port()
        self.sent: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()
        self.failed: dict[str, FailureReason] = {}
        self.totals: list[LoadRecord] = []
        self.counts: Counter[str] = Counter()
        self.counters = Counters()
        self.leases = ProducerLedger(settings.lease_slots, LEASE_S, self.counters)
        self.loads = ConsumerLedger(self.counters)
        self._mac_key = new_mac_key()
        self.workers = [
            FerryWorker(
                engine_id=name,
                place=place,
                index=index,
                topology=topology,
                facts=FACTS,
                groups=groups,
                caches=kv,
                settings=settings,
                make_fabric=make_fabric,
            )
            for index, (place, kv) in enumerate(caches)
        ]
        self.description = EngineDescription(
            engine_id=name,
            boot=self.boot,
            mac_key=self._mac_key,
            facts=FACTS,
            topology=topology,
            groups=groups,
            workers=tuple(worker.description for worker in self.workers),
        )
        for worker in self.workers:
            worker.add_siblings(self.description.workers)
        self.listener = SideChannelListener(HOST, self.port, self.counters)
        self.listener.publish(self.description)
        self.renewer = LeaseRenewer(self.counters)

    def lease(self, request_id: str, request: Request, compute: Callable[[], None]) -> RemotePrefill:
        """Compute a prompt under a lease, and hold its blocks. Returns the signed params."""
        assert self.leases.open(request_id)
        self.step()
        compute()
        lease = self.leases.finish(request_id)
        assert lease is not None
        ticket = Ticket(
            version=1,
            boot=self.boot,
            lease_slot=lease.slot,
            lease_epoch=epoch_to_text(lease.epoch),
            lease_s=LEASE_S,
            digests=("0" * 32,),
            mac="0" * 64,
        )
        sizes = self.topology
        params = RemotePrefill(
            remote_engine_id=self.name,
            remote_request_id=request_id,
            remote_block_ids=request.remote,
            remote_host=HOST,
            remote_port=self.port,
            tp_size=sizes.tp,
            pp_size=sizes.pp,
            dcp_size=sizes.dcp,
            remote_num_tokens=request.num_tokens,
            kvferry=ticket,
        )
        self.step()
        return sign_params(params, self._mac_key)

    def load(self, request_id: str, request: Request, params: RemotePrefill) -> None:
        """Order the load on all workers."""
        assert self.loads.offer(request_id, params, request.stop_token, 0.0) is None
        count = self.loads.matched_tokens(request_id, request.first_token)
        self.loads.allocated(request_id, count, request.local)
        self.step()

    def is_over(self, request_id: str) -> bool:
        """Whether every worker has reported the load."""
        reported = self.loaded[request_id] + (len(self.workers) if request_id in self.failed else 0)
        return reported >= len(self.workers)

    def is_free(self, request_id: str) -> bool:
        """Whether every worker has reported that the request's blocks are no longer read."""
        return self.sent[request_id] >= len(self.workers)

    def step(self) -> None:
        """One step: pass the scheduler's orders to all workers and their results back."""
        receive_messages(self.listener, self.leases, self.boot, self.counters)
        orders = next_orders(self.leases, self.loads, self.boot, time.monotonic())
        if orders:
            head, frame = encode_head(orders), encode_orders(orders)
            for worker in self.workers:
                worker.carry_out(head, frame)
        for worker in self.workers:
            self._collect(worker)
        self.renewer.submit(self.loads.take_commands())

    def close(self) -> None:
        self.listener.close()
        self.renewer.close()
        try:
            for worker in self.workers:
                wait_until_idle(worker)
        finally:
            for worker in self.workers:
                worker.close()

    def _collect(self, worker: FerryWorker) -> None:
        results = worker.take_results()
        self.totals += results.good_loads
        self.counts.update(results.counts)
        for request_id in results.sent:
            self.sent[request_id] += 1
            if self.sent[request_id] == len(self.workers):
                self.leases.sent(request_id)
        for request_id in results.loaded:
            self.loaded[request_id] += 1
            if self.loaded[request_id] == len(self.workers):
                self.loads.loaded(request_id)
        for request_id, reason in results.failed.items():
            if request_id not in self.failed:
                self.failed[request_id] = reason
                self.loads.failed(request_id)
