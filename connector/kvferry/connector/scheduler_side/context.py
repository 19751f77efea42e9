"""What the parts of a scheduler side share."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """The engine, its requests with both ledgers over them, and where events are counted and recorded.

    Attributes:
        local: what this engine is.
        requests: those that it has.
        leases, loads: the ledgers of a producer and of a consumer; an engine has both, whatever its role.
        blocks: the engine's, once vLLM has bound its KV cache manager.
    """

    local: LocalEngine
    requests: EngineRequests
    leases: ProducerLedger
    loads: ConsumerLedger
    blocks: EngineBlocks
    counters: Counters
    tracing: SchedulerTracing
