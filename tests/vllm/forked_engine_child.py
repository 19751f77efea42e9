"""The child's end of a forked engine: vLLM's `LLMEngine`, stepped between the commands that come through a pipe."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CACHE_TOKENS = 4096
_SNAPSHOT_S = 30.0
_PATIENCE_S = 120.0
"""How long a request may wait to hear who has the first part of its prompt."""

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class EngineSpec:
    """The engine to start.

    Attributes:
        role: of the connector; empty for an engine without one.
        block_size: tokens; None for the engine's own choice.
        cores: of the workers, in their order.
        engine_args: more of vLLM's `EngineArgs`, or others in place of those chosen here.
        environment: variables of its process.
    """

    name: str
    model: str
    role: str = ""
    tp: int = 1
    pp: int = 1
    block_size: int | None = 128
    module: str = "kvferry.connector"
    cores: str = "0"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their log-probabilities, and the params that came with them."""

    tokens: list[int]
    logprobs: list[float]
    params: dict[str, Any] | None


def main(spec: EngineSpec, port: int, pipe: Connection, log_path: str) -> None:
    """Run the engine until the pipe is closed; its output goes to the log."""
    with open(log_path, "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        engine = ChildEngine(spec, port)
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise
    pipe.send(("", None))
    engine.serve(pipe)
    sys.stdout.flush()


class ChildEngine:
    """Steps the engine, and answers between steps."""

    def __init__(self, spec: EngineSpec, port: int) -> None:
        os.environ.update(_SETTINGS)
        os.environ.update(spec.environment)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = spec.cores
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        import multiprocessing

        import torch
        import torch._dynamo
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.mamba import mamba_mixer2
        from vllm.model_executor.layers.mamba.abstract import MambaBase
        from vllm.model_executor.models import registry
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import multiproc_executor
        from vllm.v1.worker import mamba_utils

        torch.set_num_threads(1)
        # TORCH_COMPILE_DISABLE was read when torch was imported. Compiling the sampler takes half a minute.
        torch._dynamo.config.disable = spec.pp == 1
        # vLLM would spawn its workers, each of which would import all of it anew.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        # vLLM's prefix cache of recurrent states is for GPUs: a Triton kernel copies them from block to block, and the
        # CPU's kernel has none of within a pass, which Mamba-2 says it can keep. Without that, a pass ends there.
        mamba_utils.batch_memcpy = copy_in_memory
        mamba_mixer2.MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
        # vLLM would look at a model's class in an interpreter of its own, so as not to touch CUDA.
        registry._run_in_subprocess = lambda look: look()
        transfer = None
        if spec.role:
            transfer = KVTransferConfig(
                kv_connector="NixlConnector",
                kv_connector_module_path=spec.module,
                kv_role=spec.role,
                kv_load_failure_policy="recompute",
                # A machine with other things to do must not decide: no test here is about time.
                kv_connector_extra_config={
                    "kv_lease_duration": 120,
                    "handshake_timeout_s": 60,
                    **spec.extra_config,
                },
            )
        pipelined: dict[str, Any] = {
            "compilation_config": {"mode": 2, "backend": "eager"}
        }
        arguments: dict[str, Any] = {
            "model": spec.model,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "block_size": spec.block_size,
            "num_gpu_blocks_override": _CACHE_TOKENS
            // (spec.block_size or 16),  # a GiB would take a second to fill
            "tensor_parallel_size": spec.tp,
            "pipeline_parallel_size": spec.pp,
            "kv_transfer_config": transfer,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            **({"enforce_eager": True} if spec.pp == 1 else pipelined),
        }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments | dict(spec.engine_args))
        )
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        from kvferry.connector.scheduler_side import steps

        steps.MAX_IDLE_S = 0.05  # `free_blocks` is to know soon what is free
        from kvferry.scheduler.consumer.pull_estimate import PullEstimate

        # Such models compute a prompt sooner than any answer comes.
        type.__setattr__(PullEstimate, "wait_s", lambda *_: _PATIENCE_S)
        self._asked = 0
        self._answers: dict[str, Answer] = {}
        self._held_at: int | None = None

    def serve(self, pipe: Connection) -> None:
        while True:
            busy = self._scheduler.has_requests() and not self._is_held()
            if pipe.poll(0.0 if busy else 0.05):
                try:
                    name, *arguments = pipe.recv()
                except EOFError:
                    break
                pipe.send(("", getattr(self, name)(*arguments)))
            elif busy:
                self._step()
        self._engine.engine_core.shutdown()

    def ask(
        self,
        prompt: list[int],
        tokens: int,
        params: dict[str, Any] | None,
        more: dict[str, Any],
    ) -> Answer:
        """One request, and its answer. For `more` see `begin`."""
        name = self.begin(prompt, tokens, params, more)
        while name not in self._answers:
            self._step()
        return self._answers.pop(name)

    def begin(
        self,
        prompt: list[int],
        tokens: int,
        params: dict[str, Any] | None,
        more: dict[str, Any],
    ) -> str:
        """A request that is served between commands; returns its id.

        Args:
            more: `id`: the request's; `lora`: the folder of an adapter; `salt`: its `cache_salt`; `image`: of PIL.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self._asked += 1
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        if "salt" in more:
            asked["cache_salt"] = more["salt"]
        if "image" in more:
            asked["multi_modal_data"] = {"image": more["image"]}
        name, lora = more.get("id", str(self._asked)), _lora(more.get("lora"))
        self._engine.add_request(name, asked, sampling, lora_request=lora)
        return str(name)

    def hold_at(self, tokens: int | None) -> None:
        """Take no step while as many tokens of any request are computed; None: go on."""
        self._held_at = tokens

    def _is_held(self) -> bool:
        if self._held_at is None:
            return False
        computed = [each.num_computed_tokens for each in self._scheduler.running]
        return max(computed, default=0) >= self._held_at

    def result(self, name: str) -> Answer | None:
        """The answer to a request that was begun, once; None while there is none."""
        return self._answers.pop(name, None)

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                (said,) = output.outputs
                logprobs = [
                    each[token].logprob
                    for token, each in zip(said.token_ids, said.logprobs, strict=True)
                ]
                answer = Answer(
                    list(said.token_ids), logprobs, output.kv_transfer_params
                )
                self._answers[output.request_id] = answer

    def sleep(self, level: int) -> None:
        # As the loop of a server does, whose pause ends when no step is needed any more.
        while not self._engine.reset_prefix_cache(reset_connector=True):
            self._step()
        self._engine.sleep(level)

    def wake_up(self) -> None:
        assert self._engine.wake_up()

    def metrics(self) -> str:
        from prometheus_client import generate_latest

        return str(generate_latest(), "utf-8")

    def on_workers(
        self, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> list[Any]:
        return list(self._engine.collective_rpc(function, args=arguments))

    def groups(self) -> list[list[str]]:
        return [
            group.layer_names
            for group in self._scheduler.kv_cache_config.transfer_groups
        ]

    def free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def copy_in_memory(sources: Any, targets: Any, sizes: Any) -> None:
    """Copy bytes between addresses, three tensors of as many numbers."""
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)


def _caches(worker: Any) -> dict[str, Any]:
    """By layer its tensor, or those of its states; block by block."""
    # The executor wraps the CPU worker where it is in the engine's own process.
    runner = getattr(worker, "worker", worker).model_runner
    context = runner.compilation_config.static_forward_context
    return {
        name: layer.kv_cache
        for name, layer in context.items()
        if hasattr(layer, "kv_cache")
    }


def flip_a_byte(worker: Any, layer: str, block: int, which: int) -> None:
    """Invert the sign of a number in a block of a worker's cache."""
    import torch

    cache = _caches(worker)[layer]
    if hasattr(cache, "shape"):
        cache[block][
            (0,) * (cache.dim() - 1)
        ].neg_()  # of the first token: what lies behind the last one is not read
    else:
        state = cache[which][block]
        state[torch.unravel_index(state.abs().argmax(), state.shape)] *= -1


def early_bytes(_: Any) -> int:
    """What the loads under way have read so far of prompts that are still computed, by this worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    seen = connector.worker_side.worker.snapshot(_SNAPSHOT_S)
    return sum(record.early_bytes for record in seen.begun) if seen else 0


def _lora(folder: str | None) -> Any:
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=Path(folder).name, lora_int_id=1, lora_path=folder)
