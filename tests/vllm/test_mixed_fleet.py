"""kvferry beside vLLM's own NixlConnector: what a rolling upgrade meets first."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.accuracy.engines import EngineSpec, Transfer
from tests.promises import promise
from tests.vllm.conftest import START_S
from tests.vllm.forked_server import ForkedServer
from tests.vllm.pair import ServerPair, long_prompt, text_of
from tests.waiting import wait_until

CALM_STOCK = "bench.stock_calm"
PROMPTS = [long_prompt(f"Mixed {number}", 6 + 6 * number) for number in range(3)]


def test_a_stock_decoder_computes_what_a_kvferry_producer_prefilled(
    pair: ServerPair, model: Path, logs: Path
) -> None:
    transfer = Transfer("kv_consumer", module=CALM_STOCK, failure_policy="recompute")
    spec = EngineSpec("stock-decode", str(model), devices=("1",), transfer=transfer)
    want = [pair.plain(pair.producer, prompt) for prompt in PROMPTS]
    before = pair.producer.metrics()
    with ForkedServer(spec, logs) as stock:
        stock.wait_ready(START_S)
        mixed = ServerPair(pair.producer, stock)
        got = [text_of(mixed.hand_over(prompt)) for prompt in PROMPTS]
        assert got == want
        assert [mixed.plain(stock, prompt) for prompt in PROMPTS] == want
    assert (pair.producer.metrics() - before).total(
        "vllm:kvferry_bad_frames_total"
    ) >= 1


@pytest.fixture(scope="module")
def other_weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with every matrix changed a little: equal shapes, equal configuration."""
    copied = tmp_path_factory.mktemp("other") / "weights"
    shutil.copytree(model, copied)
    for file in copied.glob("*.safetensors"):
        tensors = load_file(file)
        torch.manual_seed(1)
        changed = {
            name: tensor + 1e-3 * torch.randn_like(tensor)
            for name, tensor in tensors.items()
        }
        save_file(changed, file, metadata={"format": "pt"})
    return copied


@promise(7)
def test_a_producer_with_other_weights_is_refused_by_name(
    pair: ServerPair, other_weights: Path, logs: Path
) -> None:
    """On a busy machine a handshake may take too long to come to a plan: then a later prompt is the one refused."""
    spec = replace(pair.producer.spec, name="other-weights", model=str(other_weights))
    before = pair.consumer.metrics()

    def is_refused() -> bool:
        prompt = long_prompt(f"Other weights {next(numbers)}")
        want = pair.plain(pair.producer, prompt)
        assert text_of(mixed.hand_over(prompt)) == want
        return (pair.consumer.metrics() - before).total(
            "vllm:kvferry_failed_loads_total", reason="plan"
        ) > 0

    with ForkedServer(spec, logs) as other:
        other.wait_ready(START_S)
        mixed, numbers = ServerPair(other, pair.consumer), itertools.count()
        wait_until(is_refused, "the pair is refused", timeout_s=START_S)
    counted = pair.consumer.metrics() - before
    assert counted.total("vllm:nixl_bytes_transferred_sum") == 0
    assert "model.fingerprint: producer 'weights:" in pair.consumer.log_path.read_text()
