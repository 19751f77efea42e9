"""An engine of one worker without a model: all of kvferry is real, except for vLLM and the fabric.

It has both ledgers, a listener and a renewer on loopback, a `FerryWorker`, and caches whose bytes follow from a seed.
The test runs its step loop.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import msgspec
import torch

from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import EngineDescription, LeaseName, ModelFacts
from kvferry.protocol.ids import epoch_to_text, new_boot_id
from kvferry.protocol.orders import StepOrders, encode_head, encode_orders
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.params_mac import new_mac_key, sign_params
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters
from kvferry.scheduler.step import next_orders, receive_messages
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.loads.results import StepResults
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker, MakeFabric
from scripts.accuracy.ports import free_ports
from tests.waiting import deadline_s
from tests.worker.engine_values import FACTS, HOST, LEASE_S, POISON, SETTINGS, SHAPE, Offer, OrderedLoad, Seen
from tests.worker.probe_fabric import ProbeFabric
from tests.worker.toy_caches import CPU, CacheShape, ToyCaches
from tests.worker.until_idle import wait_until_idle


class Engine:
    """One engine of one worker. Its methods are called on one thread: the test's."""

    def __init__(
        self,
        name: str,
        make_fabric: MakeFabric,
        *,
        shape: CacheShape = SHAPE,
        settings: WorkerSettings = SETTINGS,
        facts: ModelFacts = FACTS,
        lease_s: float = LEASE_S,
        port: int | None = None,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.name, self.shape, self.lease_s = name, shape, lease_s
        self.port = free_port() if port is None else port
        self.boot, self.mac_key = new_boot_id(), new_mac_key()
        self.seen = Seen()
        self.counters = Counters()
        self.caches = ToyCaches(shape, POISON, device)
        self.leases = ProducerLedger(settings.lease_slots, lease_s, self.counters)
        # It remembers no lease that is over, so that a replay comes to its worker and to the fence.
        self.loads = ConsumerLedger(self.counters, max_ended=0)
        self.offers: dict[str, Offer] = {}
        self._draw = random.Random(seed)
        self._free = list(range(1, shape.blocks // shape.ratio))  # block 0 is vLLM's null block
        self._numbers = 0
        self._running: dict[str, tuple[tuple[int, ...], int, int]] = {}

        def probed(agent_name: str) -> Fabric:
            self.fabric = ProbeFabric(make_fabric(agent_name))
            return self.fabric

        self.worker = FerryWorker(
            engine_id=name,
            place=Place(),
            index=0,
            topology=Topology(),
            facts=facts,
            groups=(shape.group,),
            caches=self.caches.kv,
            settings=settings,
            make_fabric=probed,
        )
        self.description = EngineDescription(
            engine_id=name,
            boot=self.boot,
            mac_key=self.mac_key,
            facts=facts,
            topology=Topology(),
            groups=(shape.group,),
            workers=(self.worker.description,),
        )
        self.listener = SideChannelListener(HOST, self.port, self.counters, settings.secrets)
        self.listener.publish(self.description)
        self.renewer = LeaseRenewer(self.counters, settings.secrets)

    # The producing half.

    def start_prefill(self, tokens: int, seed: int) -> str:
        """A request is scheduled: its lease is opened, its blocks are written, and it has not finished."""
        self._numbers += 1
        request_id = f"{self.name}-{self.boot[:4]}-prefill-{self._numbers}"
        blocks = self._take_blocks(tokens)
        assert self.leases.open(request_id)
        self.step()
        self.caches.fill(blocks, 0x5A)
        self.caches.write(blocks, tokens, seed)
        self._running[request_id] = (blocks, tokens, seed)
        return request_id

    def finish_prefill(self, request_id: str) -> Offer:
        """It has finished; its workers learn of the hold with the next step."""
        blocks, tokens, seed = self._running.pop(request_id)
        lease = self.leases.finish(request_id, (blocks,) if self.worker._mirror is not None else ())
        assert lease is not None
        ticket = Ticket(
            version=1,
            boot=self.boot,
            lease_slot=lease.slot,
            lease_epoch=epoch_to_text(lease.epoch),
            lease_s=self.lease_s,
            digests=tuple(f"{index:032x}" for index in range(-(-tokens // 256))),
            mac="0" * 64,
        )
        params = RemotePrefill(
            remote_engine_id=self.name,
            remote_request_id=request_id,
            remote_block_ids=(blocks,),
            remote_host=HOST,
            remote_port=self.port,
            tp_size=1,
            remote_num_tokens=tokens,
            kvferry=ticket,
        )
        offer = Offer(sign_params(params, self.mac_key), blocks, tokens, seed)
        self.offers[request_id] = offer
        return offer

    def prefill(self, tokens: int, seed: int = 1) -> Offer:
        """A whole prefill, held."""
        offer = self.finish_prefill(self.start_prefill(tokens, seed))
        self.step()
        return offer

    def changed(self, offer: Offer, *, ticket: dict[str, Any] | None = None, **fields: Any) -> RemotePrefill:
        """The offer's params with other fields and the producer's MAC."""
        ticket_now = msgspec.structs.replace(offer.params.kvferry, **(ticket or {}))
        return sign_params(msgspec.structs.replace(offer.params, kvferry=ticket_now, **fields), self.mac_key)

    def word(self, offer: Offer) -> int:
        """The word in the offer's slot."""
        return int(self.worker._table.words[offer.slot])

    def end(self, offer: Offer) -> None:
        """End the lease, on the worker too."""
        self.leases.release(LeaseName(slot=offer.slot, epoch=offer.params.kvferry.lease_epoch))
        self.step()

    def give_away(self, offer: Offer) -> None:
        """End the lease, wait until the request is reported, and let the next request overwrite its blocks."""
        self.end(offer)
        end_s = deadline_s(30.0)
        while offer.request_id not in self.seen.sent:
            assert time.monotonic() < end_s, "the lease does not end"
            self.step()
        self.caches.fill(offer.blocks, 0x66)

    # The consuming half.

    def load(self, params: RemotePrefill, *, local_tokens: int = 0) -> OrderedLoad:
        """Order a load of everything beyond a local prefix hit."""
        self._numbers += 1
        request_id = f"{self.name}-decode-{self._numbers}"
        assert self.loads.offer(request_id, params, params.remote_num_tokens, 0.0) is None
        count = self.loads.matched_tokens(request_id, local_tokens)
        blocks = self._take_blocks(local_tokens + count)
        self.loads.allocated(request_id, count, (blocks,))
        load = OrderedLoad(request_id, blocks, local_tokens, local_tokens + count, self.caches.snapshot())
        self.step()
        return load

    def check_bytes(self, load: OrderedLoad, seed: int) -> None:
        """Check every byte of the cache: the loaded ones are right, the tail is zero, and no other has changed."""
        expected = load.before
        self.caches.write_into(expected, load.blocks, load.first, load.stop, seed, tail=0)
        for found, wanted in zip(self.caches.memory, expected, strict=True):
            assert (found == wanted).all(), f"{(found != wanted).sum()} bytes differ"

    def has_bytes(self, load: OrderedLoad, seed: int) -> bool:
        """Whether the load's own blocks are right; for tests where others are loading too."""
        expected = [part.copy() for part in load.before]
        self.caches.write_into(expected, load.blocks, load.first, load.stop, seed, tail=0)
        own = self.caches.kernel_blocks(load.blocks)
        layers = range(self.shape.layers)
        return all((self.caches.cells(n)[own] == self.caches.cells(n, expected)[own]).all() for n in layers)

    # Both.

    def step(self) -> None:
        """One step of the engine: pass the scheduler's orders to the worker and its results back."""
        receive_messages(self.listener, self.leases, self.boot, self.counters)
        self.order(next_orders(self.leases, self.loads, self.boot, time.monotonic()))
        self.collect()
        self.renewer.submit(self.loads.take_commands())

    def order(self, orders: StepOrders) -> None:
        """Hand orders to the worker in their encoded form."""
        if orders:
            self.worker.carry_out(encode_head(orders), encode_orders(orders))

    def collect(self) -> StepResults:
        """Take the worker's results into `seen` and the ledgers."""
        results = self.worker.take_results()
        for request_id in results.sent:
            self.leases.sent(request_id)
            self._free += self.offers[request_id].blocks
        for request_id in results.loaded:
            self.loads.loaded(request_id)
        for request_id in results.failed:
            self.loads.failed(request_id)
        self.seen.sent += results.sent
        self.seen.loaded += results.loaded
        self.seen.failed |= results.failed
        self.seen.load_records += results.load_records
        self.seen.alive = self.seen.alive if results.alive is None else results.alive
        self.seen.counts.update(results.counts)
        return results

    def set_timeouts(
        self, *, load_s: float = SETTINGS.load_timeout_s, handshake_s: float = SETTINGS.handshake_timeout_s
    ) -> None:
        """Change the deadlines of a worker that has begun; so no test depends on how fast a good load is."""
        worker = self.worker
        assert worker._thread is not None
        assert worker._registry is not None
        worker._settings = replace(worker._settings, load_timeout_s=load_s, handshake_timeout_s=handshake_s)
        worker._thread.runner.timeout_s, worker._registry._timeout_s = load_s, handshake_s

    def free(self, load: OrderedLoad) -> None:
        """The request that was loaded has been answered."""
        self.loads.finished(load.request_id)
        self._free += load.blocks

    def wait_until_idle(self) -> None:
        """Lift the faults and let every load end, well or badly; check that nothing is left.

        Raises:
            LocalProtocolError: something is left; with the sums.
        """
        thread = self.worker._thread
        if thread is None or not thread._thread.is_alive():
            return
        self.fabric.faults.clear()
        self.fabric.on_data_read = None
        self.set_timeouts(load_s=0.0)
        wait_until_idle(self.worker)

    def close(self) -> None:
        """Close the engine and check that its sums are right."""
        self.worker.check_integrity()
        self.listener.close()
        self.renewer.close()
        self.worker.close()

    def _take_blocks(self, tokens: int) -> tuple[int, ...]:
        count = -(-tokens // self.shape.group.block_tokens)
        self._draw.shuffle(self._free)
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        return tuple(self._free.pop() for _ in range(count))


def free_port() -> int:
    """A port without a listener, which the kernel gives to no outgoing connection meanwhile."""
    return free_ports(1, HOST)[0]
