"""A whole engine in this process: vLLM's scheduler, real worker sides with real NIXL under them, and a toy model."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connector import FerryConnector
from kvferry.protocol.geometry import Place
from kvferry.worker.worker import FerryWorker
from tests.harness.cache_engine import wait_until_idle
from tests.harness.core.configs import (
    BLOCK_TOKENS,
    WINDOW_LAYER,
    kv_cache_config,
    layer_of,
    state_layer,
)
from tests.harness.core.integrity import check_scheduler_side
from tests.harness.core.runners import FirstRunner, SecondRunner, connected, no_forward
from tests.harness.core.scheduler import Answer, Scheduled, SchedulerEngine
from tests.harness.core.toy_model import ToyModel, expected_tokens
from tests.ports import free_port
from tests.waiting import deadline_s, step_until

_IMPL: Any = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
_IMPL.attn_type, _IMPL.kv_cache_dtype = "decoder", "auto"
LAYER_MODULE = SimpleNamespace(
    get_attn_backend=lambda: CPUAttentionBackend,
    impl=_IMPL,
    isa="vec",
    _k_scale_float=1.0,
    _v_scale_float=1.0,
)
"""The replacement of the attention layer where vLLM looks layers up by name: it can write a cache."""
_TIMEOUT_S = 60.0


def _described(worker: Any) -> Any:
    with connected(worker):
        return worker.get_handshake_metadata()


RunnerType = type[FirstRunner] | type[SecondRunner]


def between_processes(value: Any) -> Any:
    """The value as it arrives when vLLM sends it between the scheduler's and a worker's process."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301


@contextmanager
def side_channel(port: int) -> Iterator[None]:
    """The environment of an engine whose side channel is on this port."""
    settings = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    with mock.patch.dict(os.environ, settings):
        yield


def ferry_of(connector: Any) -> Any:
    """kvferry's connector: this one, or a child of this MultiConnector."""
    children = getattr(connector, "sub_connectors", (connector,))
    return next(child for child in children if isinstance(child, FerryConnector))


def start_parallel_state(config: Any) -> None:
    """vLLM's process groups of one process, once."""
    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo"
        )
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")


def stop_parallel_state() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


_FORWARD = threading.RLock()
"""Nodes may step on several threads, and vLLM has one forward context in a process."""


def until(nodes: Sequence[Node], over: Callable[[], bool]) -> None:
    """Step all nodes in turn until `over`; their transfer threads work meanwhile.

    Raises:
        AssertionError: it was not in time; tells the requests that are left.
    """
    try:
        step_until(over, "it is over", *nodes, timeout_s=_TIMEOUT_S)
    except AssertionError as error:
        engines = [node.engine for node in nodes]
        left = {
            name: one.status(name) for one in engines for name in one.scheduler.requests
        }
        raise AssertionError(f"{error}; requests: {left}") from error


class Node:
    """One engine with its workers. `step` is one turn of the engine's loop.

    With `overlap` a step is scheduled and run before the one before it is answered, and so it is with several
    pipeline stages. `tp × pp` workers share the heads and the layers; each has its own cache and its own NIXL agent.
    """

    def __init__(
        self,
        role: str,
        *,
        runner: RunnerType = FirstRunner,
        port: int = 0,
        tp: int = 1,
        pp: int = 1,
        window: int = 0,
        connector: str = "NixlConnector",
        module: str | None = "kvferry.connector",
        **config: Any,
    ) -> None:
        self.window = window
        self.is_recurrent = bool(config.get("states"))
        self.port = port or free_port()
        config.setdefault("engine_id", f"{role}-{self.port}")
        if module == "kvferry.connector" and connector == "NixlConnector":
            config["extra"] = {
                "handshake_timeout_s": _TIMEOUT_S / 2,
                **(config.get("extra") or {}),
            }
        with side_channel(self.port):
            self.engine = SchedulerEngine(
                connector,
                module=module,
                role=role,
                tp=tp,
                pp=pp,
                window=window,
                **config,
            )
        current_platform.import_kernels()
        start_parallel_state(self.engine.config)
        layers = [*map(layer_of, range(pp)), WINDOW_LAYER]
        self.engine.config.compilation_config.static_forward_context.update(
            dict.fromkeys(layers, LAYER_MODULE)
        )
        self._depth = max(int(config.get("overlap", False)), pp - 1)
        self.steps_in_flight: deque[tuple[Scheduled, Any]] = deque()
        self.workers: list[Any] = []
        self.runners: list[FirstRunner | SecondRunner] = []
        places = [Place(pp=stage, tp=rank) for stage in range(pp) for rank in range(tp)]
        blocks = self.engine.cache_config.num_blocks
        try:
            caches = [
                self._add_worker(
                    runner,
                    place,
                    kv_cache_config(
                        blocks,
                        tp=tp,
                        window=window,
                        stages=(place.pp,),
                        states=config.get("states", 0),
                        match_tokens=config.get("match_tokens"),
                        keeps_checkpoints=config.get("keeps_checkpoints", False),
                    ),
                )
                for place in places
            ]
        except BaseException:
            self.engine.close()  # no other owner closes these, and their threads would stay
            for worker in self.workers:
                worker.shutdown()
            raise
        full = [
            shard[layer_of(place.pp)]
            for place, shard in zip(places, caches, strict=True)
        ]
        windowed = [[shard[WINDOW_LAYER] for shard in caches]] if window else []
        recurrent = [
            [shard[state_layer(index)] for shard in caches]
            for index in range(config.get("states", 0))
        ]
        self.model = ToyModel(self.engine, [full, *windowed], window, recurrent)
        self.engine.sample = self.model.sample
        self.aggregator = KVOutputAggregator.from_connector(
            self.engine.connector, len(places)
        )
        described = {
            (place.pp, place.tp): _described(worker)
            for place, worker in zip(places, self.workers, strict=True)
        }
        self.engine.connector.set_xfer_handshake_metadata_pp_aware(
            between_processes(described)
        )
        self._add_siblings()
        self.method = "step"
        """The order of calls: a method of the runner."""

    def step(self) -> Scheduled:
        step = self.engine.schedule()
        step.output.kv_connector_metadata = between_processes(
            step.output.kv_connector_metadata
        )
        forwards = [self.model.forward, *[no_forward] * (len(self.runners) - 1)]
        with _FORWARD:
            reports = [
                getattr(runner, self.method)(step.output, forward)
                for runner, forward in zip(self.runners, forwards, strict=True)
            ]
        self.steps_in_flight.append((step, between_processes(reports)))
        while len(self.steps_in_flight) > self._depth:
            self.answer_oldest()
        return step

    @property
    def ferry_workers(self) -> list[FerryWorker]:
        """kvferry's half of each worker."""
        return [ferry_of(worker).worker_side.worker for worker in self.workers]

    @property
    def must_step(self) -> bool:
        """Whether the engine's loop would take another step now."""
        return bool(self.engine.scheduler.has_requests())

    def go_on(self) -> bool:
        """One turn of the engine's loop as vLLM takes it: a step if there must be one, otherwise the answer to one that
        is in flight. Returns whether there was either; if not, the loop sleeps until there is input."""
        if self.must_step:
            self.step()
        elif self.steps_in_flight:
            self.answer_oldest()
        else:
            return False
        return True

    def until(self, over: Callable[[], bool]) -> None:
        """Step until `over`; the transfer threads work meanwhile."""
        until((self,), over)

    def answer(self, request_id: str) -> Answer:
        """Step until the request has ended."""
        self.until(lambda: self.engine.answers[request_id].finish_reason is not None)
        return self.engine.answers[request_id]

    def prefill(
        self, request_id: str, prompt: Sequence[int], **request: Any
    ) -> dict[str, Any]:
        """Prefill for another engine; the params of the answer. The workers know that the blocks are held."""
        self.engine.add(
            request_id, prompt, {"do_remote_decode": True}, max_tokens=1, **request
        )
        params = self.answer(request_id).params
        assert params is not None, "the producer made no offer"
        for _ in range(1 + self._depth):
            self.step()
        return params

    def decode(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: Any,
        *others: Node,
        count: int = 5,
        **request: Any,
    ) -> int:
        """Decode so many tokens and check each; `others` step as well.

        Returns:
            The number of prompt tokens that were computed here.
        """
        computed = 0
        end_s = deadline_s(_TIMEOUT_S)
        self.engine.add(request_id, prompt, params, max_tokens=count, **request)
        while self.engine.answers[request_id].finish_reason is None:
            assert time.monotonic() < end_s, f"not answered after {_TIMEOUT_S:g} s"
            computed += self.step().computed.get(request_id, 0)
            for other in others:
                other.step()
            time.sleep(0.001)
        assert self.engine.answers[request_id].tokens == self.expected(prompt, count)
        return computed - (count - 1)

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """What its model answers with a correct cache."""
        return expected_tokens(
            list(prompt), count, self.window, recurrent=self.is_recurrent
        )

    def close(self, *, idle: bool = True) -> None:
        """End the engine, with an integrity check.

        Args:
            idle: wait until nothing is under way before the workers end.
        """
        check_scheduler_side(ferry_of(self.engine.connector).scheduler_side)
        self.engine.close()
        try:
            for worker in self.workers if idle else ():
                wait_until_idle(ferry_of(worker).worker_side.worker)
        finally:
            for worker in self.workers:
                worker.shutdown()

    def answer_oldest(self) -> None:
        answered, reported = self.steps_in_flight.popleft()
        outputs = [
            ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=one)
            for one in reported
        ]
        self.engine.finish(
            answered, worker=self.aggregator.aggregate(outputs).kv_connector_output
        )

    def _add_siblings(self) -> None:
        """Replaces the process groups of several ranks while the caches are registered."""
        for worker in self.ferry_workers:
            worker.add_siblings([one.description for one in self.ferry_workers])

    def _add_worker(
        self, runner: RunnerType, place: Place, cache_config: Any
    ) -> dict[str, torch.Tensor]:
        config = self.engine.config
        # One process has one rank, so the place of a worker of several is passed in.
        reported = mock.patch.multiple(
            "kvferry.connector.worker_side.side",
            place_of_this_worker=lambda: place,
            gather_workers=lambda mine, _: (mine,) * config.parallel_config.world_size,
        )
        with (
            set_current_vllm_config(config),
            reported if config.parallel_config.world_size > 1 else nullcontext(),
        ):
            worker: Any = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, cache_config
            )
            sizes = [BLOCK_TOKENS] * len(cache_config.kv_cache_groups)
            caches: dict[str, torch.Tensor] = allocate_kv_cache(
                cache_config, torch.device("cpu"), KVCacheLayout.LBHNC, sizes
            )
            self.workers.append(worker)
            self.runners.append(runner(config, worker, caches))
        return caches
