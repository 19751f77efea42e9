"""Loads and holds of other connectors under the same MultiConnector, which vLLM reports to every child."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from kvferry.scheduler.consumer.remote_prompt import LoadState
from tests.engine_core.offers import offer
from tests.harness.core.scheduler import Engine, tokens

PROMPT = tokens(40)


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine("kv_both")


def test_blocks_that_a_sibling_has_held_are_freed_without_a_lease_of_ours(engine: Engine) -> None:
    engine.add("theirs", PROMPT, max_tokens=1)
    engine.run()
    engine.connector.update_connector_output(KVConnectorOutput(finished_sending={"theirs"}))
    assert engine.counted("leases_released") == 0


@pytest.mark.parametrize("failed", [False, True], ids=["loaded", "failed"])
def test_a_prompt_that_a_sibling_loads_is_not_ours_to_count(engine: Engine, failed: bool) -> None:
    request = engine.add("d", PROMPT, offer(PROMPT))
    nothing = engine.scheduler.kv_cache_manager.empty_kv_cache_blocks
    engine.connector.update_state_after_alloc(request, nothing, 0)
    reported = KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"} if failed else set())
    engine.connector.update_connector_output(reported)
    side = engine.connector.scheduler_side
    assert side.loads.state("d") is LoadState.DECLINED
    engine.run()
    assert engine.counted("local_recomputes", "not_wanted") == 1
    assert engine.counted("failed_requests") == engine.counted("local_recomputes", "load_failed") == 0
