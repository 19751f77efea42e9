"""The first tokens of a prompt, read from the engine that has them: both ends, vLLM's schedulers, real NIXL reads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvferry.protocol.digests import CHUNK_TOKENS
from kvferry.worker.loads.load import DataReads, LeaseFence
from tests.connector.test_adapters import adapter
from tests.connector.test_adapters import request as lora
from tests.engine_core.prefixes import LONG, compute, side_of
from tests.engine_core.test_load_metrics import samples
from tests.harness.core import configs, node
from tests.harness.core import scheduler as driver
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("is_patient")]

PREFIX = tokens(1024, seed=3)
PROMPT = [*PREFIX, *tokens(32, seed=4)]
COUNT = 5
ASKS = {"extra": {"allowed_hosts": ["127.0.0.1"], "prefix_pull_min_tokens": 1}}


def source_of(answerer: Node) -> dict[str, Any]:
    """As a router names it."""
    return {
        "remote_kv_source": {
            "kv_request_id": "any",
            "remote_host": "127.0.0.1",
            "remote_port": answerer.port,
        }
    }


def ask(
    asker: Node,
    answerer: Node,
    prompt: list[int] = PROMPT,
    name: str = "asked",
    params: dict[str, Any] | None = None,
    **request: Any,
) -> int:
    """Answer a prompt whose beginning another engine may have. Returns the prompt's tokens that were computed."""
    computed = 0
    asker.engine.add(
        name,
        prompt,
        {**source_of(answerer), **(params or {})},
        max_tokens=COUNT,
        **request,
    )
    while asker.engine.answers[name].finish_reason is None:
        computed += asker.step().computed.get(name, 0)
        answerer.go_on()
    expected = asker.expected(prompt, COUNT)
    assert asker.engine.answers[name].tokens == expected
    return computed - (COUNT - 1)


def everything_is_over(*nodes: Node) -> None:
    """Every lease is over and every block is free."""
    until(nodes, lambda: all(one.engine.is_whole for one in nodes))
    assert not any(len(side_of(one).leases) for one in nodes)


SHAPES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "tp 2": {"tp": 2},
    "overlapping steps": {"overlap": True},
    "window": {"window": 48},
    "states": {"states": 1},
    "states that passes keep": {"states": 1, "keeps_checkpoints": True},
    "states of two ranks": {"states": 2, "tp": 2},
    "states and a window, overlapping": {"states": 1, "window": 48, "overlap": True},
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_prefix_that_another_engine_has_is_loaded_from_it(
    make: Any, config: dict[str, Any]
) -> None:
    answerer = make("kv_both", **LONG, **config)
    asker = make("kv_both", **LONG, **ASKS, **config)
    compute(answerer, "before", PREFIX, 2)
    assert ask(asker, answerer) == len(PROMPT) - 1024
    assert asker.engine.counted("prefix_tokens_loaded") == 1024
    everything_is_over(answerer, asker)
    (waited_s,) = samples(asker.engine, "prefix_wait_s")
    assert waited_s > 0
    assert len(samples(asker.engine, "prefix_saved_s")) == 1
    assert answerer.engine.counted("prefixes_released", "done") == 1


def test_pages_that_have_gone_lend_no_prefix_whatever_vllms_cache_says(
    make: Any,
) -> None:
    answerer = make("kv_both", **LONG)
    asker = make("kv_both", **LONG, **ASKS)
    compute(answerer, "before", PREFIX, 2)
    side_of(answerer).withdrawn()
    assert ask(asker, answerer) == len(PROMPT)
    assert asker.engine.counted("prefixes_not_pulled", "no_prefix") == 1


@pytest.mark.parametrize("states", [0, 1], ids=["attention", "with states"])
@pytest.mark.parametrize(("theirs", "ours"), [(16, 32), (32, 16), (16, 128)])
def test_blocks_need_not_be_equal(
    make: Any, monkeypatch: pytest.MonkeyPatch, theirs: int, ours: int, states: int
) -> None:
    def with_blocks_of(block_tokens: int, **config: Any) -> Node:
        with monkeypatch.context() as changed:
            for module in (configs, driver, node):
                changed.setattr(module, "BLOCK_TOKENS", block_tokens)
            made: Node = make("kv_both", **LONG, states=states, **config)
            return made

    answerer = with_blocks_of(theirs)
    asker = with_blocks_of(ours, **ASKS)
    compute(answerer, "before", PREFIX, 2)
    assert ask(asker, answerer) == len(PROMPT) - 1024
    everything_is_over(answerer, asker)


def test_only_what_is_beyond_the_local_hit_is_loaded(make: Any) -> None:
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    compute(answerer, "before", PREFIX, 2)
    compute(asker, "own", PREFIX[:512], 2)
    assert ask(asker, answerer) == len(PROMPT) - 1024
    block_bytes = asker.engine.block_bytes
    assert asker.engine.counted("planned_bytes") == 512 // 16 * block_bytes
    everything_is_over(answerer, asker)


def test_a_turn_is_read_from_the_decoder_that_has_it(make: Any) -> None:
    """Its prompt and its answer, which the decoder has generated."""
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    first = tokens(2 * CHUNK_TOKENS - 6, seed=6)
    answer = compute(answerer, "turn", first, 20)
    prompt = [*first, *answer, *tokens(40, seed=7)]
    # The second chunk ends with six tokens of the answer.
    assert ask(asker, answerer, prompt) == len(prompt) - 2 * CHUNK_TOKENS
    everything_is_over(answerer, asker)


def test_who_has_nothing_costs_no_lease(make: Any) -> None:
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    compute(answerer, "before", tokens(1024, seed=9), 2)
    assert ask(asker, answerer) == len(PROMPT)
    assert answerer.engine.counted("prefixes_opened") == 0
    everything_is_over(answerer, asker)


def test_a_prefix_is_read_only_of_the_same_adapter(make: Any, tmp_path: Path) -> None:
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    one = lora(adapter(tmp_path / "one"))
    other = lora(adapter(tmp_path / "other", fill=2), "other", number=2)
    compute(answerer, "plain", PREFIX, 2)
    compute(answerer, "other", PREFIX, 2, lora_request=other)
    assert ask(asker, answerer, name="first", lora_request=one) == len(PROMPT)
    assert answerer.engine.counted("prefixes_opened") == 0
    asker.until(lambda: asker.engine.is_whole)
    assert asker.engine.scheduler.reset_prefix_cache()
    compute(answerer, "one", PREFIX, 2, lora_request=one)
    computed = ask(asker, answerer, name="second", lora_request=one)
    assert computed == len(PROMPT) - 1024
    everything_is_over(answerer, asker)


def test_a_request_that_is_aborted_while_it_asks_leaves_no_lease(make: Any) -> None:
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    compute(answerer, "before", PREFIX, 2)
    for steps in range(4):
        asker.engine.add(f"gone{steps}", PROMPT, source_of(answerer), max_tokens=COUNT)
        for _ in range(steps):
            asker.step()
            answerer.go_on()
        asker.engine.abort(f"gone{steps}")
    everything_is_over(answerer, asker)


def rewrite(answerer: Node) -> None:
    """End the lease, and compute other prompts in its blocks."""
    side_of(answerer).leases.release_all("evicted")
    until((answerer,), lambda: answerer.engine.is_whole)
    for seed in range(30, 38):
        compute(answerer, f"other{seed}", tokens(1500, seed=seed))


def is_computed(asker: Node, answerer: Node) -> None:
    """The prompt is answered without a byte of what was rewritten."""
    until(
        (asker, answerer),
        lambda: asker.engine.answers["asked"].finish_reason is not None,
    )
    found = asker.engine.answers["asked"].tokens
    assert found == expected_tokens(PROMPT, COUNT, 0)
    assert asker.engine.counted("failed_loads") == 1
    assert asker.engine.counted("prefix_tokens_loaded") == 0
    everything_is_over(answerer, asker)


def test_a_prefix_that_was_rewritten_before_it_is_read_is_not_read(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    compute(answerer, "before", PREFIX, 2)
    steps = DataReads.steps
    read: list[object] = []

    def counted(data: DataReads, *args: Any) -> Any:
        read.append(data)
        return steps(data, *args)

    monkeypatch.setattr(DataReads, "steps", counted)
    asker.engine.add("asked", PROMPT, source_of(answerer), max_tokens=COUNT)
    until((answerer,), lambda: answerer.engine.counted("prefixes_opened") == 1)
    rewrite(answerer)
    is_computed(asker, answerer)
    assert not read


def test_a_prefix_that_is_rewritten_between_the_two_readings_is_not_believed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is READY when the load looks first, and over when the bytes are read."""
    answerer, asker = make("kv_both", **LONG), make("kv_both", **LONG, **ASKS)
    compute(answerer, "before", PREFIX, 2)
    wait_until_ready = LeaseFence.wait_until_ready
    is_ready = threading.Event()
    is_rewritten = threading.Event()

    def held(fence: LeaseFence, peer: Any) -> Any:
        yield from wait_until_ready(fence, peer)
        is_ready.set()
        while not is_rewritten.is_set():
            yield

    monkeypatch.setattr(LeaseFence, "wait_until_ready", held)
    asker.engine.add("asked", PROMPT, source_of(answerer), max_tokens=COUNT)
    try:
        until((asker, answerer), is_ready.is_set)
        rewrite(answerer)
    finally:
        is_rewritten.set()
    is_computed(asker, answerer)
