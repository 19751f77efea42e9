"""Properties of a model that are known before an engine serves it."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.accuracy.model import check_sizes, has_states, token_size
from scripts.accuracy.settings import DEFAULT_MODEL, BadSetting

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


@pytest.mark.parametrize(("setting", "states"), [("mamba_n_heads", True), ("linear_key_head_dim", True), ("x", False)])
def test_models_with_states_are_known_by_their_settings(setting: str, states: bool) -> None:
    assert has_states({"num_attention_heads": 8, setting: 4}) is states


def test_a_token_of_smollm2_takes_its_keys_and_values_in_all_layers() -> None:
    assert token_size(SMOLLM2, 1, "float32") == (46080, "30 layers × 3 KV heads × 2 × 64 × 4 B")
    assert token_size(SMOLLM2, 1, "bfloat16") == (23040, "30 layers × 3 KV heads × 2 × 64 × 2 B")


def test_heads_are_copied_where_there_are_more_workers() -> None:
    assert token_size({**SMOLLM2, "num_key_value_heads": 2}, 8, "float32") == token_size(SMOLLM2, 8, "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["DeepseekV2ForCausalLM"]},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"num_attention_heads": None},
        {"architectures": None},
    ],
)
def test_other_caches_are_not_predicted(change: dict[str, Any]) -> None:
    assert token_size({**SMOLLM2, **change}, 1, "float32") is None


def test_tensor_parallel_sizes_must_divide_the_heads() -> None:
    check_sizes(DEFAULT_MODEL, SMOLLM2, {"PREFILLER_TP_SIZE": 3, "DECODER_TP_SIZE": 1})
    check_sizes("unknown", {}, {"PREFILLER_TP_SIZE": 7})
    with pytest.raises(BadSetting, match=r"DECODER_TP_SIZE='2' .* a divisor of 9, .*MODEL_NAMES=tiny-llama"):
        check_sizes(DEFAULT_MODEL, SMOLLM2, {"PREFILLER_TP_SIZE": 3, "DECODER_TP_SIZE": 2})
