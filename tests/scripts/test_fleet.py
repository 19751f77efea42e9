"""Engines, GPUs, cores and ports: what is started with what."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from scripts.accuracy import devices, fleet
from scripts.accuracy.devices import (
    free_port_range,
    free_ports,
    hand_out_cores,
    hand_out_gpus,
    visible_gpus,
)
from scripts.accuracy.engines import Engine, EngineSpec
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.settings import read_settings


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "hand_out_cores", lambda needs: hand_out_cores(needs, [0, 1]))


def test_the_baseline_is_the_decoder_without_a_connector() -> None:
    settings = read_settings({"DECODE_BLOCK_SIZE": "64", "DTYPE": "bfloat16"}, gpus=0)
    planned = plan_fleet(settings, "m", {})
    ours, theirs = (spec.arguments(1) for spec in (planned.baseline, planned.decode[0]))
    at = theirs.index("--kv-transfer-config")
    assert theirs[:at] + theirs[at + 2 :] == ours
    assert planned.baseline.devices == planned.decode[0].devices == ("0",)


def test_prefill_and_decode_have_their_roles_block_sizes_and_cores() -> None:
    settings = read_settings({"PREFILL_BLOCK_SIZE": "32", "NUM_PREFILL_INSTANCES": "2"}, gpus=0)
    planned = plan_fleet(settings, "m", {})
    assert [spec.name for spec in (*planned.prefill, *planned.decode)] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    roles = [spec.transfer.role for spec in (*planned.prefill, *planned.decode) if spec.transfer]
    assert roles == ["kv_producer", "kv_producer", "kv_consumer"]
    assert [spec.block_size for spec in planned.prefill] == [32, 32]
    assert planned.decode[0].block_size is None
    assert [spec.devices for spec in planned.prefill] == [("1",), ("0",)]


def test_more_arguments_for_prefill_engines_are_theirs_alone_and_the_users_come_last() -> None:
    planned = plan_fleet(
        read_settings({"VLLM_SERVE_EXTRA_ARGS": "--seed,7"}, gpus=0),
        "m",
        {},
        ("--max-num-seqs", "9"),
    )
    assert (
        planned.prefill[0].extra_args
        == planned.poisoner.extra_args
        == ("--max-num-seqs", "9", "--seed", "7")
    )
    assert planned.decode[0].extra_args == planned.baseline.extra_args == ("--seed", "7")


def test_each_side_has_its_own_cache_layout() -> None:
    planned = plan_fleet(
        read_settings({"PREFILLER_KV_LAYOUT": "NHD", "DECODER_KV_LAYOUT": "HND"}, gpus=2), "m", {}
    )
    layouts = [
        spec.environment(1)["VLLM_KV_CACHE_LAYOUT"]
        for spec in (planned.prefill[0], planned.decode[0])
    ]
    assert layouts == ["NHD", "HND"]
    assert planned.baseline.layout == "HND"


def test_stages_and_ranks_have_a_core_each_and_a_pipeline_is_traced() -> None:
    settings = read_settings(
        {"PREFILLER_PP_SIZE": "2", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"}, gpus=0
    )
    planned = plan_fleet(settings, "m", {})
    assert (len(planned.prefill[0].devices), len(planned.decode[0].devices)) == (4, 2)
    commands = [" ".join(spec.arguments(1)) for spec in (planned.prefill[0], planned.decode[0])]
    assert all("--tensor-parallel-size 2" in command for command in commands)
    assert ["--pipeline-parallel-size 2" in command for command in commands] == [True, False]
    assert ["--enforce-eager" in command for command in commands] == [False, True]
    assert ['-cc {"mode":2,"backend":"eager"}' in command for command in commands] == [True, False]
    off = [
        "TORCH_COMPILE_DISABLE" in spec.environment(1)
        for spec in (planned.prefill[0], planned.decode[0])
    ]
    assert off == [False, True]


def test_with_dp_ep_decoders_and_baseline_are_data_parallel_with_experts_shared_out() -> None:
    settings = read_settings(
        {"DP_EP": "1", "MODEL_NAMES": "m", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"}, gpus=4
    )
    planned = plan_fleet(settings, "m", {})
    for spec in (planned.decode[0], planned.baseline):
        assert "--tensor-parallel-size 1 --data-parallel-size 2" in " ".join(spec.arguments(1))
        assert "--enable-expert-parallel" in spec.arguments(1)
        assert spec.environment(1)["CUDA_VISIBLE_DEVICES"] == "0,1"
    theirs = " ".join(planned.prefill[0].arguments(1))
    assert "--tensor-parallel-size 2" in theirs
    assert "--data-parallel-size" not in theirs
    assert "--enable-expert-parallel" not in theirs


@pytest.mark.parametrize(("device", "named"), [("cpu", "cpu"), ("cuda", None), ("", None)])
def test_the_buffer_device_is_named_to_both_sides_unless_it_is_that_of_the_caches(
    device: str, named: str | None
) -> None:
    planned = plan_fleet(read_settings({"KV_BUFFER_DEVICE": device}, gpus=2), "m", {})
    for spec in (*planned.prefill, *planned.decode, planned.poisoner):
        command = spec.arguments(1)
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert config.get("kv_buffer_device") == named


def test_nvidia_smi_lists_gpus_with_their_partitions_which_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: A'\necho '  MIG 1g.10gb     Device  0:'\necho 'GPU 1: A'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible_gpus({}) == ("0", "1")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "0 1 2 3"),
        ("", ""),
        ("2,3", "2 3"),
        ("-1", ""),
        ("0, 1,4,2", "0 1"),
        ("GPU-1,GPU-3", "GPU-1 GPU-3"),
        ("0,0", "0 0"),
    ],
)
def test_only_visible_gpus_count_and_an_unknown_one_ends_the_list(
    visible: str | None, names: str
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment, 4) == tuple(names.split())
    assert visible_gpus(environment, 0) == ()


def test_engines_have_gpus_of_their_own_while_there_are_enough_and_share_them_otherwise() -> None:
    assert hand_out_gpus([2, 1, 1], "0123") == [("0", "1"), ("2",), ("3",)]
    assert hand_out_gpus([1, 2], ["5", "7", "GPU-x"]) == [("5",), ("7", "GPU-x")]
    assert hand_out_gpus([1, 1], ["0"]) == [("0",), ("0",)]
    assert hand_out_gpus([1, 1, 1], ["0", "0", "1"]) == [("0",), ("0",), ("1",)]
    assert hand_out_gpus([2, 2], ["0", "1"]) == [("0", "1"), ("0", "1")]
    assert hand_out_gpus([1, 2], ["0", "1"]) == [("0",), ("1", "0")]
    with pytest.raises(ValueError, match="2 workers, and there are 1 GPUs"):
        hand_out_gpus([1, 2], ["0", "0"])


def test_cores_are_shared_only_when_there_are_too_few() -> None:
    assert hand_out_cores([1, 1], [0, 1]) == [("0",), ("1",)]
    assert hand_out_cores([1, 2], [0, 1]) == [("0",), ("1", "0")]


def test_every_rank_of_a_data_parallel_engine_has_a_free_port_for_its_side_channel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank n listens on the engine's port + n: one free port is not enough."""
    first = free_port_range(7)
    monkeypatch.setattr(devices, "_LOWEST", first)
    monkeypatch.setattr(devices, "_HIGHEST", first + 7)
    spec = EngineSpec("d", "m", devices=("0", "1", "2"), dp=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 2))
        engine = Engine(spec, tmp_path)
        assert (engine.port, engine.side_channel_port) == (first + 3, first + 4)
        with pytest.raises(OSError, match="no 5 consecutive free ports"):
            free_port_range(5)


def test_ports_differ_and_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        monkeypatch.setattr(devices, "_LOWEST", ports[0])
        monkeypatch.setattr(devices, "_HIGHEST", ports[0] + 1)
        with pytest.raises(OSError, match="0 free ports"):
            free_ports(1)
