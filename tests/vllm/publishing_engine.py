"""Engines that publish vLLM's KV events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.accuracy.devices import free_ports
from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.small_models import default_cache_dir, small_model
from tests.vllm.forked_server import ForkedServer

BLOCK = 32
"""The least that vLLM's attention on a CPU takes."""


def publishing_server(
    name: str, core: str, role: str, logs: Path, *, env: Mapping[str, str], args: Sequence[str] = ()
) -> tuple[ForkedServer, str]:
    """A server that is not started yet, of a small Llama with 256 blocks, and where it will publish.

    Args:
        role: `kv_role`.
        env, args: beside those that its events need.
    """
    (port,) = free_ports(1)
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    spec = EngineSpec(
        name,
        str(small_model("small-llama-4", default_cache_dir())),
        devices=(core,),
        block_size=BLOCK,
        max_model_len=1024,
        transfer=Transfer(role),
        extra_args=(
            "--skip-tokenizer-init",
            "--num-gpu-blocks-override",
            "256",
            *("--kv-events-config", json.dumps(config)),
            *args,
        ),
        extra_env=dict(env),
    )
    return ForkedServer(spec, logs), f"tcp://127.0.0.1:{port}"
