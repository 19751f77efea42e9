"""The two sides of the conformance suite: producers with random bytes, consumers with guard bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.worker.fabric.errors import PeerLost
from kvferry.worker.fabric.port import (
    Indices,
    LocalDescriptors,
    RemoteDescriptors,
    Transfer,
)
from tests.worker.fabric.harness import (
    Harness,
    Memory,
    finish,
    random_bytes,
    region,
    row,
    rows,
)

GUARD = 0xA5
LOST_WITHIN_S = 10.0


class AgentPair:
    """A producer with random bytes and a consumer with guard bytes that know each other."""

    def __init__(self, harness: Harness, size: int = 1 << 16, seed: int = 7) -> None:
        self.source: Memory = random_bytes(seed, size)
        self.target: Memory = np.full(size, GUARD, dtype=np.uint8)
        self.producer, self.consumer = (
            harness.fabric("producer"),
            harness.fabric("consumer"),
        )
        self.producer.register([region(self.source)])
        self.consumer.register([region(self.target)])
        self.peer = self.consumer.add_peer(self.producer.metadata())

    def local(
        self, offset: int = 0, length: int = 64, stride: int = 64, count: int = 16
    ) -> LocalDescriptors:
        return self.consumer.prepare_local(
            rows(row(self.target, offset, length, stride, count))
        )

    def remote(
        self, offset: int = 0, length: int = 64, stride: int = 64, count: int = 16
    ) -> RemoteDescriptors:
        return self.consumer.prepare_remote(
            self.peer, rows(row(self.source, offset, length, stride, count))
        )

    def read(
        self,
        local: LocalDescriptors,
        into: Indices,
        remote: RemoteDescriptors,
        out_of: Indices,
    ) -> None:
        transfer = self.consumer.post_read(local, into, remote, out_of)
        finish(self.consumer, transfer)
        self.consumer.release(transfer)


class Mortal:
    """A consumer in this process and a producer that can be killed, after one good read."""

    def __init__(self, harness: Harness, name: str = "mortal") -> None:
        self.harness = harness
        self.target: Memory = np.full(1 << 16, GUARD, dtype=np.uint8)
        self.consumer = harness.fabric("survivor")
        self.consumer.register([region(self.target)])
        self.local = self.consumer.prepare_local(
            rows(row(self.target, 0, 64, 64, 1024))
        )
        self.connect(name)

    def connect(self, name: str, seed: int = 11) -> None:
        self.producer = self.harness.producer(name, seed, 1 << 16)
        self.content = random_bytes(seed, 1 << 16)
        self.peer = self.consumer.add_peer(self.producer.metadata)
        self.remote = self.consumer.prepare_remote(
            self.peer, rows((self.producer.address, 64, 0, 64, 1024))
        )

    def post(self) -> Transfer:
        everything = np.arange(1024, dtype=np.int32)
        return self.consumer.post_read(self.local, everything, self.remote, everything)

    def read(self) -> None:
        self.target[:] = GUARD
        finish(self.consumer, self.post())
        assert np.array_equal(self.target, self.content)

    def post_raises_peer_lost(self) -> bool:
        """One attempt; a transfer that could still be posted is polled until it raises."""
        with pytest.raises(PeerLost):
            finish(self.consumer, self.post(), LOST_WITHIN_S)
        return True
