"""An engine of a soak: it gives out its blocks, the free ones are watched, and it can be killed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bench.soak_fabric import SoakFabric
from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import StepResults
from kvferry.worker.peer_memory.shared_file import SharedFile
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from tests.geometry.caches import Caches, Side, carve
from tests.geometry.models import Model
from tests.geometry.pairs import FACTS, cache_groups
from tests.harness.cache_engine import CacheEngine
from tests.harness.caches import PatternCaches

FREE, GUARD = 0xC3, 0x3C
"""Values of the bytes of free blocks, and of bytes that belong to no block."""
LEASE_S = 1.5
LOAD_TIMEOUT_S = 2.5
SETTINGS = WorkerSettings(
    lease_slots=64,
    handshake_timeout_s=10.0,
    load_timeout_s=LOAD_TIMEOUT_S,
    max_loads=64,
    staging_pool_bytes=0,
    failed_read_grace_s=1.0,
    row_blocks=(
        8,
    ),  # of the longest prompt, 120 tokens, in the smallest blocks of a producer
)
STAGED = replace(SETTINGS, staging_pool_bytes=1 << 18)


class SoakEngine(CacheEngine):
    """One life of one engine.

    Attributes:
        free: scheduler blocks that are not in use.
        spoilt: blocks that were written while they were free.
        is_dead: it was killed.
        maps: whether it maps caches of producers on its host.
        leased: the blocks of prompts that are complete, until their leases are over.
        moved: bytes of its good loads, by how: `moved`, of these `staged`, beside these `mapped`, and `early`, before
            the prefill had ended; and `restarts` of loads whose prefill was preempted.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        side: Side,
        settings: WorkerSettings,
        port: int | None = None,
    ) -> None:
        places, blocks = side.shards.places(), side.blocks[0]
        self.memories = [
            _memory(carve(model, side, place), blocks.ratio) for place in places
        ]
        shards = [
            (place, memory.kv)
            for place, memory in zip(places, self.memories, strict=True)
        ]
        super().__init__(
            name,
            SoakFabric,
            shards,
            cache_groups(model, side),
            side.shards.topology,
            settings=settings,
            facts=FACTS,
            lease_s=LEASE_S,
            port=port,
        )
        self.block_tokens = blocks.block_tokens
        self.blocks = blocks.count - 1
        self.free = list(range(1, blocks.count))
        self.spoilt = 0
        self.is_dead = False
        self.maps = settings.mapped_reads is not MappedReadsOption.OFF
        self.leased: dict[str, tuple[int, ...]] = {}
        self.moved: Counter[str] = Counter()

    @property
    def soak_fabrics(self) -> list[SoakFabric]:
        return [fabric for fabric in self.fabrics if isinstance(fabric, SoakFabric)]

    def take(self, count: int) -> tuple[int, ...]:
        """Blocks for a request; counts those that were written since they were freed."""
        blocks = tuple(
            self.free.pop(0) for _ in range(count)
        )  # the one that has been free for longest
        self.spoilt += sum(
            not memory.holds([block], FREE)
            for block in blocks
            for memory in self.memories
        )
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks that are not read or written any more."""
        for memory in self.memories:
            memory.fill(blocks, FREE)
        self.free += blocks

    def write(self, blocks: Sequence[int], tokens: int, seed: int) -> None:
        """A prompt's first tokens are computed here."""
        for memory in self.memories:
            memory.write(blocks, tokens, seed)

    def wrong_bytes(self, blocks: Sequence[int], tokens: int, seed: int) -> int:
        """Over all workers."""
        return sum(memory.wrong_bytes(blocks, tokens, seed) for memory in self.memories)

    def give_away(self, blocks: Sequence[int]) -> None:
        """The next request gets these blocks, of a request that was preempted, and writes them in the next step."""

        def overwrite() -> None:
            for memory in self.memories:
                memory.fill(blocks, FREE)
            self.free[:0] = blocks

        self.launched.append(overwrite)

    def on_sent(self, request_id: str) -> None:
        self.give_back(self.leased.pop(request_id))

    def collect(self) -> list[StepResults]:
        """As without a soak; what is kept does not grow with the requests."""
        collected = super().collect()
        seen = self.seen
        for one in seen.totals:
            self.moved["moved"] += one.transferred_bytes
            self.moved["staged"] += one.staged_bytes
            self.moved["mapped"] += one.mapped_bytes
            self.moved["early"] += one.early_bytes
            self.moved["restarts"] += one.restarts
        for request_id in seen.sent:
            del seen.sent_by[request_id]
        for reported in (seen.load_records, seen.sent, seen.loaded):
            reported.clear()
        return collected

    def has_ended(self, request_id: str) -> bool:
        """Whether every worker has reported the load."""
        return len(self.seen.reports.get(request_id, ())) == len(self.workers)

    def take_outcome(self, request_id: str) -> FailureReason | None:
        """Forget a load that has ended. Returns the reason of the first worker that failed; None if it is good."""
        del self.seen.reports[request_id]
        return self.seen.failed.pop(request_id, None)

    def kill(self) -> threading.Thread:
        """End without notifying any peer. The memory stays mapped, with other content, as long as this object lives.

        Returns:
            A thread that ends when all of its threads have.
        """
        self.is_dead = True
        self.listener.close()
        thread = threading.Thread(target=self._close_later, name="soak-close")
        thread.start()
        return thread

    def _close_later(self) -> None:
        self.renewer.close()
        for worker in self.workers:
            worker.close()
        for memory in self.memories:
            memory.fill(range(self.blocks), 0xDD)


def _memory(caches: Caches, ratio: int) -> PatternCaches:
    # In files, so that consumers with `mapped_reads` map them.
    files = [SharedFile(size) for size in caches.sizes]
    storages = [
        file.tensor[:size] for file, size in zip(files, caches.sizes, strict=True)
    ]
    tensors = caches.at([storage.data_ptr() for storage in storages])
    return PatternCaches(
        storages, tensors, FREE, guard=GUARD, ratio=ratio, shared=files
    )
