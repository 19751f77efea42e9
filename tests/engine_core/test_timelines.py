"""Real recordings of two engines become one timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.command import run
from tests.harness.core.scheduler import tokens
from tests.trace.test_chrome import check_format

PROMPT = tokens(100)


def test_a_handover_between_two_engines_is_one_row_with_every_phase(make: Any, tmp_path: Path) -> None:
    extra = {"trace_dir": str(tmp_path / "traces")}
    shape = {"tp": 2, "extra": extra}
    producer, consumer = make("kv_producer", **shape), make("kv_consumer", **shape)
    consumer.engine.add("d", PROMPT, producer.prefill("p", PROMPT), max_tokens=2)
    consumer.answer("d")
    lost = producer.prefill("lost", tokens(50, seed=3))
    consumer.engine.add("again", tokens(50, seed=3), {**lost, "kvferry": 7}, max_tokens=2)
    consumer.answer("again")
    num_bytes = 7 * producer.engine.block_bytes
    producer.until(lambda: producer.engine.is_whole or True)
    producer.close()
    consumer.close()

    ran = run("trace", extra["trace_dir"], "-o", str(tmp_path / "out"), "--json")
    assert (ran.code, ran.err) == (0, "")
    answer = json.loads(ran.out)
    assert answer["notes"] == []
    found = {one["consumer_request"]: one for one in answer["slowest"]}
    one = found["d"]
    assert (one["producer_request"], one["outcome"], one["missing"], one["tokens"]) == ("p", "loaded", [], 100)
    assert [phase["phase"] for phase in one["phases"]] == [
        *("prefill_queue", "prefill", "router", "decode_queue", "order"),
        *("queued", "connecting", "fence", "posting", "reading", "fence_again"),
        *("report", "first_step"),
    ]
    times = [at for phase in one["phases"] for at in (phase["begun_ms"], phase["ended_ms"])]
    assert times == sorted(times)
    assert len(one["workers"]) == 2
    assert [worker["bytes"] for worker in one["workers"]] == [num_bytes, num_bytes]
    assert one["held"]["ended_ms"] > 0
    assert found["again"]["outcome"].startswith("recomputed: ")
    check_format(json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"])
