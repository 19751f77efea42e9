"""The scheduler side of one engine: makes its parts, starts and ends them. vLLM's hooks go to `life`, `engine_step`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.facts import (
    caches_uncomputed_blocks,
    can_stream,
    facts_of,
    lease_slots,
    num_workers,
    siblings_of,
    steps_alone,
    uses_host_buffer,
    writes_states_late,
)
from kvferry.connector.engine.local_engine import LocalEngine, token_bytes
from kvferry.connector.metrics.stats import EngineMonitor
from kvferry.connector.scheduler_side.admission import (
    Admission,
    BlockDemand,
    LeaseEviction,
    StallWatch,
)
from kvferry.connector.scheduler_side.hooks import EngineStep, RequestLife, RequestParts
from kvferry.connector.scheduler_side.intake import RemotePromptIntake, RequestIntake
from kvferry.connector.scheduler_side.prefixes import PrefixIntake, PrefixLeases
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.requests import EngineRequests, SchedulerContext
from kvferry.connector.scheduler_side.side_channel import SideChannel
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.scheduler_side.taken_back import TakeBacks, UndoneSteps
from kvferry.connector.scheduler_side.tickets import ParamsBuilder, TicketBuilder
from kvferry.connector.tracing.scheduler_events import scheduler_tracing
from kvferry.connector.vllm.core import CacheResets, EngineLoop
from kvferry.connector.vllm.prefix_cache import PrefixCache
from kvferry.connector.vllm.scheduler import EngineBlocks
from kvferry.link.allowed_hosts import TrustedHosts, allowed_hosts_of
from kvferry.link.counters import Counters
from kvferry.link.load_listener import LoadListener
from kvferry.link.secrets import secrets_from_environment
from kvferry.protocol.hosts import address_of
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.pull_estimate import PullEstimate
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prefix_directory import PrefixDirectory
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.scheduler.requests import RequestTable

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class SchedulerSide:
    """The scheduler side of one engine.

    Attributes:
        requests: that this engine has.
        tracing: None if nothing is recorded, as in most engines.
        leases, loads: the two ledgers.
        blocks: the engine's, once vLLM has bound its KV cache manager.
        queries: for prompts whose producers must be asked.
        intake: decides how a request is served, when it arrives.
        pulls: prefixes of other engines: whom to ask for them, and what to load.
        tickets: for prompts and turns of this engine.
        prefix_cache: what other engines may find in it, once vLLM has bound its KV cache manager.
        prefix_leases: of what they have found.
        demand: the blocks that requests lack.
        eviction: ends held leases when blocks are needed, and whether blocks are coming (`is_coming`).
        steps: when the engine steps, waits and wakes.
        monitor: the metrics.
        life: what the hooks of a request mean for all of these.
        engine_step: what those of a step mean.
        channel: the side channel, which publishes the workers' descriptions.

    Raises:
        InvalidConfig: the side channel's address is in use, its secrets are invalid, or a cache cannot be described.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: FerryConfig,
    ) -> None:
        # What has been opened is closed if anything that follows fails: threads would go on, and keep the port.
        with contextlib.ExitStack() as undo:
            self._make(vllm_config, kv_cache_config, config, undo)
            undo.pop_all()

    def _make(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: FerryConfig,
        undo: contextlib.ExitStack,
    ) -> None:
        """Make all parts; `undo` closes those that have something open."""
        # What this engine is.
        secrets = secrets_from_environment()
        local = LocalEngine.from_vllm_config(vllm_config, kv_cache_config, config)
        workers = num_workers(local.topology)
        max_steps = vllm_config.max_concurrent_batches
        recomputes = (
            vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        )
        allowed = allowed_hosts_of(config.allowed_hosts, secrets, local.host)
        loop = EngineLoop()
        self._local = local
        self._loop = loop
        self._is_attached = False

        # Its requests, and the two ledgers over them.
        counters = Counters()
        table = RequestTable()
        by_priority = vllm_config.scheduler_config.policy == "priority"
        self.requests = EngineRequests(table, by_priority=by_priority)
        self.blocks = EngineBlocks()
        undone: UndoneSteps | None = None
        if caches_uncomputed_blocks(vllm_config):
            undone = UndoneSteps(self.requests, self.blocks)
        self.leases = ProducerLedger(
            lease_slots(config, vllm_config),
            config.kv_lease_duration,
            counters,
            turn_s=config.decoder_kv_blocks_ttl,
            workers=workers,
            pool=self.blocks,
            requests=table,
        )
        self.loads = ConsumerLedger(
            counters,
            config.kv_recompute_threshold,
            pool=self.blocks,
            recomputes=recomputes,
            requests=table,
        )
        self.tracing = scheduler_tracing(vllm_config, config, local)
        if self.tracing is not None:
            undo.callback(self.tracing.close)
        self.leases.observer = self.tracing
        self.loads.observer = self.tracing
        context = SchedulerContext(
            local=local,
            requests=self.requests,
            leases=self.leases,
            loads=self.loads,
            blocks=self.blocks,
            counters=counters,
            tracing=self.tracing,
        )

        # What comes in with a request, and what goes out.
        spans = local.block_spans if config.streaming == "auto" else ()
        self.queries = PromptQueries(
            self.requests, loop, recomputes=recomputes, spans=spans
        )
        siblings = siblings_of(vllm_config)
        directory = PromptDirectory(siblings.ports, requests=table)
        trusted = TrustedHosts(
            allowed,
            has_list=config.allowed_hosts is not None,
            has_secret=bool(secrets),
        )
        self.pulls = PrefixIntake(
            context,
            trusted,
            self.queries,
            PullEstimate(
                token_bytes(kv_cache_config), config.prefix_pull_min_tokens, max_steps
            ),
            tuple(map(address_of, config.prefix_sources)),
        )
        self.intake = RequestIntake(
            context,
            trusted,
            RemotePromptIntake(context, trusted),
            self.queries,
            directory,
            self.pulls,
        )
        builder = ParamsBuilder(
            local,
            kv_cache_config,
            config.kv_lease_duration,
            copies_blocks=uses_host_buffer(vllm_config),
        )
        take_backs = TakeBacks(self.requests, self.blocks, local.block_spans, max_steps)
        self.tickets = TicketBuilder(
            context,
            builder,
            directory,
            take_backs,
            can_stream=can_stream(vllm_config, kv_cache_config, config),
        )

        # What other engines read from its prefix cache.
        self.prefix_cache = PrefixCache()
        self._answers_prefix_queries = (
            local.is_read_from
            and config.prefix_pulls == "auto"
            and not (local.has_states and writes_states_late(vllm_config))
            and undone is None
        )
        prefixes = PrefixDirectory(self.prefix_cache, builder.build_prefix, counters)
        prefixes.wake_engine = loop.wake
        self.prefix_leases = PrefixLeases(
            context, self.prefix_cache, take_backs, builder, loop, prefixes
        )

        # When the engine steps, and who gets blocks.
        load_listener: LoadListener | None = None
        if local.reads:
            load_listener = LoadListener(local.boot, workers, loop.wake, max_steps)
            undo.callback(load_listener.close)
        self.steps = Steps(
            self.leases,
            self.loads,
            self.queries,
            self.prefix_leases,
            workers,
            drain_s=float(vllm_config.shutdown_timeout),
            loop=loop,
            load_listener=load_listener,
            may_wait=steps_alone(vllm_config),
        )
        self.demand = BlockDemand(vllm_config, self.requests, self.blocks)
        self.eviction = LeaseEviction(
            context, self.demand, self.steps, config.max_leased_fraction
        )
        admission = Admission(self.demand, self.blocks, self.loads.quarantine)
        self.monitor = EngineMonitor(self.leases, self.loads, self.blocks, counters)

        self.channel = SideChannel(
            context,
            self.steps,
            self.queries,
            directory,
            prefixes if self._answers_prefix_queries else None,
            facts=facts_of(vllm_config, config),
            config=config,
            names_all_ranks=siblings.are_all,
            secrets=secrets,
            allowed=allowed,
        )
        undo.callback(self.channel.close)

        # What vLLM's hooks mean for all of these.
        parts = RequestParts(
            intake=self.intake,
            queries=self.queries,
            pulls=self.pulls,
            demand=self.demand,
            admission=admission,
            tickets=self.tickets,
            prefix_leases=self.prefix_leases,
            steps=self.steps,
            channel=self.channel,
        )
        self.life = RequestLife(context, parts)
        self._resets = CacheResets(
            self.life.end_leases, may_step=steps_alone(vllm_config)
        )
        self.engine_step = EngineStep(
            context,
            parts,
            self.life,
            undone=undone,
            eviction=self.eviction,
            stalls=StallWatch(context, loop),
            monitor=self.monitor,
        )

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM has made its KV cache manager. Raises as `EngineBlocks.bind`."""
        self.blocks.bind(manager)
        if self._answers_prefix_queries:
            self.prefix_cache.bind(manager)

    def must_step(self) -> bool:
        """Whether the engine must step although it has no request. If not, it is idle, even with held leases."""
        if not self._is_attached:
            self._attach_to_core()
        # Answers need no step: an idle engine gives the tickets of requests that have ended back at once.
        self.life.take_answers()
        return self.steps.must_step(has_producers=self.channel.poll())

    def _attach_to_core(self) -> None:
        core = self._loop.find()
        if core is not None:
            self._is_attached = True
            self._local.weights.attach(core)
            self._resets.attach(core)

    def described(self, handshakes: Collection[KVConnectorHandshakeMetadata]) -> None:
        """The workers have described themselves. Raises as `SideChannel.publish`."""
        self.channel.publish(handshakes)
        self.life.children_hold = any(
            getattr(handshake, "is_child", False) for handshake in handshakes
        )

    def withdrawn(self) -> None:
        """The workers withdraw their caches, and describe themselves again when the engine has woken."""
        # The pages come back empty, whatever vLLM's prefix cache says.
        self.prefix_leases.reset()
        self.channel.withdraw()

    def close(self) -> None:
        """Release the leases of other engines, and stop the threads. Idempotent."""
        self.loads.give_all_back()
        self.channel.close()
        self.steps.close()
        if self.tracing is not None:
            self.tracing.close()
