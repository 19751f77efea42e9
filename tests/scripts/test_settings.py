"""The environment variables of the accuracy test: defaults, bad values by name, GPUs counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.settings import (
    ATTENTION_HEADS,
    DEFAULT_MODEL,
    ROOT,
    SMALL_MODELS,
    TINY_MODEL,
    BadSetting,
    notes,
    read_settings,
)
from tests.vllm import small_models


def test_without_any_variable_a_machine_without_gpus_compares_exactly_on_the_cpu() -> None:
    settings = read_settings({}, gpus=0)
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert settings.models == ("SmolLM2-135M-Instruct",)
    assert settings.connector_module == "kvferry.connector"


def test_gpus_are_used_when_there_are_some() -> None:
    settings = read_settings({}, gpus=2)
    assert (settings.device, settings.dtype) == ("cuda", "bfloat16")


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
    assert fleet.baseline.devices == fleet.prefill[0].devices == fleet.decode[0].devices == ("0",)
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


def test_dp_ep_makes_data_parallel_ranks_of_the_decoders_tp_size_and_needs_experts() -> None:
    wanted = {"DP_EP": "1", "MODEL_NAMES": "m", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"}
    settings = read_settings(wanted, gpus=4)
    assert (settings.dp_ep, settings.decode_dp, settings.decode_tp, settings.prefill_tp) == (
        True,
        2,
        1,
        2,
    )
    assert settings.decode_workers == 2
    assert not read_settings({"DP_EP": ""}, gpus=0).dp_ep
    with pytest.raises(
        BadSetting, match=r"MODEL_NAMES='SmolLM2-135M-Instruct' .* a model with experts for DP_EP"
    ):
        read_settings({"DP_EP": "1"}, gpus=0)


@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        (1, 1, DEFAULT_MODEL),
        (3, 1, DEFAULT_MODEL),
        (2, 2, TINY_MODEL),
        (1, 2, TINY_MODEL),
        (2, 1, TINY_MODEL),
    ],
)
def test_without_a_name_a_model_is_taken_that_the_tensor_parallel_sizes_divide(
    prefill: int, decode: int, model: str
) -> None:
    sizes = {"PREFILLER_TP_SIZE": str(prefill), "DECODER_TP_SIZE": str(decode)}
    settings = read_settings(sizes, gpus=0)
    assert settings.models == (model,)
    assert [model in note for note in notes(settings, sizes)] == [True] * (model == TINY_MODEL)
    if model == TINY_MODEL:
        with pytest.raises(
            BadSetting, match=r"TP_SIZE='2' .* a divisor of 9, .*MODEL_NAMES=tiny-llama has sizes"
        ):
            read_settings({**sizes, "MODEL_NAMES": DEFAULT_MODEL}, gpus=0)


def test_the_heads_of_a_model_in_a_folder_are_known_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    variables = {"MODEL_NAMES": str(tmp_path), "DECODER_TP_SIZE": "2"}
    for text in ("", "[]", '{"num_attention_heads": 6}'):
        (tmp_path / "config.json").write_text(text)
        read_settings(variables, gpus=0)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 5}')
    with pytest.raises(BadSetting, match="a divisor of 5, the attention heads of"):
        read_settings(variables, gpus=0)


def test_the_heads_of_models_that_are_made_here_are_those_of_their_configurations() -> None:
    for name in SMALL_MODELS:
        assert (
            small_models.SMALL_MODELS[name].settings["num_attention_heads"] == ATTENTION_HEADS[name]
        )


@pytest.mark.parametrize(
    ("variables", "layouts"),
    [
        ({"DECODER_KV_LAYOUT": "BLHNC", "PREFILLER_KV_LAYOUT": "LBHNC"}, ("LBHNC", "BLHNC")),
        ({"CROSS_LAYERS": "1"}, ("BLHNC", "BLHNC")),
        ({"CROSS_LAYERS": "1", "DECODER_KV_LAYOUT": "NHD"}, ("BLHNC", "BLNHC")),
        ({"CROSS_LAYERS": "1", "DECODER_KV_LAYOUT": "BHLNC"}, ("BLHNC", "BHLNC")),
    ],
)
def test_layouts_have_all_of_vllms_names_and_cross_layers_puts_a_blocks_layers_together(
    variables: dict[str, str], layouts: tuple[str, str]
) -> None:
    settings = read_settings(variables, gpus=2)
    assert (settings.prefill_layout, settings.decode_layout) == layouts


def test_the_cpu_has_no_other_layout() -> None:
    for name in ("DECODER_KV_LAYOUT", "PREFILLER_KV_LAYOUT"):
        with pytest.raises(BadSetting, match=name):
            read_settings({name: "NHD"}, gpus=0)
        assert read_settings({name: "LBHNC"}, gpus=0).device == "cpu"
    settings = read_settings({"CROSS_LAYERS": "1"}, gpus=0)
    assert settings.decode_layout == ""
    assert "changes nothing on CPU" in notes(settings, {})[0]


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "shown"),
    [
        (["--help"], {}, 0, "PREFILLER_TP_SIZE"),
        (["--check"], {"KVFERRY_DEVICE": "cpu"}, 0, "cpu"),
        (
            ["--check", "--kv_buffer_device", "cpu", "--attention-backend", "X"],
            {"KVFERRY_DEVICE": "cpu"},
            0,
            "cpu",
        ),
        (["--check", "--enable-cross-layers"], {"KVFERRY_DEVICE": "cpu"}, 0, "cpu"),
        (
            ["--check"],
            {"KVFERRY_DEVICE": "cpu", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"},
            0,
            "cpu",
        ),
        (
            ["--check", "--kv_buffer_device", "disk"],
            {"KV_BUFFER_DEVICE": "cpu"},
            2,
            "KV_BUFFER_DEVICE='disk' cannot",
        ),
        (
            ["--check", "--kv-buffer-device", "cpu"],
            {},
            2,
            "unrecognized arguments: --kv-buffer-device",
        ),
        (["--check"], {"DTYPE": "int3"}, 2, "DTYPE='int3' cannot be used"),
    ],
)
def test_settings_are_checked_before_anything_is_installed(
    arguments: list[str], variables: dict[str, str], status: int, shown: str
) -> None:
    # -I -S: no site-packages, as on a machine where only Python is installed.
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts.accuracy.__main__ import main; "
    program += f"sys.exit(main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **variables},
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert shown in done.stdout + done.stderr
