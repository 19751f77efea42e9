"""The heads of a rank, compared with those that vLLM's layers load."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.layout.sharding import Sharding, same_in_all_layers
from kvferry.protocol.geometry import Range


def heads_by_vllm(total: int, rank: int, size: int) -> list[int]:
    """The heads that `QKVParallelLinear` loads on a rank: `total / size` from its own on, or one that it copies."""
    if total >= size:
        local = total // size
        return list(range(rank * local, (rank + 1) * local))
    return [rank // (size // total)]


@pytest.mark.parametrize(
    ("total", "size"), [(8, 2), (2, 4), (1, 3), (4, 4), (6, 3), (1, 1), (3, 1), (2, 16), (4, 8), (32, 16)]
)
def test_each_rank_holds_the_heads_that_vllm_gives_it(total: int, size: int) -> None:
    for rank in range(size):
        expected = heads_by_vllm(total, rank, size)
        found = Sharding(total, rank, size).heads(len(expected))
        assert found is not None
        assert list(range(found.start, found.stop)) == expected


@pytest.mark.parametrize(("total", "size"), [(8, 2), (3, 4), (6, 4), (0, 2), (5, 2)])
def test_a_single_head_that_the_model_does_not_explain_is_not_known(total: int, size: int) -> None:
    assert Sharding(total, 0, size).heads(1) is None


def test_where_layers_may_differ_only_several_heads_and_one_rank_are_certain() -> None:
    unsure = Sharding(4, 1, 4, uniform=False)
    assert unsure.heads(1) is None
    assert unsure.heads(3) == Range(3, 6)
    assert Sharding(4, 0, 1, uniform=False).heads(1) == Range(0, 1)


@pytest.mark.parametrize(("seen", "uniform"), [([2, 2], True), ([2, 1], False), ([], True)])
def test_the_layers_count_more_than_the_configuration(seen: list[int], uniform: bool) -> None:
    assert Sharding(4, 0, 2).checked(seen).uniform is uniform


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"num_key_value_heads": 8, "num_attention_heads": 32}, True),
        ({"num_attention_heads": 8}, True),
        ({"num_key_value_heads": None, "num_kv_heads": True}, True),
        ({"num_key_value_heads": 8, "swa_num_key_value_heads": 4}, False),
        ({"num_key_value_heads": [8, 8]}, True),
        ({"num_key_value_heads": [8, 2]}, False),
        ({"num_key_value_heads": 8, "layers": [{"num_global_key_value_heads": 2}]}, False),
        ({"num_kv_heads_per_layer": {"0": 8, "1": 4}}, False),
        ({"block_configs": [{"attention": {"n_heads_in_group": 4}}]}, False),
        ({"num_attention_groups": 8, "attention_other_setting": {"num_attention_groups": 4}}, False),
    ],
)
def test_settings_that_speak_of_other_head_counts_are_found(config: dict[str, Any], same: bool) -> None:
    assert same_in_all_layers(8, config) is same
