"""The environment variables of the accuracy test: defaults, bad values by name, GPUs counted."""

from __future__ import annotations

import pytest

from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.settings import (
    BadSetting,
    notes,
    read_settings,
)


def test_without_any_variable_a_machine_without_gpus_compares_exactly_on_the_cpu() -> (
    None
):
    settings = read_settings({}, gpus=0)
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert settings.models == ("SmolLM2-135M-Instruct",)
    assert settings.connector_module == "kvferry.connector"


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("NUM_PREFILL_INSTANCES", "two", "a whole number from 1 to 64"),
        ("NUM_DECODE_INSTANCES", "0", "a whole number from 1 to 64"),
        ("GPU_MEMORY_UTILIZATION", "20", "a number from 0.01 to 1"),
        ("GPU_MEMORY_UTILIZATION", "nan", "a number from 0.01 to 1"),
        ("PREFILL_BLOCK_SIZE", "100", "auto, a power of two or a multiple of 16"),
        ("DECODE_BLOCK_SIZE", "-128", "auto, a power of two or a multiple of 16"),
        ("DECODER_KV_LAYOUT", "hnd", "one of empty, HND, NHD, LBHNC"),
        ("CPU_KVCACHE_GIB", "0.5", "a whole number from 1 to 1024"),
        ("DECODER_TP_SIZE", "7", "a divisor of 8, the attention heads of tiny-llama"),
        ("DTYPE", "fp8", "one of auto, float32, bfloat16, float16"),
        ("KV_BUFFER_DEVICE", "gpu", "one of empty, cuda, cpu"),
        ("KV_BUFFER_DEVICE", "cuda", "cpu or empty on CPU"),
        ("KV_CONNECTOR_EXTRA_CONFIG", "[1]", "a JSON object"),
        ("KV_CONNECTOR_EXTRA_CONFIG", "{", "a JSON object"),
        ("KV_LOAD_FAILURE_POLICY", "ignore", "one of recompute, fail"),
        ("KVFERRY_DEVICE", "tpu", "one of auto, cpu, cuda"),
        ("MODEL_NAMES", ",", "at least one name"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_what_is_valid(
    name: str, value: str, valid: str
) -> None:
    with pytest.raises(BadSetting) as caught:
        read_settings({name: value}, gpus=0)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert valid in str(caught.value)


def test_one_gpu_is_enough_for_engines_of_one_worker_each() -> None:
    settings = read_settings({}, gpus=1)
    assert (settings.device, settings.gpus) == ("cuda", ("0",))
    fleet = plan_fleet(settings, "m", {})
    assert (
        fleet.baseline.devices
        == fleet.prefill[0].devices
        == fleet.decode[0].devices
        == ("0",)
    )
    assert fleet.baseline.shares_gpu_with(fleet.prefill[0])
    assert "share 1 GPUs" in notes(settings, {})[0]
    assert notes(read_settings({}, gpus=2), {}) == []
    alone = plan_fleet(read_settings({}, gpus=2), "m", {})
    assert not alone.baseline.shares_gpu_with(alone.prefill[0])
    on_cpu = plan_fleet(read_settings({"KVFERRY_DEVICE": "cpu"}, gpus=1), "m", {})
    assert not on_cpu.baseline.shares_gpu_with(on_cpu.baseline)
    assert read_settings({"CUDA_VISIBLE_DEVICES": "0,0"}, gpus=1).gpus == ("0", "0")


@pytest.mark.parametrize(
    ("variables", "gpus", "error"),
    [
        (
            {"GPU_MEMORY_UTILIZATION": "0.5"},
            1,
            r"GPU_MEMORY_UTILIZATION='0.5' .* at most 0.45: 2 engines share GPU 0",
        ),
        (
            {"NUM_PREFILL_INSTANCES": "4"},
            1,
            r"GPU_MEMORY_UTILIZATION='0.2' .* at most 0.18: 5 engines share GPU 0",
        ),
        (
            {"DECODER_TP_SIZE": "2"},
            1,
            r"1 decode × TP 2: an engine has 2 workers, and there are 1 GPUs .*lower PREF",
        ),
        (
            {"DECODER_TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,0"},
            1,
            r"2 workers, and there are 1 GPUs",
        ),
        (
            {"PREFILLER_TP_SIZE": "2", "PREFILLER_PP_SIZE": "2"},
            3,
            r"TP 2 × PP 2 .*4 workers, and there are 3 GPUs",
        ),
        (
            {"DP_EP": "1", "MODEL_NAMES": "m", "DECODER_TP_SIZE": "2"},
            1,
            r"DP 2 × TP 1: an engine has 2 workers",
        ),
        (
            {"KVFERRY_DEVICE": "cuda"},
            0,
            r"KVFERRY_DEVICE=cuda needs GPUs for 1 prefill × TP 1 \+ 1 decode × TP 1",
        ),
    ],
)
def test_engines_that_gpus_cannot_hold_are_refused_before_anything_is_installed(
    variables: dict[str, str], gpus: int, error: str
) -> None:
    with pytest.raises(BadSetting, match=error):
        read_settings(variables, gpus=gpus)
