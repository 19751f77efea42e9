"""The environment variables of the accuracy test: defaults, bad values by name, GPUs counted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.accuracy.settings import ROOT, BadSetting, read_settings


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
        ("DECODER_KV_LAYOUT", "hnd", "one of empty, HND, NHD"),
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
def test_a_bad_value_is_refused_with_name_value_and_what_is_valid(name: str, value: str, valid: str) -> None:
    with pytest.raises(BadSetting) as caught:
        read_settings({name: value}, gpus=0)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert valid in str(caught.value)


def test_too_few_gpus_are_counted_out() -> None:
    wanted = {"NUM_PREFILL_INSTANCES": "2", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"}
    with pytest.raises(BadSetting, match=r"needs 6 GPUs: 2 prefill × TP 2 \+ 1 decode × TP 2; found 4; lower NUM_"):
        read_settings(wanted, gpus=4)
    with pytest.raises(BadSetting, match=r"needs 10 GPUs: 2 prefill × TP 2 × PP 2 \+ 1 decode × TP 2; found 6"):
        read_settings({**wanted, "PREFILLER_PP_SIZE": "2"}, gpus=6)
    assert read_settings(wanted, gpus=6).device == "cuda"
    assert read_settings({**wanted, "KVFERRY_DEVICE": "cpu"}, gpus=4).device == "cpu"


def test_dp_ep_makes_data_parallel_ranks_of_the_decoders_tp_size_and_needs_as_many_gpus() -> None:
    wanted = {"DP_EP": "1", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"}
    settings = read_settings(wanted, gpus=4)
    assert (settings.dp_ep, settings.decode_dp, settings.decode_tp, settings.prefill_tp) == (True, 2, 1, 2)
    assert settings.decode_workers == 2
    with pytest.raises(BadSetting, match=r"needs 4 GPUs: 1 prefill × TP 2 \+ 1 decode × DP 2 × TP 1; found 3"):
        read_settings(wanted, gpus=3)
    assert not read_settings({"DP_EP": ""}, gpus=0).dp_ep


def test_the_cpu_has_no_other_layout() -> None:
    for name in ("DECODER_KV_LAYOUT", "PREFILLER_KV_LAYOUT"):
        with pytest.raises(BadSetting, match=name):
            read_settings({name: "NHD"}, gpus=0)


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "shown"),
    [
        (["--help"], {}, 0, "PREFILLER_TP_SIZE"),
        (["--check"], {"KVFERRY_DEVICE": "cpu"}, 0, "cpu"),
        (["--check", "--kv_buffer_device", "cpu", "--attention-backend", "X"], {"KVFERRY_DEVICE": "cpu"}, 0, "cpu"),
        (["--check", "--kv_buffer_device", "disk"], {"KV_BUFFER_DEVICE": "cpu"}, 2, "KV_BUFFER_DEVICE='disk' cannot"),
        (["--check", "--kv-buffer-device", "cpu"], {}, 2, "unrecognized arguments: --kv-buffer-device"),
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
