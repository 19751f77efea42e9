"""A whole engine in this process: vLLM's scheduler, a real worker side with real NIXL under it, and a toy model.

The toy model is an attention in miniature: what it writes into the cache for a token depends on what it *reads* there
for the token before, and it samples from what it reads last. So a block that holds other bytes than it should gives
other tokens, as in a real engine, and `expected_tokens` says what the right ones are.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.engine_core.driver import BLOCK_TOKENS, LAYER, Answer, Engine, Scheduled, kv_cache_config
from tests.engine_core.second_runner import FirstRunner, SecondRunner

_MODULUS = 65521
_LAYER_MODULE = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend, isa="vec")
"""What stands for the attention layer where vLLM looks layers up by name."""
_PATIENCE_S = 20.0


def next_state(state: int, token: int) -> int:
    return (31 * state + token + 1) % _MODULUS


def sampled_from(state: int) -> int:
    return state % 997 + 1


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the toy model answers when its cache is right."""
    state = 0
    for token in prompt:
        state = next_state(state, token)
    answer = []
    for _ in range(count):
        answer.append(sampled_from(state))
        state = next_state(state, answer[-1])
    return answer


class ToyModel:
    """Reads and writes the cache of one engine, `[blocks, heads, tokens, elements]` float32."""

    def __init__(self, engine: Engine, cache: torch.Tensor) -> None:
        self._engine, self._cache = engine, cache

    def forward(self, output: Any) -> None:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            request = self._engine.scheduler.requests[name]
            blocks = self._engine.block_ids(name)
            for position in range(starts[name], starts[name] + count):
                before = self._read(blocks, position - 1) if position else 0
                self._write(blocks, position, next_state(before, request.all_token_ids[position]))

    def sample(self, request_id: str) -> int:
        request = self._engine.scheduler.requests[request_id]
        return sampled_from(self._read(self._engine.block_ids(request_id), request.num_tokens - 1))

    def poison(self) -> None:
        """Overwrite the whole cache, as if every block had been given to somebody else."""
        self._cache.fill_(9999.0)

    def _read(self, blocks: list[int], position: int) -> int:
        cell = self._cache[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS, :]
        return int(cell.min()) if bool((cell == cell.flatten()[0]).all()) else -1

    def _write(self, blocks: list[int], position: int, state: int) -> None:
        self._cache[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS, :] = float(state)


def between_processes(value: Any) -> Any:
    """What arrives when vLLM sends a value from the scheduler's process to a worker's, or back."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def side_channel(port: int) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")}
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "127.0.0.1", str(port)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_parallel_state(config: Any) -> None:
    """vLLM's process groups of one process, once."""
    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")


def stop_parallel_state() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class Node:
    """One engine with its worker. `step` is one turn of the engine's loop."""

    def __init__(
        self, role: str, *, runner: type[FirstRunner] | type[SecondRunner] = FirstRunner, port: int = 0, **config: Any
    ) -> None:
        self.port = port or free_port()
        config.setdefault("engine_id", f"{role}-{self.port}")
        with side_channel(self.port):
            self.engine = Engine("NixlConnector", module="kvferry.connector", role=role, **config)
            start_parallel_state(self.engine.config)
            self.engine.config.compilation_config.static_forward_context[LAYER] = _LAYER_MODULE
            self.worker: Any = KVConnectorFactory.create_connector(
                self.engine.config, KVConnectorRole.WORKER, kv_cache_config(self.engine.cache_config.num_blocks)
            )
        caches = allocate_kv_cache(self.engine.cache_config, torch.device("cpu"), KVCacheLayout.LBHNC, [BLOCK_TOKENS])
        self.model = ToyModel(self.engine, caches[LAYER])
        self.engine.sample = self.model.sample
        with set_current_vllm_config(self.engine.config):
            self.runner = runner(self.engine.config, self.worker, caches)
        metadata = between_processes(self.worker.get_handshake_metadata())
        self.engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        self.run_step: Callable[..., Any] = self.runner.step

    def step(self) -> Scheduled:
        step = self.engine.schedule()
        step.output.kv_connector_metadata = between_processes(step.output.kv_connector_metadata)
        report = self.run_step(step.output, self.model.forward)
        self.engine.finish(step, worker=between_processes(report))
        return step

    def until(self, over: Callable[[], bool]) -> None:
        """Step until `over`; the transfer threads work meanwhile."""
        deadline = time.monotonic() + _PATIENCE_S
        while not over():
            if time.monotonic() > deadline:
                states = {name: self.engine.status(name) for name in self.engine.scheduler.requests}
                raise AssertionError(f"not over after {_PATIENCE_S:g} s; requests: {states}")
            self.step()
            time.sleep(0.001)

    def answer(self, request_id: str) -> Answer:
        """Step until the request has ended."""
        self.until(lambda: self.engine.answers[request_id].finish_reason is not None)
        return self.engine.answers[request_id]

    def prefill(self, request_id: str, prompt: Sequence[int], **request: Any) -> dict[str, Any]:
        """Prefill for another engine; the params that came back, as they come out of a client's JSON."""
        self.engine.add(request_id, prompt, {"do_remote_decode": True}, max_tokens=1, **request)
        params = self.answer(request_id).params
        assert params is not None, "the producer made no offer"
        self.step()  # the workers learn that the blocks are held
        return params

    def close(self) -> None:
        self.engine.close()
        self.worker.shutdown()
