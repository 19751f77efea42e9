"""The published algorithm as bench/plan.py runs it makes the descriptors that the installed vLLM makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench.published_descriptors import block_descriptors, descriptor_ids
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping, compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

REGIONS, BLOCKS, BLOCK_BYTES = 3, 7, 4096
BASES = [1 << 20, 1 << 22, 1 << 24]


def worker(tp: int, rank: int, block_bytes: int) -> Any:
    """The parts of a NixlConnector worker that make descriptors."""
    topology = TransferTopology(
        tp_rank=rank,
        tp_size=tp,
        block_size=16,
        engine_id="D",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=8,
        attn_backends=[],
    )
    made = object.__new__(NixlBaseConnectorWorker)
    fields = {
        "transfer_topo": topology,
        "device_id": 0,
        "num_regions": REGIONS,
        "block_len_per_layer": [block_bytes] * REGIONS,
        "block_stride_per_layer": [block_bytes] * REGIONS,
        "region_num_blocks": [BLOCKS] * REGIONS,
        "region_group_ids": [0] * REGIONS,
        "_transfer_layer_region_indices": [],
        "_transfer_layer_group_ids": [],
        "_uses_region_group_mapping": False,
        "_group_spec_types": (FullAttentionSpec,),
        "_has_mamba": False,
        "_ple_region_index": None,
        "_logical_num_blocks": BLOCKS,
        "_is_region_replicated": lambda region: False,
        "_fa_desc_replicated": lambda count, ratio: [False] * count,
    }
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@pytest.fixture(autouse=True)
def _no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """These workers were never started."""
    monkeypatch.setattr(NixlBaseConnectorWorker, "__del__", lambda self: None)


def mapping(made: Any, p_tp: int) -> TPMapping:
    return compute_tp_mapping(made.transfer_topo, p_tp, (FullAttentionSpec,))


@pytest.mark.parametrize(("d_tp", "rank", "p_tp"), [(4, 1, 8), (8, 5, 4)])
def test_the_remote_descriptors_are_the_heads_of_this_rank(d_tp: int, rank: int, p_tp: int) -> None:
    local, remote = BLOCK_BYTES * 8 // d_tp, BLOCK_BYTES * 8 // p_tp
    made = worker(d_tp, rank, local)
    plan = mapping(made, p_tp)
    metadata = SimpleNamespace(
        kv_caches_base_addr=BASES,
        region_num_blocks=[BLOCKS] * REGIONS,
        num_blocks=BLOCKS,
        device_id=0,
        block_strides=[remote] * REGIONS,
    )
    theirs = made._build_fa_remote(plan, metadata, 1)
    ours = block_descriptors(BASES, BLOCKS, remote, min(local, remote), plan.rank_offset_factor * local)
    assert np.array_equal(ours, theirs)


def test_the_indices_of_a_request_are_its_blocks_in_every_region() -> None:
    theirs = worker(4, 0, BLOCK_BYTES)._compute_desc_ids(([5, 2, 3],), BLOCKS, None, 1)
    assert descriptor_ids([5, 2, 3], REGIONS, BLOCKS).tolist() == theirs.tolist()
