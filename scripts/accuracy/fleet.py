"""Which engines a run has, and what each is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.accuracy.gpus import hand_out_cores, hand_out_gpus
from scripts.accuracy.settings import ROOT, Settings

POISON_MODULE = "scripts.accuracy.poison"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of one model.

    Attributes:
        baseline: a single engine with the first decoder's settings and devices; it is gone before that one starts.
    """

    baseline: EngineSpec
    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...]

    @property
    def poisoner(self) -> EngineSpec:
        """The first prefill engine, with a connector that overwrites its cache."""
        first = self.prefill[0]
        if first.transfer is None:
            raise ValueError("a prefill engine has a connector")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        transfer = replace(first.transfer, module=POISON_MODULE, connector="NixlConnector")
        return replace(
            first, name="prefill-poisoned", transfer=transfer, extra_env={**first.extra_env, "PYTHONPATH": path}
        )


def plan_fleet(settings: Settings, model: str, environment: Mapping[str, str]) -> Fleet:
    """Hand out devices: decoders first, so that the baseline has a place while the prefill engines start."""
    needs = [settings.decode_workers] * settings.decode_instances
    needs += [settings.prefill_workers] * settings.prefill_instances
    shares = hand_out_gpus(needs, environment) if settings.device == "cuda" else hand_out_cores(needs)
    common = EngineSpec(
        name="",
        model=model,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(16, 2 * settings.concurrency),
        cache_gib=settings.cpu_cache_gib,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        attention_backend=settings.attention_backend,
        extra_args=settings.extra_args,
    )
    transfer = Transfer(
        role="kv_consumer",
        module=settings.connector_module,
        failure_policy=settings.failure_policy,
        extra_config=settings.extra_config,
        # As upstream's script: a buffer where the caches are is vLLM's default and is not named.
        buffer_device=settings.kv_buffer_device if settings.kv_buffer_device != "cuda" else "",
    )
    decode = tuple(
        replace(
            common,
            name=f"decode-{index}",
            devices=shares[index].ids,
            dp=settings.decode_dp,
            pp=settings.decode_pp,
            expert_parallel=settings.dp_ep,
            block_size=settings.decode_block_size,
            layout=settings.decode_layout,
            transfer=transfer,
        )
        for index in range(settings.decode_instances)
    )
    prefill = tuple(
        replace(
            common,
            name=f"prefill-{index}",
            devices=shares[settings.decode_instances + index].ids,
            pp=settings.prefill_pp,
            block_size=settings.prefill_block_size,
            transfer=replace(transfer, role="kv_producer"),
        )
        for index in range(settings.prefill_instances)
    )
    return Fleet(replace(decode[0], name="baseline", transfer=None), prefill, decode)
