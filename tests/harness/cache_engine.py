"""An engine without a model: all of kvferry is real, only vLLM and what it computes are missing.

One engine has the scheduler's half (both ledgers, a listener and a renewer on loopback) and a `FerryWorker` with an
agent of its own for every shard of its caches. The test runs its step loop. The parts of an engine are put together
here only; `tests.harness.engine` and others add what fills the caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, ModelFacts
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.orders import StepOrders, encode_head, encode_orders
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.params_mac import new_mac_key, sign_params
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import MAX_ENDED_LEASES
from kvferry.scheduler.producer.lease import Lease
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state import Counters
from kvferry.scheduler.step import next_orders, receive_messages
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.loads.results import StepResults
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker, MakeFabric
from scripts.accuracy.devices import free_ports
from tests.harness.fault_fabric import FaultFabric
from tests.harness.integrity import check_worker
from tests.harness.seen import Seen

HOST = "127.0.0.1"
LEASE_S = 30.0
FACTS = ModelFacts(
    model="toy", fingerprint="weights:1", dtype="uint8", cache_dtype="auto", quantization="none", max_model_tokens=4096
)
SETTINGS = WorkerSettings(
    lease_slots=16,
    handshake_timeout_s=60.0,  # virtual machines have been seen to stand still for five seconds
    load_timeout_s=60.0,
    max_loads=64,
    staging_pool_bytes=1 << 20,
    failed_read_grace_s=0.1,
)
IDLE_WITHIN_S = 90.0
"""Longer than a handshake takes at most to fail, with the 30 or 60 s of `handshake_timeout_s` in these tests: a load
whose producer has closed before it answered waits for that."""


class CacheEngine:
    """One engine. Its methods are called on one thread.

    Args:
        shards: per worker its place and its caches.
        remembers: whether the consumer's ledger knows leases that are over; if not, a replay comes to the workers and
            to the fence.

    Attributes:
        fabrics: of the workers, in their order.
        launched: what the next step computes, after its orders and before its end.
        launch: carries out a part of a step's work on the device.
    """

    def __init__(
        self,
        name: str,
        make_fabric: MakeFabric,
        shards: Sequence[tuple[Place, KvCaches]],
        groups: tuple[CacheGroup, ...],
        topology: Topology,
        *,
        settings: WorkerSettings = SETTINGS,
        facts: ModelFacts = FACTS,
        lease_s: float = LEASE_S,
        port: int | None = None,
        remembers: bool = True,
    ) -> None:
        self.name, self.lease_s, self.port = name, lease_s, free_port() if port is None else port
        self.shards, self.mac_key = shards, new_mac_key()
        self.seen, self.counters = Seen(), Counters()
        self.launched: list[Callable[[], None]] = []
        self.launch: Callable[[Callable[[], None]], None] = lambda work: work()
        self.leases = ProducerLedger(settings.lease_slots, lease_s, self.counters)
        self.loads = ConsumerLedger(self.counters, max_ended=MAX_ENDED_LEASES if remembers else 0)
        self.fabrics: list[FaultFabric] = []

        def with_faults(agent_name: str) -> Fabric:
            made = make_fabric(agent_name)
            self.fabrics.append(made if isinstance(made, FaultFabric) else FaultFabric(made))
            return self.fabrics[-1]

        self.workers = [
            FerryWorker(
                engine_id=name,
                place=place,
                index=index,
                topology=topology,
                facts=facts,
                groups=groups,
                caches=caches,
                settings=settings,
                make_fabric=with_faults,
            )
            for index, (place, caches) in enumerate(shards)
        ]
        self.description = EngineDescription(
            engine_id=name,
            boot=new_boot_id(),
            mac_key=self.mac_key,
            facts=facts,
            topology=topology,
            groups=groups,
            workers=tuple(worker.description for worker in self.workers),
        )
        for worker in self.workers:
            worker.add_siblings(self.description.workers)
        self.listener = SideChannelListener(HOST, self.port, self.counters, settings.secrets)
        self.listener.publish(self.description)
        self.renewer = LeaseRenewer(self.counters, settings.secrets)

    @property
    def boot(self) -> str:
        return self.description.boot

    def finish(self, request_id: str, blocks: tuple[tuple[int, ...], ...], tokens: int) -> RemotePrefill | None:
        """A prefill has finished; its workers learn of the hold with the next step. None when it has no lease."""
        mirrored = any(worker._memory.mirror is not None for worker in self.workers)
        lease = self.leases.finish(request_id, blocks if mirrored else ())
        return None if lease is None else self.params_of(lease, blocks, tokens)

    def params_of(
        self, lease: Lease, blocks: tuple[tuple[int, ...], ...], tokens: int, row: int | None = None
    ) -> RemotePrefill:
        """The signed params of a prompt.

        Args:
            row: where its blocks are listed, in place of `blocks`, while it is computed.
        """
        ticket = Ticket(
            version=1,
            boot=self.boot,
            lease_slot=lease.slot,
            lease_epoch=lease.origin.epoch,
            lease_s=self.lease_s,
            digests=tuple(f"{index:032x}" for index in range(-(-tokens // 256))),
            mac="0" * 64,
            stream_row=row,
        )
        sizes = self.description.topology
        params = RemotePrefill(
            remote_engine_id=self.name,
            remote_request_id=lease.request_id,
            remote_block_ids=blocks,
            remote_host=HOST,
            remote_port=self.port,
            tp_size=sizes.tp,
            pp_size=sizes.pp,
            dcp_size=sizes.dcp,
            remote_num_tokens=tokens,
            kvferry=ticket,
        )
        return sign_params(params, self.mac_key)

    def order_load(
        self,
        request_id: str,
        params: RemotePrefill,
        first_token: int,
        stop_token: int,
        allocate: Callable[[int], tuple[tuple[int, ...], ...]],
    ) -> int:
        """Order a load of tokens [first, stop) at most; the workers learn of it with the next step.

        Args:
            allocate: per cache group the blocks of so many loaded tokens and those before them.

        Returns: the tokens that are loaded.
        """
        assert self.loads.offer(request_id, params, stop_token, 0.0) is None
        count = self.loads.matched_tokens(request_id, first_token)
        self.loads.allocated(request_id, count, allocate(count))
        return count

    def step(self) -> None:
        """One step of the engine: pass the scheduler's orders to the workers, compute, and pass their results back."""
        receive_messages(self.listener.inbox, self.leases, self.boot, self.counters)
        self.order(next_orders(self.leases, self.loads, self.boot, time.monotonic()))
        launched, self.launched = self.launched, []
        for write in launched:
            self.launch(write)
        for worker in self.workers:
            worker.end_step()
        self.collect()
        self.renewer.submit(self.loads.take_commands())

    def order(self, orders: StepOrders) -> None:
        """Hand orders to the workers in their encoded form."""
        if orders:
            head, frame = encode_head(orders), encode_orders(orders)
            for worker in self.workers:
                worker.carry_out(head, frame)

    def on_sent(self, request_id: str) -> None:
        """No worker's blocks of the request are read any more."""

    def collect(self) -> list[StepResults]:
        """Take the workers' results into `seen` and the ledgers, as vLLM's aggregator and the scheduler's side do."""
        by_worker = [worker.take_results() for worker in self.workers]
        for index, results in enumerate(by_worker):
            over = self.seen.add(index, len(self.workers), results)
            for request_id in over.sent:
                self.leases.sent(request_id)
                self.on_sent(request_id)
            for request_id in over.loaded:
                self.loads.loaded(request_id)
            for request_id in over.failed:
                self.loads.failed(request_id)
        return by_worker

    def set_timeouts(
        self, *, load_s: float = SETTINGS.load_timeout_s, handshake_s: float = SETTINGS.handshake_timeout_s
    ) -> None:
        """Change the deadlines of workers that have begun; so no test depends on how fast a good load is."""
        for worker in self.workers:
            contact, thread = worker._first_contact, worker._thread
            contact._settings = replace(contact._settings, handshake_timeout_s=handshake_s)
            thread.runner.timeout_s, thread.registry.first_reads.timeout_s = load_s, handshake_s

    def wait_until_idle(self) -> None:
        """Lift the faults and let every load end, well or badly; check that nothing is left.

        Raises:
            LocalProtocolError: something is left; with the sums.
        """
        for fabric in self.fabrics:
            fabric.mend()
        self.set_timeouts(load_s=0.0)
        for worker in self.workers:
            if worker._thread._thread.is_alive():
                wait_until_idle(worker)

    def close(self) -> None:
        """Close the engine and check that its sums are right."""
        try:
            for worker in self.workers:
                check_worker(worker)
        finally:
            self.listener.close()
            self.renewer.close()
            for worker in self.workers:
                worker.close()


def wait_until_idle(worker: FerryWorker) -> None:
    """Wait until nothing is under way and nothing is left; a worker's last reads may still have to end.

    Raises:
        LocalProtocolError: with the sums.
    """
    end_s = time.monotonic() + IDLE_WITHIN_S
    while time.monotonic() < end_s:
        with contextlib.suppress(LocalProtocolError):
            check_worker(worker, idle=True)
            return
        time.sleep(0.005)
    check_worker(worker, idle=True)


def free_port() -> int:
    """A port without a listener, which the kernel gives to no outgoing connection meanwhile."""
    return free_ports(1)[0]
