"""The engines of a run: which there are, and what each is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scripts.accuracy.devices import hand_out_cores, hand_out_gpus
from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.accuracy.settings import ROOT, Settings

POISON_MODULE = "scripts.accuracy.poison"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of one model.

    Attributes:
        baseline: a single engine with the first decoder's settings and devices; it is gone before that one is asked.
        poisoner: the first prefill engine, with a connector that overwrites its cache.
    """

    baseline: EngineSpec
    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...]
    poisoner: EngineSpec


def plan_fleet(
    settings: Settings,
    model: str,
    environment: Mapping[str, str],
    prefill_args: tuple[str, ...] = (),
) -> Fleet:
    """Hand out devices: decoders first, so that the baseline has a place while the prefill engines start.

    Args:
        prefill_args: more arguments for prefill engines.
    """
    decoders = settings.decode_instances
    needs = [settings.decode_workers] * decoders + [
        settings.prefill_workers
    ] * settings.prefill_instances
    shares = (
        hand_out_gpus(needs, settings.gpus)
        if settings.device == "cuda"
        else hand_out_cores(needs)
    )
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
    consumer = Transfer(
        role="kv_consumer",
        module=settings.connector_module,
        failure_policy=settings.failure_policy,
        extra_config=settings.extra_config,
        # As upstream's script: a buffer where the caches are is vLLM's default and is not named.
        buffer_device=settings.kv_buffer_device
        if settings.kv_buffer_device != "cuda"
        else "",
    )
    producer = replace(consumer, role="kv_producer")
    decode = replace(
        common,
        dp=settings.decode_dp,
        pp=settings.decode_pp,
        expert_parallel=settings.dp_ep,
        block_size=settings.decode_block_size,
        layout=settings.decode_layout,
    )
    prefill = replace(
        common,
        pp=settings.prefill_pp,
        block_size=settings.prefill_block_size,
        layout=settings.prefill_layout,
        transfer=producer,
        extra_args=(*prefill_args, *settings.extra_args),
    )
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    poisoned = replace(producer, module=POISON_MODULE, connector="NixlConnector")
    return Fleet(
        baseline=replace(decode, name="baseline", devices=shares[0]),
        prefill=tuple(
            replace(prefill, name=f"prefill-{number}", devices=share)
            for number, share in enumerate(shares[decoders:])
        ),
        decode=tuple(
            replace(decode, name=f"decode-{number}", devices=share, transfer=consumer)
            for number, share in enumerate(shares[:decoders])
        ),
        poisoner=replace(
            prefill,
            name="prefill-poisoned",
            devices=shares[decoders],
            transfer=poisoned,
            extra_env={"PYTHONPATH": path},
        ),
    )
