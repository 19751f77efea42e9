"""Engines that run with different settings are not paired: the decoder computes, and the log names the setting."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from tests.harness.core import configs
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

PROMPT = tokens(100)
COUNT = 3
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 256,
}


def make_with(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    folder: Path,
    options: dict[str, Any],
) -> Any:
    """An engine of the harness's model with these options of vLLM, in a folder of its own."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs.CONFIG))

    init_none_hash(sha256)

    def model_config(max_tokens: int = 512) -> ModelConfig:
        usual = {
            "dtype": "float32",
            "max_model_len": max_tokens,
            "skip_tokenizer_init": True,
        }
        return ModelConfig(
            model=str(folder), tokenizer=str(folder), **{**usual, **options}
        )

    with monkeypatch.context() as patched:
        patched.setattr(configs, "model_config", model_config)
        return make(role)


@pytest.mark.parametrize(
    ("producers", "consumers", "says"),
    [
        ({}, {}, None),
        ({"max_model_len": 256}, {"max_model_len": 512}, None),
        (
            {
                "hf_overrides": {
                    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}
                }
            },
            {},
            "model.config.rope_parameters.rope_theta: producer 5, consumer 10000; serve the same configuration",
        ),
        (
            {"hf_overrides": {"rope_parameters": LONGROPE}, "max_model_len": 256},
            {"hf_overrides": {"rope_parameters": LONGROPE}, "max_model_len": 512},
            'model.longrope.config.rope_parameters: producer "short", consumer "long"; set --max-model-len',
        ),
    ],
    ids=[
        "equal",
        "another length",
        "another rotary embedding",
        "LongRoPE of another length",
    ],
)
def test_a_setting_that_changes_values_is_refused_by_name_and_the_prompt_computed(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    producers: dict[str, Any],
    consumers: dict[str, Any],
    says: str | None,
) -> None:
    caplog.set_level(logging.WARNING, logger="kvferry")
    producer = make_with(make, monkeypatch, "kv_producer", tmp_path / "p", producers)
    consumer = make_with(make, monkeypatch, "kv_consumer", tmp_path / "d", consumers)
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=COUNT)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, COUNT)
    assert consumer.engine.counted("failed_loads", "plan") == (says is not None)
    logged = [record.getMessage() for record in caplog.records]
    assert (
        any(says in line for line in logged)
        if says
        else not any("cannot be read from" in line for line in logged)
    )
