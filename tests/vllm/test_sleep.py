"""A sleep over HTTP. vLLM has no sleep mode on a CPU: its worker keeps its pages and says so, so this is all of a sleep
but what the worker does; that is in tests/gpu_emulation/cases/test_sleep.py.
"""

from __future__ import annotations

import httpx
import pytest

from tests.vllm.pair import TIMEOUT_S, Server, ServerPair, long_prompt, text_of

IGNORED = "sleep mode is not supported on CPU, ignore it."


def call(server: Server, path: str) -> None:
    answer = httpx.post(server.base_url + path, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def is_sleeping(server: Server) -> bool:
    answer = httpx.get(
        server.base_url + "/is_sleeping", timeout=TIMEOUT_S, trust_env=False
    )
    return bool(answer.json()["is_sleeping"])


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_prompts_are_handed_over_after_every_sleep(pair: ServerPair, role: str) -> None:
    sleeper: Server = getattr(pair, role)
    for level in (1, 2):
        call(sleeper, f"/sleep?level={level}")
        assert is_sleeping(sleeper)
        call(sleeper, "/wake_up?tags=weights")
        assert is_sleeping(sleeper)
        call(sleeper, "/wake_up?tags=kv_cache")
        assert not is_sleeping(sleeper)
        prompt = long_prompt(f"{role} {level}")
        before = pair.consumer.metrics()
        answer = pair.hand_over(prompt)
        counted = pair.consumer.metrics() - before
        assert counted.total("vllm:kvferry_loads_total") == 1
        assert counted.total("vllm:kvferry_local_recomputes_total") == 0
        assert text_of(answer) == pair.plain(pair.producer, prompt)
    assert sleeper.log_path.read_text().count(IGNORED) == 6
