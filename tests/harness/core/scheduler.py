"""vLLM's scheduler with one connector in it, and a worker side whose reports the test chooses.

    engine = SchedulerEngine("NixlConnector", role="kv_consumer")
    engine.add("a", tokens(40), params)
    loading = engine.step()                        # schedule, then results in which no load has finished
    engine.step(loaded={"a"})                      # the workers report a's load
    assert engine.run()["a"].finish_reason == ...  # steps until nothing is left

One `step` is what the engine's loop does: schedule → run → aborts that came meanwhile → update from the output. With
`overlap=True` it is vLLM's asynchronous scheduler, and `schedule` may be called again before `finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connector.messages import FerryWorkerMetadata
from kvferry.connector.metrics.tables import COUNTERS, PEER
from kvferry.protocol.orders import decode_orders
from tests.harness.core.configs import (
    BLOCK_TOKENS,
    kv_cache_config,
    tokens,
    vllm_config,
)
from tests.harness.core.integrity import check_scheduler_side

__all__ = [
    "BLOCK_TOKENS",
    "SAMPLED",
    "Answer",
    "Scheduled",
    "SchedulerEngine",
    "tokens",
]

SAMPLED = 7
"""The token that is sampled where no model is given."""


@dataclass(frozen=True)
class Scheduled:
    """One step that was sent to the workers and not yet answered."""

    output: Any
    sampling: frozenset[str]

    @property
    def metadata(self) -> Any:
        return self.output.kv_connector_metadata

    @property
    def orders(self) -> Any:
        """The orders to kvferry's workers; None if there are none."""
        return decode_orders(self.metadata.frame) if self.metadata.frame else None

    @property
    def computed(self) -> dict[str, int]:
        """Tokens that the model computes in this step, by request."""
        return dict(self.output.num_scheduled_tokens)

    @property
    def ended(self) -> set[str]:
        """Requests whose lease the workers are ordered to end in this step."""
        orders = self.orders
        return set() if orders is None else {end.request_id for end in orders.ends}


@dataclass
class Answer:
    """All outputs of one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    params: dict[str, Any] | None = None


class SchedulerEngine:
    """A scheduler, its queues, and the answers so far.

    Args:
        checks_steps: check the integrity of kvferry's scheduler side when a step is scheduled and when it ends.
        match_tokens, keeps_checkpoints: see `kv_cache_config`.
    """

    def __init__(
        self,
        connector: str,
        *,
        num_blocks: int = 32,
        overlap: bool = False,
        window: int = 0,
        lookahead: int = 0,
        checks_steps: bool = False,
        match_tokens: int | None = None,
        keeps_checkpoints: bool = False,
        **config: Any,
    ) -> None:
        self.config = vllm_config(
            connector, num_blocks=num_blocks, overlap=overlap, **config
        )
        self.cache_config = kv_cache_config(
            num_blocks,
            tp=config.get("tp", 1),
            window=window,
            stages=range(config.get("pp", 1)),
            states=config.get("states", 0),
            match_tokens=match_tokens,
            keeps_checkpoints=keeps_checkpoints,
        )
        kind = AsyncScheduler if overlap else Scheduler
        # The tokens that a draft model writes ahead, without a draft model.
        with mock.patch.object(VllmConfig, "num_lookahead_tokens", lookahead):
            self.scheduler = kind(
                vllm_config=self.config,
                kv_cache_config=self.cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK_TOKENS,
                hash_block_size=match_tokens,
                log_stats=True,
            )
        self.checks_steps = checks_steps
        self.answers: dict[str, Answer] = {}
        self.stats: list[dict[str, Any]] = []
        self.sample: Callable[[str], int] = lambda request_id: SAMPLED
        self.blocks_at_start = self.free_blocks
        self._hasher = get_request_block_hasher(match_tokens or BLOCK_TOKENS, sha256)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def used_blocks(self) -> int:
        """Blocks that are not in the pool, beyond those that never are."""
        return self.blocks_at_start - self.free_blocks

    @property
    def block_bytes(self) -> int:
        return int(self.cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)

    @property
    def is_whole(self) -> bool:
        """Whether every block is back in the pool and no request is left."""
        return self.free_blocks == self.blocks_at_start and not self.scheduler.requests

    def counted(self, name: str, label: str | None = None) -> int:
        """The sum of a counter, as vLLM's front end adds it up; over all labels if none is given."""
        found = [stats.get("counters", {}).get(name, {}) for stats in self.stats]
        return sum(
            sum(by_label.values()) if label is None else by_label.get(label, 0)
            for by_label in found
        )

    def is_idle(self) -> bool:
        """Whether no request is running or waiting; some may still be held."""
        return not self.scheduler.get_num_unfinished_requests()

    def total_counts(self) -> dict[tuple[str, str], int]:
        """All of kvferry's counters."""
        names = {
            (name, label)
            for stats in self.stats
            for name, by in stats["counters"].items()
            for label in by
        }
        return {
            (name, label): self.counted(name, label) for name, label in sorted(names)
        }

    def status(self, request_id: str) -> str:
        return str(self.scheduler.requests[request_id].status)

    def block_ids(self, request_id: str) -> list[int]:
        return self.all_block_ids(request_id)[0]

    def all_block_ids(self, request_id: str) -> list[list[int]]:
        """By cache group."""
        return [
            list(ids)
            for ids in self.scheduler.kv_cache_manager.get_block_ids(request_id)
        ]

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: Any = None,
        *,
        max_tokens: int = 4,
        **request: Any,
    ) -> Any:
        """Add a request as the engine core does; `params` may be anything."""
        made = self.made(request_id, prompt, params, max_tokens=max_tokens, **request)
        self.scheduler.add_request(made)
        return made

    def made(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: Any = None,
        *,
        max_tokens: int = 4,
        **request: Any,
    ) -> Request:
        """A request that is not added yet."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=request.pop("prompt_logprobs", None),
            stop_token_ids=request.pop("stop_token_ids", None),
        )
        sampling.extra_args = None if params is None else {"kv_transfer_params": params}
        made = self.make_request(
            request_id, prompt, sampling_params=sampling, **request
        )
        self.answers[request_id] = Answer()
        return made

    def make_request(
        self, request_id: str, prompt: Sequence[int], **request: Any
    ) -> Any:
        """A request that this engine does not have."""
        request.setdefault("sampling_params", SamplingParams(max_tokens=1))
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            pooling_params=None,
            block_hasher=self._hasher,
            **request,
        )

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(set(request_ids), RequestStatus.FINISHED_ABORTED)

    def preempt(self, request_id: str, *, drops_output: bool = False) -> None:
        """Preempt a running request as vLLM does when another one needs its blocks.

        Args:
            drops_output: also drop the output of its steps in flight, as when the prefix cache is emptied.
        """
        scheduler = self.scheduler
        request = scheduler.requests[request_id]
        scheduler.running.remove(request)
        drops_output |= scheduler.requires_kv_delivery
        scheduler._preempt_request(
            request, time.monotonic(), drop_stale_output=drops_output
        )
        scheduler.prev_step_scheduled_req_ids.discard(request_id)

    def schedule(self) -> Scheduled:
        output = self.scheduler.schedule()
        self._check()
        running = {
            name: self.scheduler.requests[name] for name in output.num_scheduled_tokens
        }
        return Scheduled(
            output,
            frozenset(
                name
                for name, request in running.items()
                if not request.is_prefill_chunk
            ),
        )

    def finish(
        self,
        step: Scheduled,
        *,
        loaded: Iterable[str] = (),
        failed: Iterable[str] = (),
        sent: Iterable[str] = (),
        over: Iterable[str] = (),
        worker: Any = None,
    ) -> None:
        """The workers' answer to `step`; a failed load is reported as vLLM wants it, among the finished ones too.

        `sent` are requests that vLLM holds, `over` those that kvferry does: every worker has cleared their slots.
        `worker` replaces all of it: a `KVConnectorOutput` that a real worker side made.
        """
        names = list(step.output.num_scheduled_tokens)
        report = worker or KVConnectorOutput(
            finished_sending=set(sent) or None,
            finished_recving={*loaded, *failed} or None,
            failed_recving=set(failed),
            kv_connector_worker_meta=self._told_by_all(over)
            if over or getattr(step.metadata, "wants_report", False)
            else None,
        )
        results = self.scheduler.update_from_output(
            step.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[
                    [self.sample(name)] if name in step.sampling else []
                    for name in names
                ],
                kv_connector_output=report,
            ),
        )
        for result in results.values():
            self._collect(result)
        self._check()

    def step(self, **report: Any) -> Scheduled:
        step = self.schedule()
        self.finish(step, **report)
        return step

    def run(self, *, limit: int = 64) -> dict[str, Answer]:
        """Step until no request is running or waiting; what is held by the connector stays held."""
        for _ in range(limit):
            if self.is_idle():
                return self.answers
            self.step()
        stuck = {name: self.status(name) for name in self.scheduler.requests}
        raise AssertionError(f"requests did not end in {limit} steps: {stuck}")

    def close(self) -> None:
        self.scheduler.shutdown()

    def _check(self) -> None:
        if self.checks_steps:
            check_scheduler_side(self.connector.scheduler_side)

    def _told_by_all(self, over: Iterable[str]) -> FerryWorkerMetadata:
        return FerryWorkerMetadata(
            sent=dict.fromkeys(
                range(self.config.parallel_config.world_size), frozenset(over)
            )
        )

    def _collect(self, result: Any) -> None:
        for output in result.outputs:
            answer = self.answers[output.request_id]
            answer.tokens += output.new_token_ids
            answer.finish_reason = (
                str(output.finish_reason) if output.finish_reason is not None else None
            )
            answer.params = output.kv_transfer_params or answer.params
        if (
            result.scheduler_stats is not None
            and result.scheduler_stats.kv_connector_stats
        ):
            self.stats.append(result.scheduler_stats.kv_connector_stats)
            _check_exported(self.stats[-1].get("counters", {}))


def _check_exported(counters: Mapping[str, Mapping[str, float]]) -> None:
    """Check that every counter and label value is one of the metrics' tables."""
    for name, by_label in counters.items():
        counter = COUNTERS[name]
        assert counter.label == PEER or set(by_label) <= set(counter.values or ("",)), (
            name
        )
