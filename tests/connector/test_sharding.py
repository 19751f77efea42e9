"""The heads of a rank, compared with those that vLLM's layers load."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.layout.discovery import discover
from kvferry.connector.layout.mamba_layout import groups_of_heads
from kvferry.connector.layout.sharding import Sharding, same_in_all_layers
from kvferry.protocol.geometry import Range
from tests.connector.caches import config_of, group, views_of
from tests.connector.state_models import STATE_MODELS


def heads_by_vllm(total: int, rank: int, size: int) -> list[int]:
    """The heads that `QKVParallelLinear` loads on a rank: `total / size` from its own on, or one that it copies."""
    if total >= size:
        local = total // size
        return list(range(rank * local, (rank + 1) * local))
    return [rank // (size // total)]


@pytest.mark.parametrize(
    ("total", "size"),
    [(8, 2), (2, 4), (1, 3), (4, 4), (6, 3), (1, 1), (3, 1), (2, 16), (4, 8), (32, 16)],
)
def test_each_rank_holds_the_heads_that_vllm_gives_it(total: int, size: int) -> None:
    for rank in range(size):
        expected = heads_by_vllm(total, rank, size)
        found = Sharding(total, rank, size).heads(len(expected))
        assert found is not None
        assert list(range(found.start, found.stop)) == expected


@pytest.mark.parametrize(("total", "size"), [(8, 2), (3, 4), (6, 4), (0, 2), (5, 2)])
def test_a_single_head_that_the_model_does_not_explain_is_not_known(
    total: int, size: int
) -> None:
    assert Sharding(total, 0, size).heads(1) is None


def test_where_layers_may_differ_only_several_heads_and_one_rank_are_certain() -> None:
    unsure = Sharding(4, 1, 4, uniform=False)
    assert unsure.heads(1) is None
    assert unsure.heads(3) == Range(3, 6)
    assert Sharding(4, 0, 1, uniform=False).heads(1) == Range(0, 1)


@pytest.mark.parametrize(
    ("seen", "uniform"), [([2, 2], True), ([2, 1], False), ([], True)]
)
def test_the_layers_count_more_than_the_configuration(
    seen: list[int], uniform: bool
) -> None:
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
        (
            {"num_key_value_heads": 8, "layers": [{"num_global_key_value_heads": 2}]},
            False,
        ),
        ({"num_kv_heads_per_layer": {"0": 8, "1": 4}}, False),
        ({"block_configs": [{"attention": {"n_heads_in_group": 4}}]}, False),
        (
            {
                "num_attention_groups": 8,
                "attention_other_setting": {"num_attention_groups": 4},
            },
            False,
        ),
    ],
)
def test_settings_that_speak_of_other_head_counts_are_found(
    config: dict[str, Any], same: bool
) -> None:
    assert same_in_all_layers(8, config) is same


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"mamba_n_groups": 8}, 8),
        ({"n_groups": 1, "n_group": 4}, 1),
        ({"mamba_ngroups": 2, "mamba_n_groups": 2}, 2),
        ({"mamba_ngroups": 2, "n_groups": 4}, None),
        ({"n_groups": None}, None),
        ({}, None),
    ],
)
def test_the_groups_of_heads_are_what_the_configuration_says(
    config: dict[str, Any], reported: int | None
) -> None:
    assert groups_of_heads(config) == reported


def test_a_state_that_every_rank_has_whole_is_one_that_everybody_holds() -> None:
    for name, heads in (("short convolution", 64), ("linear attention", 8)):
        config = config_of(
            group(STATE_MODELS[name].spec(1, tp_replicated=True), "mixer.0", "mixer.1")
        )
        for rank in (0, 3):
            found = discover(views_of(config), config, {}, Sharding(8, rank, 4))
            assert {tensor.heads for tensor in found.tensors} == {Range(0, heads)}
