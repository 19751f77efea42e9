"""An engine whose vLLM differs from the one that kvferry was tested with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.core.block_pool import BlockPool

from kvferry.connector.vllm.attention import cpu_attention_isa
from kvferry.connector.vllm.scheduler import EngineBlocks
from kvferry.protocol.errors import LocalProtocolError, UnsupportedVllm
from tests.engine_core.test_idle import prefill
from tests.harness.core.scheduler import tokens


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("touch", lambda pool, blocks: None),
        ("free_blocks", lambda pool, blocks: None),
        ("get_num_free_blocks", lambda pool: 7),
        ("touch", property(lambda pool: pool.gone)),
    ],
    ids=["holds nothing", "frees nothing", "counts nothing", "is gone"],
)
def test_a_pool_that_does_not_keep_blocks_stops_the_start(
    name: str, other: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("kv_producer")
    with monkeypatch.context() as changed:
        changed.setattr(BlockPool, name, other)
        with pytest.raises(
            UnsupportedVllm,
            match=r"KVCacheManager\.block_pool .* expected as in vLLM >=0\.32,<0\.34",
        ):
            node.engine.connector.bind_kv_cache_manager(
                node.engine.scheduler.kv_cache_manager
            )
    for block in node.engine.scheduler.kv_cache_manager.block_pool.blocks:
        block.ref_cnt = 0  # of an attempt that failed half way


def test_the_trial_leaves_the_pool_as_it_was(make: Any) -> None:
    manager = make("kv_producer").engine.scheduler.kv_cache_manager
    before = [
        block.block_id
        for block in manager.block_pool.free_block_queue.get_all_free_blocks()
    ]
    EngineBlocks().bind(manager)
    assert [
        block.block_id
        for block in manager.block_pool.free_block_queue.get_all_free_blocks()
    ] == before
    assert all(block.ref_cnt == 0 for block in manager.block_pool.blocks[1:])


def test_blocks_that_are_used_before_they_are_bound_say_so() -> None:
    blocks = EngineBlocks()
    uses: list[Callable[[], object]] = [
        lambda: blocks.num_free,
        lambda: blocks.table("r"),
        lambda: blocks.keep((1,)),
        lambda: blocks.forget_hits([1]),
    ]
    for use in uses:
        with pytest.raises(LocalProtocolError, match="before vLLM has bound"):
            use()


def test_without_vllms_count_of_needed_blocks_prompts_are_served_and_leases_are_not_evicted(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: Any, **__: Any) -> int:
        raise TypeError("no such argument: prefill_end")

    monkeypatch.setattr(logging.getLogger("kvferry"), "handlers", [caplog.handler])
    with monkeypatch.context() as changed:
        changed.setattr(EngineBlocks, "lacking", gone)
        node = make("kv_producer", extra={"max_leased_fraction": 0.01})
        prefill(node, "p", tokens(100))
        node.engine.step()
    text = "lease eviction disabled: this vLLM does not count the blocks of a request"
    found = {
        record.getMessage()
        for record in caplog.records
        if "disabled" in record.getMessage()
    }
    assert found == {f"{text} (TypeError('no such argument: prefill_end'))"}
    assert node.engine.counted("leases_released") == 0


def test_a_cpu_backend_without_its_instruction_set_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    with pytest.raises(UnsupportedVllm, match="_get_attn_isa"):
        cpu_attention_isa(SimpleNamespace(head_size=64, dtype=torch.float32))
