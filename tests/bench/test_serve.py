"""The pure parts of `bench.serve` and `bench.engine_contact`: what is counted, and which targets are met."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from bench import engine_contact, serve, serve_measure
from bench.engine_contact import Contact, ContactFigures
from bench.serve_clock import FILE_VARIABLE, AnswerClock, Answers, Message
from bench.serve_figures import CROWD, SATURATING, Batch, SetupFigures
from bench.serve_load import Timing, hand_over, make_cases, run_all, through
from bench.serve_measure import Amounts, Lane, measure
from bench.serve_report import targets
from bench.serve_setups import CALM, KVFERRY, OFF, SINGLE, Running, Setup, specs_of

from scripts.accuracy.client import Client, NoAnswer
from scripts.accuracy.prompts import Case

STEP_S = 0.02
CASE = Case("one", (5, 6, 7), max_tokens=2, stream=True)


def timing(tokens: int, first_s: float, handover_s: float | None = None) -> Timing:
    return Timing(
        tokens,
        first_s - handover_s if handover_s is not None else None,
        first_s,
        (STEP_S, STEP_S),
    )


def batch(*timings: Timing) -> Batch:
    found = Batch()
    found.add(timings, 1.0)
    return found


def reply(request: httpx.Request) -> httpx.Response:
    """A producer at /p, a decoder at /d."""
    if request.url.host in ("p", "silent"):
        choice: dict[str, object] = {"text": "a", "token_ids": [1], "logprobs": None}
        answer: dict[str, object] = {
            "choices": [choice],
            "usage": {"prompt_tokens": 3},
            "kv_transfer_params": None,
        }
        answer |= (
            {"kv_transfer_params": {"remote_host": "p"}}
            if request.url.host == "p"
            else {}
        )
        return httpx.Response(200, json=answer)
    if request.url.host == "d" and b'"remote_host":"p"' not in request.content.replace(
        b" ", b""
    ):
        return httpx.Response(400, text="params are missing")
    if request.url.host == "dead":
        raise httpx.ConnectError("no server")
    piece = 'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    return httpx.Response(200, text=2 * piece + "data: [DONE]\n\n")


def asked(prefill: str, decode: str) -> Timing:
    async def ask() -> Timing:
        async with Client("model", 5, httpx.MockTransport(reply)) as client:
            if prefill:
                return await hand_over(
                    client, f"http://{prefill}", f"http://{decode}", 5, CASE
                )
            return await through(client, f"http://{decode}", 5, CASE)

    return asyncio.run(ask())


def test_a_handover_begins_with_the_producers_answer() -> None:
    found = asked("p", "d")
    assert not found.error
    assert found.prefill_s is not None
    assert 0 < found.prefill_s < found.first_s <= found.total_s
    assert found.handover_s == pytest.approx(found.first_s - found.prefill_s)
    assert len(found.gaps_s) == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [("p", "dead", "no answer from"), ("silent", "d", "no params")],
)
def test_a_failed_request_says_why_and_is_not_counted(
    prefill: str, decode: str, why: str
) -> None:
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


def test_on_gpus_every_engine_has_one_and_they_may_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.accuracy.devices._listed_gpus", lambda: 8)
    for visible, expected in (
        ("4,5", ["4", "5", "5"]),
        ("4,4", ["4", "4", "4"]),
        ("6", ["6", "6", "6"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        specs = [
            spec
            for setup in (KVFERRY, SINGLE)
            for spec in specs_of(setup, "m", tmp_path, "cuda")
        ]
        assert [
            spec.environment(1)["CUDA_VISIBLE_DEVICES"] for spec in specs
        ] == expected
        assert {(spec.device, spec.dtype) for spec in specs} == {("cuda", "bfloat16")}
    assert [spec.devices for spec in specs_of(KVFERRY, "m", tmp_path)] == [
        ("0",),
        ("1",),
    ]


def test_no_more_requests_than_allowed_are_under_way() -> None:
    under_way, most = 0, 0

    async def ask(case: Case) -> Timing:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return Timing(len(case.prompt))

    assert len(asyncio.run(run_all(ask, make_cases("x", [1] * 20), 3))) == 20
    assert most == 3


def test_the_moment_of_the_producers_answer_is_found_by_the_id_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(tmp_path / "answers.txt")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "answers.txt"))
    sent: list[str] = []

    async def engine(_scope: Message, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def send(message: Message) -> None:
        sent.append(message["type"])

    async def receive() -> Message:
        return {}

    before_s = time.monotonic()
    clock = AnswerClock(engine)
    for headers in ([(b"x-request-id", b"a-1")], []):
        asyncio.run(clock({"type": "http", "headers": headers}, receive, send))
    assert sent == ["http.response.start", "http.response.body"] * 2
    ready_s = answers.ready_s("cmpl-a-1")
    assert ready_s is not None
    assert before_s <= ready_s <= time.monotonic()
    assert answers.ready_s("cmpl-b-2") is None


def test_a_setup_that_does_not_start_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def starting(setup: Setup, *_: object) -> Iterator[Setup]:
        if setup is CALM:
            raise NoAnswer("it hangs")
        yield setup

    async def measuring(lanes: Sequence[Lane], _: Amounts) -> None:
        for lane in lanes:
            lane.figures.batches[1] = batch(timing(128, 0.1))

    monkeypatch.setattr(serve, "prepare", lambda *_: "model")
    monkeypatch.setattr(serve, "started", starting)
    monkeypatch.setattr(serve, "measure", measuring)
    results = serve.run([CALM, SINGLE], tmp_path, quick=True)
    assert f"{CALM.title} ended early: NoAnswer: it hangs" in results.notes
    assert [row[1] for row in results.tables[0].rows] == [0, 1]


class FakeRunning:
    """Servers of one setup, of which it notes when they run."""

    def __init__(self, name: str, woken: list[str]) -> None:
        self.name, self.woken = name, woken
        self.url, self.answers, self.engines = f"http://{name}", None, ()
        self.producer = self.consumer = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.woken.append(self.name)
        yield
        self.woken.append("")


def test_setups_take_turns_alone_and_one_that_answers_nothing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    woken: list[str] = []

    async def ask(
        _client: Client, url: str, _timeout_s: float, case: Case, answers: object
    ) -> Timing:
        assert url == f"http://{woken[-1]}"
        return Timing(
            len(case.prompt), first_s=0.1, error="it hangs" if "calm" in url else ""
        )

    monkeypatch.setattr(serve_measure, "through", ask)
    monkeypatch.setattr(serve_measure, "_SETTLE_S", 0.0)
    setups = {setup.name: SetupFigures(setup) for setup in (KVFERRY, OFF, CALM)}
    client = cast("Client", None)
    lanes = [
        Lane(one, cast("Running", FakeRunning(name, woken)), client, 5.0)
        for name, one in setups.items()
    ]
    asyncio.run(
        measure(
            lanes,
            Amounts(
                {1: 5, CROWD: 1, SATURATING: 2},
                {1: 1, CROWD: 3, SATURATING: 4},
                0.0,
                5.0,
            ),
        )
    )
    assert setups["calm"].error == "1 at once 1: it hangs"
    assert [len(setups["calm"].batches[count].timings) for count in (1, CROWD)] == [
        2,
        0,
    ]
    for name in ("kvferry", "off"):
        assert [
            len(setups[name].batches[count].good) for count in (1, CROWD, SATURATING)
        ] == [
            5,
            3,
            8,
        ]
    turns = woken[::2]
    assert turns[:9] == [
        "kvferry",
        "off",
        "calm",
        "kvferry",
        "off",
        "calm",
        "off",
        "calm",
        "kvferry",
    ]


def test_targets_compare_with_one_leg_after_the_other_the_peer_and_the_single_engine() -> (
    None
):
    setups = {setup.name: SetupFigures(setup) for setup in (SINGLE, KVFERRY, OFF, CALM)}
    for name, first_s, handover_s in (
        ("single", 0.1, None),
        ("kvferry", 0.13, 0.025),
        ("off", 0.15, 0.04),
    ):
        setups[name].batches[1] = batch(timing(128, first_s, handover_s))
    for name, handover_s in (("kvferry", 0.1), ("calm", 0.14)):
        setups[name].batches[CROWD] = batch(timing(128, 0.3, handover_s))
    for name, rate in (("kvferry", 3), ("off", 4)):
        setups[name].batches[SATURATING].rates += [rate, rate]
    found = targets(setups)
    assert [target.measured for target in found[:4]] == pytest.approx(
        [5.0, 10.0, 80.0, 0.75]
    )
    assert [(target.limit, target.met) for target in found[:4]] == [
        (8.0, True),
        (15.0, True),
        (pytest.approx(60.0), False),
        (0.97, False),
    ]


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
    assert results.tables[0].rows[0][1] == sum(
        count for name, count in asked if name == "kvferry"
    )
    assert any("ended early: ValueError: it hangs" in note for note in results.notes)
