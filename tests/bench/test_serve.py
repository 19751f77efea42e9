"""The pure parts of `bench.serve` and `bench.engine_contact`: what is counted, and which targets are met."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from bench import engine_contact, serve
from bench.engine_contact import Contact, ContactFigures
from bench.serve_figures import Batch, SetupFigures
from bench.serve_load import Timing, hand_over, make_cases, run_all, through
from bench.serve_setups import CALM, SHIPPED, SINGLE

from scripts.accuracy.client import Client, NoAnswer
from scripts.accuracy.prompts import Case

STEP_S = 0.02
CASE = Case("one", (5, 6, 7), max_tokens=2, stream=True)


def timing(tokens: int, first_s: float, handover_s: float | None = None) -> Timing:
    return Timing(tokens, first_s - handover_s if handover_s is not None else None, first_s, (STEP_S, STEP_S))


def batch(*timings: Timing, at_once: int = 1) -> Batch:
    return Batch(at_once, len(timings), 1.0, list(timings))


def reply(request: httpx.Request) -> httpx.Response:
    """A producer at /p, a decoder at /d."""
    if request.url.host in ("p", "silent"):
        choice: dict[str, object] = {"text": "a", "token_ids": [1], "logprobs": None}
        answer: dict[str, object] = {"choices": [choice], "usage": {"prompt_tokens": 3}, "kv_transfer_params": None}
        answer |= {"kv_transfer_params": {"remote_host": "p"}} if request.url.host == "p" else {}
        return httpx.Response(200, json=answer)
    if request.url.host == "d" and b'"remote_host":"p"' not in request.content.replace(b" ", b""):
        return httpx.Response(400, text="params are missing")
    if request.url.host == "dead":
        raise httpx.ConnectError("no server")
    piece = 'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    return httpx.Response(200, text=2 * piece + "data: [DONE]\n\n")


def asked(prefill: str, decode: str) -> Timing:
    async def ask() -> Timing:
        async with Client("model", 5, httpx.MockTransport(reply)) as client:
            if prefill:
                return await hand_over(client, f"http://{prefill}", f"http://{decode}", 5, CASE)
            return await through(client, f"http://{decode}", 5, CASE)

    return asyncio.run(ask())


def test_a_handover_begins_with_the_producers_answer() -> None:
    found = asked("p", "d")
    assert not found.error
    assert found.prefill_s is not None
    assert 0 < found.prefill_s < found.first_s <= found.total_s
    assert found.handover_s == pytest.approx(found.first_s - found.prefill_s)
    assert len(found.gaps_s) == 1


@pytest.mark.parametrize(("prefill", "decode", "why"), [("p", "dead", "no answer from"), ("silent", "d", "no params")])
def test_a_failed_request_says_why_and_is_not_counted(prefill: str, decode: str, why: str) -> None:
    found = asked(prefill, decode)
    assert why in found.error
    assert not batch(found).good


def test_a_request_without_an_answer_ends_with_its_time() -> None:
    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        return httpx.Response(200)

    async def ask() -> Timing:
        async with Client("model", 60, httpx.MockTransport(silent)) as client:
            return await through(client, "http://d", 0.05, CASE)

    found = asyncio.run(ask())
    assert found.error == "no answer within 0.05 s"
    assert 0.05 <= found.total_s < 5


def test_no_more_requests_than_allowed_are_under_way_and_none_begins_after_the_budget() -> None:
    under_way, most = 0, 0

    async def ask(case: Case) -> Timing:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return Timing(len(case.prompt))

    cases = make_cases("x", [1] * 20)
    assert len(asyncio.run(run_all(ask, cases, 3))) == 20
    assert most == 3
    assert asyncio.run(run_all(ask, cases, 3, budget_s=0.0)) == []


def test_whatever_ends_a_setup_the_run_goes_on_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(figures: SetupFigures, *_: object) -> None:
        if figures.setup is SHIPPED:
            raise NoAnswer("it hangs")
        figures.routed = batch(timing(128, 0.1))

    monkeypatch.setattr(serve, "prepare", lambda *_: "model")
    monkeypatch.setattr(serve, "_measure", broken)
    results = serve.run([SHIPPED, SINGLE], tmp_path, quick=True)
    assert "NixlConnector as shipped ended early: NoAnswer: it hangs" in results.notes
    assert [row[1] for row in results.tables[1].rows] == [0, 1]


def test_connectors_take_turns_and_one_that_fails_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    async def measure(figures: ContactFigures, consumers: int, logs: Path) -> None:
        asked.append((figures.setup.name, consumers))
        if figures.setup is CALM:
            raise ValueError("it hangs")
        figures.contacts += [Contact(0.05, (0.01,))] * consumers

    monkeypatch.setattr(engine_contact, "measure_contacts", measure)
    results = engine_contact.run(tmp_path, quick=False)
    assert [name for name, _ in asked] == ["kvferry", "calm"] * 2
    assert results.tables[0].rows[0][1] == sum(count for name, count in asked if name == "kvferry")
    assert any("ended early: ValueError: it hangs" in note for note in results.notes)
