"""An engine without vLLM: the scheduler's half of kvferry and the engine's workers in one process.

    producer                                          consumer
    leases.open("a"); step(compute)
    params = offer("a", blocks, prompt); step()   →   start_load("b", params, prompt, blocks)
                                                      while "b" not in step().loaded: …
    step() until "a" is in its `sent`

`step` is called again and again, on the thread that launches the device's work. The caller allocates the blocks:

- those of an offered prompt must not change until `sent` names it;
- those of a load that has failed must not be used while `writing` names it;
- block 0 is no block: on both ends it stands for one that a window has left behind.

Caches that lie in files of `kvferry.worker.peer_memory.shared_file` are mapped by consumers of the same host.

Prompts that are read while they are computed, turns and evictions are left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.peer_link import PeerLinks
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.server import SideChannelListener
from kvferry.plan.blocks import NULL_BLOCK, first_needed
from kvferry.protocol.digests import Prompt, digest_chain, shared_tokens
from kvferry.protocol.errors import InvalidBlocks
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import (
    CacheGroup,
    EngineDescription,
    LeaseName,
    ModelFacts,
)
from kvferry.protocol.hosts import check_announced
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.orders import (
    FailureReason,
    StepOrders,
    encode_head,
    encode_orders,
)
from kvferry.protocol.params import (
    NO_MAC,
    PARAMS_VERSION,
    Blocks,
    RemotePrefill,
    Ticket,
    new_mac_key,
    read_params,
    request_name,
    sign_params,
)
from kvferry.protocol.visible import escape_logs
from kvferry.scheduler.consumer.ledger import MAX_ENDED_LEASES, ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseState, ProducerLease
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.loads.results import StepResults
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker, MakeFabric


@dataclass(slots=True)
class Ended:
    """Requests of which all workers have reported the end.

    Attributes:
        sent: their blocks are free.
        loaded: their blocks are complete.
        failed: their blocks must not be used; with the first reason.
    """

    sent: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: dict[str, FailureReason] = field(default_factory=dict)


class StandaloneEngine:
    """One engine, until `close`. Its methods are called on one thread.

    Args:
        engine_id: unique among all engines.
        shards: per worker its place and its caches.
        groups, facts, topology: of the engine.
        host, port: where its side channel listens, as consumers reach it.
        lease_s: time after which offered blocks are free without a renewal.
        max_ended: see `ConsumerLedger`.

    Attributes:
        leases, loads: the ledgers.
        counters: what both ledgers and the side channel count.
        description: as consumers receive it.

    Raises:
        FabricError: NIXL cannot be used, or refuses the memory.
        InvalidConfig: the side channel's address cannot be bound, or is none of one certain host, or host memory
            cannot be allocated.
    """

    def __init__(
        self,
        engine_id: str,
        shards: Sequence[tuple[Place, KvCaches]],
        groups: tuple[CacheGroup, ...],
        facts: ModelFacts,
        *,
        port: int,
        host: str = "127.0.0.1",
        topology: Topology = Topology(),  # noqa: B008 - immutable
        settings: WorkerSettings = WorkerSettings(),  # noqa: B008
        lease_s: float = 30.0,
        make_fabric: MakeFabric = NixlFabric,
        max_ended: int = MAX_ENDED_LEASES,
    ) -> None:
        escape_logs()
        self.counters = Counters()
        check_announced(host, "host")
        self.leases = ProducerLedger(
            settings.lease_slots, lease_s, self.counters, workers=len(shards)
        )
        self.loads = ConsumerLedger(self.counters, max_ended=max_ended)
        self.host = host
        self.port = port
        self._copies_blocks = settings.host_buffer and settings.is_read_from
        self._ended = Ended()
        self._reports: dict[str, dict[int, FailureReason | None]] = {}
        self._writing: dict[int, frozenset[str]] = {}
        # Whatever raises on the way, threads and registered memory of the parts before it are given back.
        with contextlib.ExitStack() as undo:
            self.workers: list[FerryWorker] = []
            for index, (place, caches) in enumerate(shards):
                worker = FerryWorker(
                    engine_id=engine_id,
                    place=place,
                    index=index,
                    topology=topology,
                    facts=facts,
                    groups=groups,
                    caches=caches,
                    settings=settings,
                    make_fabric=make_fabric,
                )
                undo.callback(worker.close)
                self.workers.append(worker)
            self.description = EngineDescription(
                engine_id=engine_id,
                boot=new_boot_id(),
                mac_key=new_mac_key(),
                facts=facts,
                topology=topology,
                groups=groups,
                workers=tuple(worker.description for worker in self.workers),
            )
            for worker in self.workers:
                worker.add_siblings(self.description.workers)
            client = SideChannelClient(settings.secrets, settings.allowed_hosts)
            self.renewer = LeaseRenewer(PeerLinks(client, self.counters))
            undo.callback(self.renewer.close)
            self.listener = SideChannelListener(
                host,
                port,
                self.counters,
                settings.secrets,
                self.leases.clock,
                knows=self._knows,
            )
            undo.pop_all()
        # Last: from now on peers may ask.
        self.listener.publish(self.description)

    @property
    def boot(self) -> str:
        return self.description.boot

    @property
    def writing(self) -> frozenset[str]:
        """Failed loads whose blocks may still be written."""
        return frozenset().union(*self._writing.values())

    def offer(
        self, request_id: str, blocks: Blocks, prompt: Prompt
    ) -> dict[str, Any] | None:
        """The blocks of a prompt are computed: keep them. Peers may read them after the next step.

        Args:
            blocks: per cache group, in the order of the tokens.

        Returns:
            The params for the consumer, as plain objects; None if the request has no lease.

        Raises:
            InvalidBlocks: not those of this engine's cache groups, or block 0 is among those that are needed.
        """
        num_tokens = len(prompt.tokens)
        self._check_blocks(blocks, num_tokens, from_first=False)
        # Workers need the blocks only to copy them to host memory; peers name the blocks that they read.
        copied_blocks = blocks if self._copies_blocks else ()
        lease = self.leases.finish(request_id, copied_blocks)
        if lease is None:
            return None
        return self.params_of(lease, blocks, num_tokens, digest_chain(prompt)).to_json()

    def params_of(
        self,
        lease: ProducerLease,
        blocks: Blocks,
        num_tokens: int,
        digests: tuple[str, ...],
        row: int | None = None,
    ) -> RemotePrefill:
        """The signed params of a prompt.

        Args:
            row: where its blocks are listed, in place of `blocks`, while it is computed.
        """
        sizes = self.description.topology
        params = RemotePrefill(
            remote_engine_id=self.description.engine_id,
            remote_request_id=request_name(lease.request_id),
            remote_block_ids=blocks,
            remote_host=self.host,
            remote_port=self.port,
            tp_size=sizes.tp,
            pp_size=sizes.pp,
            dcp_size=sizes.dcp,
            remote_num_tokens=num_tokens,
            kvferry=Ticket(
                version=PARAMS_VERSION,
                boot=self.boot,
                lease_slot=lease.slot,
                lease_epoch=lease.origin.epoch,
                lease_s=self.leases.lease_s,
                digests=digests,
                mac=NO_MAC,
                stream_row=row,
            ),
        )
        return sign_params(params, self.description.mac_key)

    def start_load(
        self, request_id: str, params: object, prompt: Prompt, blocks: Blocks
    ) -> int:
        """Load the leading tokens that a prompt shares with an offered one, with the next step.

        Args:
            params: of the offered prompt, as a router sent them.
            blocks: per cache group those of this prompt, from its first token on.

        Returns:
            The number of tokens that are loaded; 0 if the prompt is to be computed here.

        Raises:
            InvalidParams: the params cannot be used.
            InvalidBlocks: see `offer`.
        """
        source = read_params(params)
        if not isinstance(source, RemotePrefill) or source.boot == self.boot:
            return 0
        shared = shared_tokens(prompt, source.kvferry.digests, source.remote_num_tokens)
        self._check_blocks(blocks, shared, from_first=True)
        if self.loads.offer(request_id, source, shared, time.monotonic()) is not None:
            self.loads.decline(source)
            return 0
        count = self.loads.matched_tokens(request_id, 0)
        self.loads.allocated(request_id, count, blocks)
        return count

    def step(self, compute: Callable[[], object] = lambda: None) -> Ended:
        """One step: orders go to the workers, `compute` launches the device's work, workers' results are applied.

        Returns:
            The requests that have ended since the last step.
        """
        self.leases.receive(self.listener.inbox.take(), self.boot)
        lease_orders = self.leases.take_orders(time.monotonic())
        self.order(StepOrders.join(self.boot, lease_orders, self.loads.take_orders()))
        try:
            compute()
        except BaseException:
            # What the step was to write is not there: its prompts must not become READY.
            for worker in self.workers:
                worker.fail_step()
            raise
        for worker in self.workers:
            worker.end_step()
        self.collect()
        self.renewer.submit(self.loads.take_commands())
        # vLLM's metrics take them, and here nobody would: they would grow. A program that wants them takes them before.
        self.counters.take_samples()
        ended = self._ended
        self._ended = Ended()
        return ended

    def order(self, orders: StepOrders) -> None:
        """Hand orders to the workers."""
        if not orders:
            return
        head = encode_head(orders)
        frame = encode_orders(orders)
        for worker in self.workers:
            worker.carry_out(head, frame)

    def collect(self) -> list[StepResults]:
        """Apply the workers' results since the last call to the ledgers, as `step` does.

        Returns:
            The results, by worker.
        """
        by_worker = [worker.take_results() for worker in self.workers]
        for index, results in enumerate(by_worker):
            self._apply(index, results)
        return by_worker

    def withdraw(self) -> None:
        """Withdraw the caches from peers: when it returns, their pages may go. Idempotent.

        Leases end, and loads that are under way fail; the steps that follow report them. Requests whose prompts are
        computed when it is called cannot be offered.

        Raises:
            WithdrawalRefused: reads may still write into the caches, after a time that `failed_read_grace_s` bounds.
                The engine goes on; leases and loads are over.
        """
        self.leases.release_all("reset")
        for lease in self.leases.leases(LeaseState.INTENDED, LeaseState.COMPUTING):
            self.leases.abandon(lease.request_id, "reset")
        self.loads.decline_offered("reset")
        self.listener.withdraw()
        try:
            for worker in self.workers:
                worker.drain()
        except BaseException:
            for worker in self.workers:
                worker.keep()
            self.listener.publish(self.description)
            raise
        for worker in self.workers:
            worker.deregister()

    def restore(self) -> None:
        """Register the caches again, whose pages are back at their addresses, with any content. Idempotent.

        Peers see another boot in the next params, and shake hands again.

        Raises:
            FabricError: NIXL refuses the memory; the caches stay withdrawn, and it can be called again.
        """
        for worker in self.workers:
            worker.restore()
        workers = tuple(worker.description for worker in self.workers)
        if workers == self.description.workers:
            return
        for worker in self.workers:
            worker.add_siblings(workers)
        self.description = msgspec.structs.replace(
            self.description,
            boot=new_boot_id(),
            mac_key=new_mac_key(),
            generation=self.description.generation + 1,
            workers=workers,
        )
        self.listener.publish(self.description)

    def close(self) -> None:
        """Stop all threads and give the caches back. Idempotent."""
        self.listener.close()
        self.renewer.close()
        for worker in self.workers:
            worker.close()

    def _apply(self, index: int, results: StepResults) -> None:
        """Apply one worker's results."""
        if results.still_written is not None:
            self._writing[index] = results.still_written
        self._ended.sent += self.leases.acknowledge(index, results.sent)
        for request_id in results.loaded:
            self._report(index, request_id, None)
        for request_id, reason in results.failed.items():
            self._report(index, request_id, reason)

    def _report(
        self, index: int, request_id: str, failure: FailureReason | None
    ) -> None:
        """One worker has reported a load. It is over when every worker has, and bad if it is on one of them."""
        failures = self._reports.setdefault(request_id, {})
        failures[index] = failure
        if len(failures) < len(self.workers):
            return
        del self._reports[request_id]
        reasons = [reason for reason in failures.values() if reason is not None]
        if reasons:
            self.loads.failed(request_id)
            self._ended.failed[request_id] = reasons[0]
        else:
            self.loads.loaded(request_id)
            self._ended.loaded.append(request_id)
        # Nothing is asked about it any more, and its params may be megabytes.
        self.loads.finished(request_id)

    def _check_blocks(
        self, blocks: Blocks, num_tokens: int, *, from_first: bool
    ) -> None:
        """Check that no block that these tokens need is block 0.

        Args:
            from_first: whether the blocks begin with the prompt's first token; otherwise they are its last ones.

        Raises:
            InvalidBlocks: one is, or there are other cache groups.
        """
        groups = self.description.groups
        if len(blocks) != len(groups):
            raise InvalidBlocks(
                "blocks", f"of {len(blocks)} cache groups", f"those of {len(groups)}"
            )
        for index, (group, ids) in enumerate(zip(groups, blocks, strict=True)):
            if group.policy == "state":
                continue
            span = group.block_tokens * self.description.topology.dcp
            first_block = first_needed(group, num_tokens) // span
            stop_block = -(-num_tokens // span)
            if from_first:
                needed = ids[first_block:stop_block]
            else:
                num_needed = stop_block - first_block
                needed = ids[max(0, len(ids) - num_needed) :]
            # The plan takes block 0 for one that is not held, and would leave its tokens out of a load that ends well.
            if NULL_BLOCK in needed:
                raise InvalidBlocks(
                    f"blocks[{index}]",
                    NULL_BLOCK,
                    f"ids above {NULL_BLOCK}, which stands for no block",
                )

    def _knows(self, boot: str, name: LeaseName) -> bool:
        """Whether this engine has a lease. Called on the listener's thread."""
        return boot == self.boot and name in self.leases.slots
