"""Reading `/metrics` and the log of iterations."""

from __future__ import annotations

from pathlib import Path

from scripts.accuracy.metrics import IterationLog, parse_metrics, together

TEXT = """\
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 40.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0"} 1.0
"""

LINE = "(APIServer pid=1) INFO [loggers.py:1] Engine 000: Iteration(7): %d context requests, %d context tokens, 0 x\n"


def test_totals_are_taken_by_name_and_label() -> None:
    scrape = parse_metrics(TEXT)
    assert scrape.total("vllm:prompt_tokens_by_source_total") == 43
    assert scrape.total("vllm:prompt_tokens_by_source_total", source="local_compute") == 3
    assert scrape.total("vllm:nothing") == 0
    assert scrape.by_label("vllm:prompt_tokens_by_source_total", "source") == {
        "local_compute": 3,
        "external_kv_transfer": 40,
    }
    assert scrape.label("vllm:cache_config_info", "block_size") == "128"


def test_a_difference_is_what_was_added() -> None:
    before = parse_metrics(TEXT)
    after = parse_metrics(TEXT.replace("} 40.0", "} 45.0"))
    assert (after - before).total("vllm:prompt_tokens_by_source_total") == 5
    assert (
        together([before, after]).total(
            "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"
        )
        == 85
    )


def test_the_log_is_read_on_from_where_it_was_read_last(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("before\n" + LINE % (9, 900))
    log = IterationLog(path)
    assert log.computed() == (0, 0)
    with path.open("a") as file:
        file.write(
            LINE % (1, 1) + LINE % (2, 30) + "other\n" + (LINE % (1, 5)).partition("kens")[0]
        )
    assert log.computed() == (3, 31)
    with path.open("a") as file:
        file.write("kens, 0 x\n")
    assert log.computed() == (4, 36)
