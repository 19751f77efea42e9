"""Engines, GPUs, cores and ports: what is started with what."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from scripts.accuracy import devices, fleet
from scripts.accuracy.devices import (
    free_port_range,
    hand_out_cores,
    hand_out_gpus,
)
from scripts.accuracy.engines import Engine, EngineSpec
from scripts.accuracy.fleet import plan_fleet
from scripts.accuracy.settings import read_settings


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fleet, "hand_out_cores", lambda needs: hand_out_cores(needs, [0, 1])
    )


def test_the_baseline_is_the_decoder_without_a_connector() -> None:
    settings = read_settings({"DECODE_BLOCK_SIZE": "64", "DTYPE": "bfloat16"}, gpus=0)
    planned = plan_fleet(settings, "m", {})
    ours, theirs = (spec.arguments(1) for spec in (planned.baseline, planned.decode[0]))
    at = theirs.index("--kv-transfer-config")
    assert theirs[:at] + theirs[at + 2 :] == ours
    assert planned.baseline.devices == planned.decode[0].devices == ("0",)


def test_prefill_and_decode_have_their_roles_block_sizes_and_cores() -> None:
    settings = read_settings(
        {"PREFILL_BLOCK_SIZE": "32", "NUM_PREFILL_INSTANCES": "2"}, gpus=0
    )
    planned = plan_fleet(settings, "m", {})
    assert [spec.name for spec in (*planned.prefill, *planned.decode)] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    roles = [
        spec.transfer.role
        for spec in (*planned.prefill, *planned.decode)
        if spec.transfer
    ]
    assert roles == ["kv_producer", "kv_producer", "kv_consumer"]
    assert [spec.block_size for spec in planned.prefill] == [32, 32]
    assert planned.decode[0].block_size is None
    assert [spec.devices for spec in planned.prefill] == [("1",), ("0",)]


def test_with_dp_ep_decoders_and_baseline_are_data_parallel_with_experts_shared_out() -> (
    None
):
    settings = read_settings(
        {
            "DP_EP": "1",
            "MODEL_NAMES": "m",
            "PREFILLER_TP_SIZE": "2",
            "DECODER_TP_SIZE": "2",
        },
        gpus=4,
    )
    planned = plan_fleet(settings, "m", {})
    for spec in (planned.decode[0], planned.baseline):
        assert "--tensor-parallel-size 1 --data-parallel-size 2" in " ".join(
            spec.arguments(1)
        )
        assert "--enable-expert-parallel" in spec.arguments(1)
        assert spec.environment(1)["CUDA_VISIBLE_DEVICES"] == "0,1"
    theirs = " ".join(planned.prefill[0].arguments(1))
    assert "--tensor-parallel-size 2" in theirs
    assert "--data-parallel-size" not in theirs
    assert "--enable-expert-parallel" not in theirs


def test_engines_have_gpus_of_their_own_while_there_are_enough_and_share_them_otherwise() -> (
    None
):
    assert hand_out_gpus([2, 1, 1], "0123") == [("0", "1"), ("2",), ("3",)]
    assert hand_out_gpus([1, 2], ["5", "7", "GPU-x"]) == [("5",), ("7", "GPU-x")]
    assert hand_out_gpus([1, 1], ["0"]) == [("0",), ("0",)]
    assert hand_out_gpus([1, 1, 1], ["0", "0", "1"]) == [("0",), ("0",), ("1",)]
    assert hand_out_gpus([2, 2], ["0", "1"]) == [("0", "1"), ("0", "1")]
    assert hand_out_gpus([1, 2], ["0", "1"]) == [("0",), ("1", "0")]
    with pytest.raises(ValueError, match="2 workers, and there are 1 GPUs"):
        hand_out_gpus([1, 2], ["0", "0"])


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
