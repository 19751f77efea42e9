"""The checks of the drills, on passing and failing cases; without engines."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.vllm.load import Kind, Load, Outage, Outcome, Tokens, ask, judge

PROMPT: Tokens = (3, 4, 5)
RIGHT: dict[Tokens, Tokens] = {PROMPT: (7, 8, 9)}
OUTAGES = [Outage(10.0, 20.0)]
GOOD = Outcome(PROMPT, Kind.ANSWERED, (7, 8, 9), started_s=1.0, ended_s=2.0)


def test_right_answers_and_what_an_outage_explains_are_counted() -> None:
    refused = Outcome(PROMPT, Kind.REFUSED, started_s=12.0, ended_s=13.0)
    broken = Outcome(PROMPT, Kind.BROKEN, (7,), started_s=9.0, ended_s=10.5)
    assert judge([GOOD, refused, broken], OUTAGES, RIGHT) == {"answered": 1, "HTTP 500": 1, "broken stream": 1}


@pytest.mark.parametrize(
    "outcome",
    [
        replace(GOOD, tokens=(7, 8, 1)),
        replace(GOOD, tokens=(7, 8, 1), started_s=12.0, ended_s=13.0),
        Outcome(PROMPT, Kind.BROKEN, (8,), started_s=12.0, ended_s=13.0),
        Outcome(PROMPT, Kind.REFUSED, started_s=20.5, ended_s=21.0),
        Outcome(PROMPT, Kind.BROKEN, (7,), started_s=1.0, ended_s=9.5),
        Outcome(PROMPT, Kind.OTHER, started_s=12.0, ended_s=13.0),
    ],
    ids=["wrong", "wrong in an outage", "wrong, then broken", "refused after it", "broken before it", "hangs"],
)
def test_nothing_else_passes(outcome: Outcome) -> None:
    with pytest.raises(AssertionError, match="1 of 2"):
        judge([GOOD, outcome], OUTAGES, RIGHT)


class _Page(http.server.BaseHTTPRequestHandler):
    """Answers with two tokens, whole or streamed; with an error where the prompt begins with 500."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        status, stream = (500 if '"prompt":[500' in asked.replace(" ", "") else 200), '"stream":true' in asked
        self.send_response(status)
        self.end_headers()
        if status == 200:
            choice = b'{"choices":[{"token_ids":[7,8]}]}'
            self.wfile.write(b"data: " + choice + b"\n\ndata: [DONE]\n\n" if stream else choice)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_is_too_short_counts_as_broken(page: str, stream: bool) -> None:
    assert ask(page, PROMPT, tokens=2, stream=stream).kind is Kind.ANSWERED
    assert ask(page, PROMPT, tokens=3, stream=stream).kind is Kind.BROKEN
    assert ask(page, (500,), tokens=2, stream=stream).kind is Kind.REFUSED


def test_an_unreachable_engine_is_no_refusal_by_the_router(page: str) -> None:
    assert ask("http://127.0.0.1:9", PROMPT).kind is Kind.OTHER


def test_every_prompt_of_a_load_is_another_and_half_of_them_are_streamed(page: str) -> None:
    with Load("load", page, clients=2, interval_s=0.0) as load:
        outcomes = load.wait_for(12, Kind.BROKEN, timeout_s=60.0)
    assert len({outcome.prompt for outcome in outcomes}) == len(outcomes)
    assert {outcome.stream for outcome in outcomes} == {False, True}
