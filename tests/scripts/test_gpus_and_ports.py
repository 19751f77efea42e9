"""Handing out GPUs, cores and ports."""

from __future__ import annotations

import random
import socket

import pytest

from scripts.accuracy import gpus
from scripts.accuracy.gpus import Share, count_gpus, hand_out_cores, hand_out_gpus, parse_gpu_list
from scripts.accuracy.ports import free_ports


def test_nvidia_smi_lists_gpus_with_their_partitions_which_are_not_counted() -> None:
    listed = "GPU 0: A (UUID: GPU-1)\n  MIG 1g.10gb     Device  0: (UUID: MIG-2)\nGPU 1: A (UUID: GPU-3)\n"
    assert parse_gpu_list(listed) == 2
    assert parse_gpu_list("") == 0


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("2,3", 2), ("-1", 0), ("0,1,2,3,4,5", 4), ("GPU-1,GPU-3", 2)]
)
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: 4)
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_no_two_engines_share_a_gpu() -> None:
    assert hand_out_gpus([2, 1, 1], {}) == [Share(("0", "1")), Share(("2",)), Share(("3",))]
    assert hand_out_gpus([1, 2], {"CUDA_VISIBLE_DEVICES": "5,7,GPU-x"}) == [Share(("5",)), Share(("7", "GPU-x"))]


def test_cores_are_shared_only_when_there_are_too_few() -> None:
    assert hand_out_cores([1, 1], [0, 1]) == [Share(("0",)), Share(("1",))]
    assert hand_out_cores([1, 2], [0, 1]) == [Share(("0",)), Share(("1", "0"))]


def test_ports_differ_and_are_free() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))


def test_a_port_that_is_listened_on_is_passed_over() -> None:
    seed = 11
    first = free_ports(1, rng=random.Random(seed))[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert first not in free_ports(3, rng=random.Random(seed))
