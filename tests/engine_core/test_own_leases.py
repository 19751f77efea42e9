"""Both legs of a request on one engine: its own lease ends as soon as the second leg has its blocks, or is over."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.scheduler.requests import LeaseState
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

PROMPT = tokens(200)
LONG: dict[str, Any] = {"extra": {"kv_lease_duration": 600.0}}
"""Long enough that freed blocks were freed by a release."""


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_the_second_leg_finds_the_blocks_in_the_cache_and_they_come_back(
    make: Any, role: str
) -> None:
    node = make(role, **LONG)
    params = node.prefill("p", PROMPT)
    leases = node.engine.connector.scheduler_side.leases
    node.engine.add("d", PROMPT, params, max_tokens=5)
    assert leases.state("p") is LeaseState.HELD, (
        "others could take the blocks before the second leg has them"
    )
    step = node.step()
    assert step.output.num_scheduled_tokens["d"] == len(PROMPT) % 16
    assert leases.state("p") is not LeaseState.HELD
    assert node.answer("d").tokens == expected_tokens(PROMPT, 5)
    node.until(lambda: node.engine.is_whole)
    assert node.engine.counted("leases_released", "release") == 1


def test_a_second_leg_that_is_aborted_before_it_has_blocks_gives_them_back(
    make: Any,
) -> None:
    node = make("kv_both", **LONG)
    node.engine.add("d", PROMPT, node.prefill("p", PROMPT), max_tokens=5)
    node.engine.abort("d")
    node.until(lambda: node.engine.is_whole)
    assert node.engine.counted("leases_released", "release") == 1


def test_params_from_before_a_restart_of_this_engine_end_no_lease(make: Any) -> None:
    node = make("kv_both", **LONG)
    params = node.prefill("p", PROMPT)
    params["kvferry"]["boot"] = "f" * 32
    node.decode("d", PROMPT, params)
    assert node.engine.connector.scheduler_side.leases.state("p") is LeaseState.HELD
