"""Values of a toy engine: its offers, its loads, its workers' reports, and its default settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.protocol.handshake import ModelFacts
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import RemotePrefill
from kvferry.worker.loads.record import LoadRecord
from kvferry.worker.settings import WorkerSettings
from tests.worker.toy_caches import Bytes, CacheShape

HOST = "127.0.0.1"
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
SHAPE = CacheShape()
POISON = 0xA5
LEASE_S = 30.0


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


@dataclass
class Seen:
    """All reports of a worker. Each list keeps every report, so that repetitions show."""

    sent: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    alive: frozenset[str] = frozenset()
    load_records: list[LoadRecord] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> list[LoadRecord]:
        """Records of the good loads."""
        return [load for load in self.load_records if load.reason is None]
