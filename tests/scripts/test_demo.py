"""The demonstration: what it asks, what it scrapes, and the dashboard as a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from scripts.accuracy.client import Client
from scripts.demo.__main__ import SLOW, SLOW_S, hand_over_slowly, main
from scripts.demo.dashboard import ALERTS, Panel, Prometheus, chosen, dashboard_table, read_panels


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (3_200_000, "bytes", "3,200,000 B"),
        (0.25, "percentunit", "25.0%"),
        (7, "short", "7"),
        (1.25, "ops", "1.25 /s"),
    ],
)
def test_values_are_shown_with_their_unit_and_the_labels_of_their_series(value: float, unit: str, text: str) -> None:
    table = dashboard_table(
        [Panel("row", unit, (("query", "failed: {{ reason }}"),))], lambda _: [({"reason": "fence"}, value)]
    )
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    assert f"failed: fence {text} " in captured.get()


def test_panels_without_data_are_not_listed() -> None:
    panels = [Panel(name, "s", ((name, "p99"),)) for name in ("full", "empty")]

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


def test_prometheus_gets_every_engine_by_its_name_and_the_alerts(tmp_path: Path) -> None:
    Prometheus("prometheus", {"prefill-0": "http://127.0.0.1:1", "decode-0": "http://127.0.0.1:2"}, tmp_path)
    config = json.loads((tmp_path / "prometheus.json").read_text())
    assert [(one["job_name"], one["static_configs"][0]["targets"]) for one in config["scrape_configs"]] == [
        ("prefill-0", ["127.0.0.1:1"]),
        ("decode-0", ["127.0.0.1:2"]),
    ]
    assert config["rule_files"] == [str(ALERTS)]
    assert ALERTS.is_file()


def test_a_series_without_a_value_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = [{"metric": {"a": "b"}, "value": [0, "1.5"]}, {"metric": {}, "value": [0, "NaN"]}]
    server = Prometheus("prometheus", {}, tmp_path)
    monkeypatch.setattr(server, "get", lambda path, query: {"result": result})
    assert server.ask("query") == [({"a": "b"}, 1.5)]


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
        monkeypatch.setattr("scripts.demo.__main__.asyncio.sleep", sleep)
        async with Client("model", 5, httpx.MockTransport(answer)) as client:
            await hand_over_slowly(client, "http://p", "http://d")

    asyncio.run(ask())
    assert [(host, body["request_id"]) for host, body in asked] == [("p", SLOW), ("d", SLOW)]
    assert asked[1][1]["kv_transfer_params"] == {"remote_host": "p"}
    assert (SLOW_S, 1) in slept


def test_a_bad_setting_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DECODER_TP_SIZE", "two")
    assert main(["--once"]) == 2
    assert "DECODER_TP_SIZE" in capsys.readouterr().err
