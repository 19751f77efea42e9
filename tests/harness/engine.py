"""An engine of one worker without a model, with blocks to give out and caches whose bytes follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import LeaseName, ModelFacts
from kvferry.protocol.params import RemotePrefill, sign_params
from kvferry.worker.device import HOST, Device
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.staging.pool import StagingPool
from kvferry.worker.worker import MakeFabric
from tests.fakes.cuda_memory import FakeDevice
from tests.harness.cache_engine import FACTS, LEASE_S, SETTINGS, CacheEngine
from tests.harness.caches import Bytes, CacheShape, ToyCaches
from tests.harness.exported import slots_of
from tests.harness.inside import memory_of
from tests.harness.integrity import snapshot_of
from tests.harness.prefills import Prefill
from tests.harness.sleeping_memory import SleepingMemory
from tests.waiting import step_until

SHAPE = CacheShape()
POISON = 0xA5


@dataclass(frozen=True)
class Offer:
    """One finished prefill: the bytes of its blocks follow from `seed`."""

    params: RemotePrefill
    blocks: tuple[int, ...]
    tokens: int
    seed: int

    @property
    def request_id(self) -> str:
        return self.params.remote_request_id

    @property
    def slot(self) -> int:
        return self.params.kvferry.lease_slot


@dataclass(frozen=True)
class OrderedLoad:
    """One load: tokens [first, stop) into `blocks`; `before` is the whole cache as it was."""

    request_id: str
    blocks: tuple[int, ...]
    first: int
    stop: int
    before: list[Bytes]


class Engine(CacheEngine):
    """One engine of one worker."""

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
        device: Device = HOST,
        remembers: bool = False,
        shared: bool = False,
        sleeps: bool = False,
    ) -> None:
        self.shape = shape
        self.pages = SleepingMemory() if sleeps else None
        self.caches = ToyCaches(shape, POISON, device, shared=shared, pages=self.pages)
        self.offers: dict[str, Offer] = {}
        self.draw = random.Random(seed)
        self.unused = list(
            range(1, shape.blocks // shape.ratio)
        )  # block 0 is vLLM's null block
        self._numbers = 0
        self._running: dict[str, tuple[tuple[int, ...], int, int]] = {}
        super().__init__(
            name,
            make_fabric,
            [(Place(), self.caches.kv)],
            (shape.group,),
            Topology(),
            settings=settings,
            facts=facts,
            lease_s=lease_s,
            port=port,
            remembers=remembers,
        )
        (self.worker,), (self.fabric,) = self.workers, self.fabrics
        if isinstance(device, FakeDevice):
            self.launch = device.cuda.launch

    # The producing half.

    def start_prefill(self, tokens: int, seed: int) -> str:
        """A request is scheduled: its lease is opened, its blocks are written, and it has not finished."""
        self._numbers += 1
        request_id = f"{self.name}-{self.boot[:4]}-prefill-{self._numbers}"
        blocks = self.take_blocks(tokens)
        assert self.leases.open(request_id)
        self.step()
        self.launch(partial(self.caches.fill, blocks, 0x5A))
        self.launch(partial(self.caches.write, blocks, tokens, seed))
        self._running[request_id] = (blocks, tokens, seed)
        return request_id

    def finish_prefill(self, request_id: str) -> Offer:
        """It has finished; its workers learn of the hold with the next step."""
        blocks, tokens, seed = self._running.pop(request_id)
        params = self.finish(request_id, (blocks,), tokens)
        assert params is not None
        offer = self.offers[request_id] = Offer(params, blocks, tokens, seed)
        return offer

    def prefill(self, tokens: int, seed: int = 1) -> Offer:
        """A whole prefill, held."""
        offer = self.finish_prefill(self.start_prefill(tokens, seed))
        self.step()
        return offer

    def begin_prefill(self, tokens: int, seed: int) -> Prefill:
        """A prompt to be computed part by part (`compute`), which consumers may read meanwhile."""
        self._numbers += 1
        return Prefill(
            self,
            [self.caches],
            f"{self.name}-{self.boot[:4]}-prefill-{self._numbers}",
            tokens,
            seed,
        )

    def compute(self, prefill: Prefill, tokens: int) -> None:
        """The next step computes so many more tokens of a prompt, into any blocks that are free."""
        prefill.compute(
            tokens, self.take_blocks(prefill.done + tokens, len(prefill.blocks))
        )
        if prefill.is_complete:
            assert prefill.params is not None
            offer = Offer(prefill.params, prefill.blocks, prefill.tokens, prefill.seed)
            self.offers[prefill.request_id] = offer

    def changed(
        self, offer: Offer, *, ticket: dict[str, Any] | None = None, **fields: Any
    ) -> RemotePrefill:
        """The offer's params with other fields and the producer's MAC."""
        ticket_now = msgspec.structs.replace(offer.params.kvferry, **(ticket or {}))
        return sign_params(
            msgspec.structs.replace(offer.params, kvferry=ticket_now, **fields),
            self.mac_key,
        )

    def word(self, offer: Offer) -> int:
        """The word in the offer's slot."""
        return int(slots_of(self.worker).words[offer.slot])

    @property
    def pool(self) -> StagingPool:
        """The worker's staging pool; it must have one."""
        staging = memory_of(self.worker).staging
        assert staging is not None
        return staging.pool

    def all_entries_are_free(self) -> bool:
        """Whether no read of a slot is in flight."""
        return snapshot_of(self.worker).entries.taken == 0

    def entries_of_loads(self) -> int:
        """Entries for slot reads that loads hold themselves; those of parked loads are their polls'."""
        holders = snapshot_of(self.worker).holders
        return sum(
            len(holder.entries) for holder in holders if holder.state is not None
        )

    def end(self, offer: Offer) -> None:
        """End the lease, on the worker too."""
        self.leases.release(
            LeaseName(slot=offer.slot, epoch=offer.params.kvferry.lease_epoch)
        )
        self.step()

    def give_away(self, offer: Offer) -> None:
        """End the lease, wait until the request is reported, and let the next request overwrite its blocks."""
        self.end(offer)
        step_until(lambda: offer.request_id in self.seen.sent, "the lease ends", self)
        self.caches.fill(offer.blocks, 0x66)

    def on_sent(self, request_id: str) -> None:
        self.unused += self.offers[request_id].blocks

    def sleep(self) -> None:
        """Withdraw the caches, and let their pages go."""
        assert self.pages is not None
        self.withdraw()
        self.pages.sleep()

    def wake_up(self) -> None:
        """The pages are back, with other bytes; register them again."""
        assert self.pages is not None
        self.pages.wake_up()
        self.restore()

    def restore(self) -> None:
        """As every engine's."""
        super().restore()
        self.fabric = self.fabrics[-1]
        self.mac_key = self.description.mac_key

    # The consuming half.

    def load(self, params: RemotePrefill, *, local_tokens: int = 0) -> OrderedLoad:
        """Order a load of everything beyond a local prefix hit."""
        self._numbers += 1
        request_id, blocks = f"{self.name}-decode-{self._numbers}", tuple[int, ...]()

        def allocate(loaded: int) -> tuple[tuple[int, ...], ...]:
            nonlocal blocks
            blocks = self.take_blocks(local_tokens + loaded)
            return (blocks,)

        count = self.order_load(
            request_id, params, local_tokens, params.remote_num_tokens, allocate
        )
        load = OrderedLoad(
            request_id,
            blocks,
            local_tokens,
            local_tokens + count,
            self.caches.snapshot(),
        )
        self.step()
        return load

    def check_bytes(self, load: OrderedLoad, seed: int) -> None:
        """Check every byte of the cache: the loaded ones are right, the tail is zero, and no other has changed."""
        for found, wanted in zip(
            self.caches.memory, self._after(load, seed), strict=True
        ):
            assert (found == wanted).all(), f"{(found != wanted).sum()} bytes differ"

    def has_bytes(self, load: OrderedLoad, seed: int) -> bool:
        """Whether the load's own blocks are right; for tests where others are loading too."""
        expected, own = self._after(load, seed), self.caches.kernel_blocks(load.blocks)
        layers = range(self.shape.layers)
        return all(
            (self.caches.cells(n)[own] == self.caches.cells(n, expected)[own]).all()
            for n in layers
        )

    def free(self, load: OrderedLoad) -> None:
        """The request that was loaded has been answered."""
        self.loads.finished(load.request_id)
        self.unused += load.blocks

    def _after(self, load: OrderedLoad, seed: int) -> list[Bytes]:
        """The whole cache as it is when nothing but this load has changed it."""
        expected = [part.copy() for part in load.before]
        self.caches.write_into(
            expected, load.blocks, load.first, load.stop, seed, tail=0
        )
        return expected

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks of a prompt that was preempted or aborted are free."""
        self.unused += blocks

    def take_blocks(self, tokens: int, taken: int = 0) -> tuple[int, ...]:
        count = -(-tokens // self.shape.group.block_tokens) - taken
        self.draw.shuffle(self.unused)
        assert count <= len(self.unused), (
            f"{count} blocks wanted, {len(self.unused)} free"
        )
        return tuple(self.unused.pop() for _ in range(count))
