"""The demonstration: what it asks, what it scrapes, and the dashboard as a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import httpx
import pytest
from rich.console import Console

from scripts.accuracy.client import Client
from scripts.demo.__main__ import main
from scripts.demo.dashboard import (
    ALERTS,
    Panel,
    chosen,
    config_of,
    dashboard_table,
    legend,
    read_panels,
    series_of,
    shown,
)
from scripts.demo.show import SLOW, SLOW_S, hand_over_slowly, prompts


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (3_200_000, "bytes", "3.2 MB"),
        (1.5e9, "Bps", "1.5 GB/s"),
        (0.25, "percentunit", "25.0%"),
        (7, "short", "7"),
        (1200, "ops", "1.2 k/s"),
    ],
)
def test_values_are_shown_as_people_read_them(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_a_legend_has_its_labels() -> None:
    assert legend("failed: {{ reason }}", {"reason": "fence"}) == "failed: fence"
    assert legend("{{gone}}", {}) == ""


def test_panels_without_data_are_not_listed() -> None:
    panels = [Panel("row", name, "s", ((name, "p99"),)) for name in ("full", "empty")]

    def ask(query: str) -> list[tuple[Mapping[str, str], float]]:
        return [({}, 0.5)] if query == "full" else []

    table = dashboard_table(panels, ask)
    assert table.row_count == 1
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    assert "p99 500 ms" in captured.get()
    assert "empty" not in captured.get()


def test_no_variable_of_grafanas_is_left_in_a_query() -> None:
    queries = [query for panel in read_panels() for query, _ in panel.queries]
    assert queries
    assert [query for query in queries if "$" in chosen(query)] == []


def test_prometheus_gets_every_engine_by_its_name() -> None:
    config = config_of({"prefill-0": "http://127.0.0.1:1", "decode-0": "http://127.0.0.1:2"})
    assert [(one["job_name"], one["static_configs"][0]["targets"]) for one in config["scrape_configs"]] == [
        ("prefill-0", ["127.0.0.1:1"]),
        ("decode-0", ["127.0.0.1:2"]),
    ]
    assert config["rule_files"] == [str(ALERTS)]
    assert ALERTS.is_file()


def test_a_series_without_a_value_is_left_out() -> None:
    answer = {"result": [{"metric": {"a": "b"}, "value": [0, "1.5"]}, {"metric": {}, "value": [0, "NaN"]}]}
    assert series_of(answer) == [({"a": "b"}, 1.5)]


def test_the_slow_request_waits_between_the_engines_under_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []
    slept: list[tuple[float, int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, json.loads(request.content)))
        choice = {"text": "a", "token_ids": [1], "logprobs": None}
        params = {"remote_host": "p"}
        return httpx.Response(
            200, json={"choices": [choice], "usage": {"prompt_tokens": 3}, "kv_transfer_params": params}
        )

    async def sleep(seconds: float) -> None:
        slept.append((seconds, len(asked)))

    async def ask() -> None:
        monkeypatch.setattr("scripts.demo.show.asyncio.sleep", sleep)
        async with Client("model", 5, httpx.MockTransport(answer)) as client:
            await hand_over_slowly(client, "http://p", "http://d")

    asyncio.run(ask())
    assert [(host, body["request_id"]) for host, body in asked] == [("p", SLOW), ("d", SLOW)]
    assert asked[1][1]["kv_transfer_params"] == {"remote_host": "p"}
    assert (SLOW_S, 1) in slept


def test_prompts_are_the_same_for_the_same_seed_and_of_several_lengths() -> None:
    one, again = prompts(10, "seed"), prompts(10, "seed")
    assert one == again
    assert len({len(case.prompt) for case in one}) > 3


def test_a_bad_setting_is_reported_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECODER_TP_SIZE", "two")
    assert main(["--check"]) == 2
    assert "DECODER_TP_SIZE" in capsys.readouterr().err
