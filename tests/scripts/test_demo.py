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
from scripts.demo.load import SLOW, drive, hand_over_slowly, prompts
from scripts.demo.panels import Panel, dashboard_table, legend, read_panels, shown
from scripts.demo.prometheus import ALERTS, chosen, config_of, series_of


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
    answer = {"data": {"result": [{"metric": {"a": "b"}, "value": [0, "1.5"]}, {"metric": {}, "value": [0, "NaN"]}]}}
    assert series_of(answer) == [({"a": "b"}, 1.5)]


class Servers:
    """Answers every request, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append((request.url.host, body))
        params = {"remote_host": "p"} if body.get("kv_transfer_params", {}).get("do_remote_decode") else None
        choice = {"text": "a", "token_ids": [1], "logprobs": None}
        answer = {"choices": [choice], "usage": {"prompt_tokens": 3}, "kv_transfer_params": params}
        return httpx.Response(200, json=answer)


def test_every_request_tells_its_name_and_the_slow_one_waits_between_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, slept = Servers(), []

    async def sleep(seconds: float) -> None:
        slept.append((seconds, len(servers.asked)))

    async def ask() -> None:
        async with Client("model", 5, httpx.MockTransport(servers)) as client:
            await drive(client, "http://router", prompts(4, "demo"), 2)
            monkeypatch.setattr("scripts.demo.load.asyncio.sleep", sleep)
            await hand_over_slowly(client, "http://p", "http://d")

    asyncio.run(ask())
    names = [str(body["request_id"]) for _, body in servers.asked]
    assert sorted(names) == sorted((*(f"demo-{n}" for n in range(4)), SLOW, SLOW))
    assert [host for host, _ in servers.asked[4:]] == ["p", "d"]
    assert servers.asked[5][1]["kv_transfer_params"] == {"remote_host": "p"}
    assert [after for seconds, after in slept if seconds > 0.1] == [5]


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
