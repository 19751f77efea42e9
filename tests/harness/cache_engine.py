"""An engine without a model: all of kvferry is real, only vLLM and what it computes are missing.

It is a `StandaloneEngine` on loopback whose fabrics can fail and whose reports are kept. The test runs its step loop.
`tests.harness.engine` and others add what fills the caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.connector.standalone import Ended, StandaloneEngine
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import CacheGroup, ModelFacts
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.consumer.ledger import MAX_ENDED_LEASES
from kvferry.scheduler.requests import ProducerLease
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.loads.results import StepResults
from kvferry.worker.loads.state import LoadState
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker, MakeFabric
from tests.harness.fault_fabric import FaultFabric
from tests.harness.inside import first_contact_of, thread_of
from tests.harness.integrity import check_worker
from tests.harness.seen import Seen
from tests.ports import free_port

HOST = "127.0.0.1"
LEASE_S = 30.0
FACTS = ModelFacts(
    model="toy",
    fingerprint="weights:1",
    dtype="uint8",
    cache_dtype="auto",
    quantization="none",
    max_model_tokens=4096,
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


class CacheEngine(StandaloneEngine):
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
        self.name, self.lease_s, self.shards, self.seen = name, lease_s, shards, Seen()
        # Only then do the orders name the blocks.
        self.copies_blocks = settings.host_buffer and settings.is_read_from
        self.launched: list[Callable[[], None]] = []
        self.launch: Callable[[Callable[[], None]], None] = lambda work: work()
        self.fabrics: list[FaultFabric] = []

        def with_faults(agent_name: str) -> Fabric:
            made = make_fabric(agent_name)
            self.fabrics.append(
                made if isinstance(made, FaultFabric) else FaultFabric(made)
            )
            return self.fabrics[-1]

        super().__init__(
            name,
            shards,
            groups,
            facts,
            port=free_port() if port is None else port,
            topology=topology,
            settings=settings,
            lease_s=lease_s,
            make_fabric=with_faults,
            max_ended=MAX_ENDED_LEASES if remembers else 0,
        )
        self.mac_key = self.description.mac_key

    def finish(
        self, request_id: str, blocks: tuple[tuple[int, ...], ...], tokens: int
    ) -> RemotePrefill | None:
        """A prefill has finished; its workers learn of the hold with the next step. None when it has no lease."""
        lease = self.leases.finish(request_id, blocks if self.copies_blocks else ())
        return None if lease is None else self.signed(lease, blocks, tokens)

    def signed(
        self,
        lease: ProducerLease,
        blocks: tuple[tuple[int, ...], ...],
        tokens: int,
        row: int | None = None,
    ) -> RemotePrefill:
        """The signed params of a prompt, with any digests: there are no token ids."""
        return self.params_of(
            lease,
            blocks,
            tokens,
            tuple(f"{index:032x}" for index in range(-(-tokens // 256))),
            row,
        )

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

    def step(self, compute: Callable[[], object] = lambda: None) -> Ended:
        """As every engine's; it also computes what is `launched`."""
        launched, self.launched = self.launched, []
        return super().step(lambda: [self.launch(write) for write in launched])

    def on_sent(self, request_id: str) -> None:
        """No worker's blocks of the request are read any more."""

    def collect(self) -> list[StepResults]:
        """Take the workers' results into `seen` too."""
        by_worker = super().collect()
        for index, results in enumerate(by_worker):
            for request_id in self.seen.add(index, len(self.workers), results).sent:
                self.on_sent(request_id)
        return by_worker

    def set_timeouts(
        self,
        *,
        load_s: float = SETTINGS.load_timeout_s,
        handshake_s: float = SETTINGS.handshake_timeout_s,
    ) -> None:
        """Change the deadlines of workers that have begun; so no test depends on how fast a good load is."""
        for worker in self.workers:
            contact, thread = first_contact_of(worker), thread_of(worker)
            contact.settings = replace(
                contact.settings, handshake_timeout_s=handshake_s
            )
            thread.runner.timeout_s, thread.registry.first_reads.timeout_s = (
                load_s,
                handshake_s,
            )

    def loads_in(self, *states: LoadState) -> int:
        """How many loads of its workers are in these states now."""
        return sum(worker.count_loads(*states) for worker in self.workers)

    def parked_loads(self) -> int:
        """How many loads wait for their producer, or, since it has answered, for a place."""
        return self.loads_in(LoadState.PARKED, LoadState.RESUMED)

    def wait_until_idle(self) -> None:
        """Lift the faults and let every load end, well or badly; check that nothing is left.

        Raises:
            LocalProtocolError: something is left; with the sums.
        """
        for fabric in self.fabrics:
            fabric.mend()
        self.set_timeouts(load_s=0.0)
        for worker in self.workers:
            wait_until_idle(worker)

    def close(self) -> None:
        """Close the engine and check that its sums are right."""
        try:
            for worker in self.workers:
                check_worker(worker)
        finally:
            super().close()


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
