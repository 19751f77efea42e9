"""Several emulated GPUs: what a process sees of them, whose memory is whose, and what ranks exchange."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_emulation import build

EXPERIMENT = build.ROOT / "scripts" / "gpu_check" / "dead_exporter.py"
MEMORY = """
import torch
free = [torch.cuda.mem_get_info(each)[0] for each in range(2)]
there = torch.zeros(1 << 20, device="cuda:1")
assert torch.cuda.mem_get_info(0)[0] == free[0]
assert torch.cuda.mem_get_info(1)[0] < free[1]
assert (there + 1).device == there.device != torch.zeros(1, device="cuda").device
"""
SECOND = """
import torch
assert torch.cuda.device_count() == 1
print(torch.cuda.get_device_properties(0).uuid)
"""
RANK = """
import sys, torch
from vllm.platforms import current_platform
torch.distributed.init_process_group(
    current_platform.dist_backend,
    init_method=sys.argv[1],
    rank=int(sys.argv[2]),
    world_size=2,
)
device = f"cuda:{sys.argv[2]}"
summed = torch.full((3,), float(sys.argv[2]) + 1, device=device)
torch.distributed.all_reduce(summed)
assert summed.tolist() == [3.0] * 3 and summed.device == torch.device(device)
"""
TIME_S = 120.0


def start(arguments: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=build.ROOT,
        env={**os.environ, "GPU_EMULATION_DEVICES": "2", **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


def said_by(process: subprocess.Popen[str]) -> str:
    try:
        said, _ = process.communicate(timeout=TIME_S)
    finally:
        process.kill()
    assert process.returncode == 0
    return said


def test_each_device_has_memory_of_its_own() -> None:
    said_by(start(["-c", MEMORY]))


def test_a_process_sees_what_it_is_shown() -> None:
    uuid = said_by(start(["-c", SECOND], CUDA_VISIBLE_DEVICES="1"))
    assert uuid.strip().endswith("2")


def test_memory_of_one_device_is_mapped_beside_another() -> None:
    arguments = ("--kills", "2", "--mib", "16", "--exporter-gpu", "1")
    said = said_by(start([str(EXPERIMENT), *arguments]))
    assert said.splitlines()[-1].startswith("GO: ")


def test_ranks_on_two_devices_add_up(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path / 'meeting'}"
    ranks = [start(["-c", RANK, meeting, str(rank)]) for rank in range(2)]
    try:
        for rank in ranks:
            said_by(rank)
    finally:
        for rank in ranks:
            rank.kill()
