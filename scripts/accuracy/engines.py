"""vLLM engines and vllm-router: what to start, and the running servers.

Tests use it too:

    spec = EngineSpec(name="d", model=str(path), devices=("0",), transfer=Transfer("kv_consumer"))
    with Engine(spec, log_dir=tmp_path) as engine:
        engine.wait_ready(300)
        httpx.post(engine.base_url + "/v1/completions", json={"model": spec.served_name, …})
        engine.metrics().total("vllm:kvferry_loads_total")
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.accuracy.devices import free_port_range, free_ports
from scripts.accuracy.metrics import Scrape, scrape
from scripts.accuracy.processes import Server
from scripts.accuracy.settings import STOCK


@dataclass(frozen=True, slots=True)
class Transfer:
    """The KV connector of an engine.

    Attributes:
        role: `kv_producer`, `kv_consumer` or `kv_both`.
        module: module of the class; `stock` for the connector that comes with vLLM.
        engine_id: empty for one that vLLM draws at every start.
        buffer_device: `cpu` to transfer through host memory; empty for vLLM's default.
    """

    role: str
    module: str = "kvferry.connector"
    connector: str = "NixlConnector"
    failure_policy: str = "recompute"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    engine_id: str = ""
    buffer_device: str = ""

    def config(self) -> str:
        """The value of `--kv-transfer-config`."""
        fields: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_load_failure_policy": self.failure_policy,
        }
        if self.module != STOCK:
            fields["kv_connector_module_path"] = self.module
        if self.buffer_device:
            fields["kv_buffer_device"] = self.buffer_device
        if self.engine_id:
            fields["engine_id"] = self.engine_id
        if self.extra_config:
            fields["kv_connector_extra_config"] = dict(self.extra_config)
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to start.

    Attributes:
        name: of the log file and in messages.
        model: a folder or a name on a hub.
        device: `cpu` or `cuda`.
        devices: one core per worker on CPU (one worker each), GPUs on CUDA.
        dp: data parallel ranks, each with workers of its own.
        pp: pipeline stages of each; the workers of a stage are tensor parallel.
        expert_parallel: experts are shared out over all workers of a stage.
        cache_gib: KV cache on CPU.
        transfer: None for a plain engine.
        port: 0 for a free one.
    """

    name: str
    model: str
    device: str = "cpu"
    devices: tuple[str, ...] = ("0",)
    dp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    dtype: str = "float32"
    block_size: int | None = None
    max_model_len: int = 2048
    max_num_seqs: int = 16
    cache_gib: int = 1
    gpu_memory_utilization: float = 0.2
    layout: str = ""
    attention_backend: str = ""
    transfer: Transfer | None = None
    served_name: str = "model"
    port: int = 0
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, port: int) -> list[str]:
        """The command. vLLM's CPU wheel has no working `vllm serve`; the module does the same on every device."""
        options: dict[str, object] = {
            "--model": self.model,
            "--served-model-name": self.served_name,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": self.dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.max_num_seqs,
            "--tensor-parallel-size": len(self.devices) // (self.dp * self.pp),
            "--data-parallel-size": self.dp if self.dp > 1 else None,
            "--pipeline-parallel-size": self.pp if self.pp > 1 else None,
            "--block-size": self.block_size,
            "--gpu-memory-utilization": self.gpu_memory_utilization
            if self.device == "cuda"
            else None,
            "--attention-backend": self.attention_backend or None,
            "--kv-transfer-config": self.transfer.config()
            if self.transfer is not None
            else None,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [
            str(word)
            for name, value in options.items()
            if value is not None
            for word in (name, value)
        ]
        # On CPU the first request ends an engine of several stages that runs eagerly; traced by Dynamo they work.
        command += (
            ["-cc", '{"mode":2,"backend":"eager"}']
            if self._traced
            else ["--enforce-eager"]
        )
        command += [
            "--enable-logging-iteration-details",
            "--disable-uvicorn-access-log",
        ]
        command += ["--enable-expert-parallel"] if self.expert_parallel else []
        return [*command, *self.extra_args]

    @property
    def _traced(self) -> bool:
        return self.device == "cpu" and self.pp > 1

    def shares_gpu_with(self, other: EngineSpec) -> bool:
        """Whether a GPU is used by both."""
        return self.device == "cuda" == other.device and not set(
            self.devices
        ).isdisjoint(other.devices)

    def environment(self, side_channel_port: int) -> dict[str, str]:
        """Variables that are added to the environment.

        On CPU each worker has one core, or two engines on two cores fight for both.
        torch.compile is off there: vLLM's sampler would compile with g++, which a user's machine may not have, and
        the first request would wait half a minute for it. Not so with several stages, which need it. PyTorch takes
        its memory in huge pages, in which caches are read faster.
        """
        added = {"VLLM_NO_USAGE_STATS": "1"}
        if Path(self.model).is_dir():
            added["HF_HUB_OFFLINE"] = "1"
        if self.device == "cpu":
            added["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(self.devices)
            added["VLLM_CPU_KVCACHE_SPACE"] = str(self.cache_gib)
            added["THP_MEM_ALLOC_ENABLE"] = "1"
            if not self._traced:
                added["TORCH_COMPILE_DISABLE"] = "1"
        else:
            added["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.layout:
            added["VLLM_KV_CACHE_LAYOUT"] = self.layout
        if self.transfer is not None:
            added["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            added["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
        return {**added, **self.extra_env}


class Engine(Server):
    """A vLLM engine, started by `start` or as a context manager, ready after `wait_ready`."""

    def __init__(self, spec: EngineSpec, log_dir: Path) -> None:
        self.spec = spec
        first = free_port_range(1 + spec.dp)
        self.port = spec.port or first
        self.side_channel_port = first + 1
        super().__init__(
            name=f"engine {spec.name}",
            command=spec.arguments(self.port),
            base_url=f"http://127.0.0.1:{self.port}",
            log_path=log_dir / f"{spec.name}.log",
            environment=spec.environment(self.side_channel_port),
        )

    def metrics(self) -> Scrape:
        """The current values of `/metrics`."""
        return scrape(self.base_url)


class Router(Server):
    """vllm-router, which sends each prompt to one of the prefill engines and then to one of the decode engines."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        log_dir: Path,
        timeout_s: float,
        more: Sequence[str] = (),
    ) -> None:
        port, prometheus_port = free_ports(2)
        command = [
            str(Path(sys.executable).parent / "vllm-router"),
            "--vllm-pd-disaggregation",
        ]
        command += [
            "--kv-connector",
            "nixl",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        command += [
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            str(prometheus_port),
        ]
        command += [
            "--policy",
            "round_robin",
            "--disable-retries",
            "--request-timeout-secs",
            str(int(timeout_s)),
        ]
        command += [part for url in prefill for part in ("--prefill", url)]
        command += [part for url in decode for part in ("--decode", url)]
        url = f"http://127.0.0.1:{port}"
        super().__init__(
            "vllm-router",
            [*command, *more],
            url,
            log_dir / "router.log",
            {"NO_COLOR": "1"},
        )
