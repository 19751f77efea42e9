"""A prompt that is read while it is computed, on its way between two engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import (
    EMPTY,
)
from kvferry.worker.loads.results import LoadRecord
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.exported import slots_of
from tests.harness.integrity import snapshot_of
from tests.harness.prefills import Prefill
from tests.harness.rig import Rig
from tests.waiting import wait_until

STREAMS = replace(SETTINGS, row_blocks=(40,))
GARBAGE = 0x66


@dataclass
class ServedStream:
    """One prompt on its way."""

    rig: Rig
    producer: Engine
    consumer: Engine
    prefill: Prefill
    load: OrderedLoad | None = None

    @classmethod
    def begin(
        cls,
        rig: Rig,
        producer: Engine,
        consumer: Engine,
        tokens: int,
        first: int,
        seed: int = 7,
    ) -> ServedStream:
        """A part is computed before the consumer asks."""
        stream = cls(rig, producer, consumer, producer.begin_prefill(tokens, seed))
        producer.step()
        stream.compute(first)
        stream.prefill.offer()
        return stream

    def order(self, local_tokens: int = 0) -> OrderedLoad:
        assert self.prefill.params is not None
        self.load = self.consumer.load(self.prefill.params, local_tokens=local_tokens)
        return self.load

    def compute(self, tokens: int) -> None:
        self.producer.compute(self.prefill, tokens)
        self.producer.step()

    def compute_rest(self, chunk: int) -> None:
        """The rest of the prompt, chunk by chunk; the consumer reads each before the next one is computed."""
        while not self.prefill.is_complete:
            left = self.prefill.tokens - self.prefill.done
            self.compute(min(chunk, left))
            if left > chunk:
                self.until_read(self.prefill.done)
        self.prefill.end()

    def until_read(self, tokens: int) -> None:
        """Wait until the consumer has read the whole blocks of these tokens, or has ended."""
        whole = (
            tokens
            // self.producer.shape.group.block_tokens
            * self.producer.shape.group.block_tokens
        )

        def is_read() -> bool:
            assert self.load is not None
            seen = snapshot_of(self.consumer.worker)
            records = [
                record
                for record in seen.begun
                if record.request_id == self.load.request_id
            ]
            is_over = (
                self.load.request_id in seen.untaken.loaded | seen.untaken.failed.keys()
            )
            return is_over or any(
                chunk[0] >= whole for record in records for chunk in record.chunks[-1:]
            )

        if whole:
            wait_until(is_read, f"{whole} tokens are read")

    def is_over(self) -> bool:
        """Whether the load has ended, collected or not."""
        assert self.load is not None
        results = snapshot_of(self.consumer.worker).untaken
        is_reported = self.load.request_id in results.loaded | results.failed.keys()
        return is_reported or self.consumer.seen.is_over(self.load.request_id)

    def over(self) -> FailureReason | None:
        assert self.load is not None
        return self.rig.until_over(self.consumer, self.load)

    def record(self) -> LoadRecord:
        return self.consumer.seen.load_records[-1]

    def check(self) -> None:
        """The load is good, and every byte of the cache is as it must be."""
        assert self.load is not None
        assert self.over() is None
        self.consumer.check_bytes(self.load, self.prefill.seed)

    def preempt(self) -> None:
        """Its blocks are another prompt's at once."""
        freed = self.prefill.preempt()
        self.producer.step()
        self.producer.caches.fill(freed, GARBAGE)
        self.producer.give_back(freed)

    def abort(self) -> None:
        """Its lease ends, and then its blocks are another prompt's."""
        assert self.prefill.params is not None
        blocks, slot = self.prefill.blocks, self.prefill.params.kvferry.lease_slot
        freed = self.prefill.abort()
        self.producer.step()
        wait_until(
            lambda: slots_of(self.producer.worker).words[slot] == EMPTY,
            "the lease has ended",
        )
        self.producer.caches.fill(blocks, GARBAGE)
        self.producer.give_back(freed)


def pair(rig: Rig, **settings: Any) -> tuple[Engine, Engine]:
    return rig.pair(**{"settings": STREAMS, **settings})
