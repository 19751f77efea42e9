"""Queries about prompts: any history of both engines, with messages that are lost, late or repeated."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.link.commands import StartQuery, StopQuery
from kvferry.protocol.digests import GrowingChain, Prompt, digest_chain
from kvferry.protocol.queries import (
    Answer,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
)
from kvferry.scheduler.consumer import pending_queries as module
from kvferry.scheduler.consumer.pending_queries import (
    ENDED_S,
    ENDED_UNKNOWN_S,
    UNKNOWN_S,
    PendingQueries,
)
from kvferry.scheduler.producer import prompt_directory
from kvferry.scheduler.producer.prompt_directory import (
    KEPT_S,
    SUBSCRIPTION_S,
    PromptDirectory,
)
from tests.draws import draws

PRODUCER = ("host", 1)
PROMPTS = [Prompt(tokens=list(range(n, n + 5))) for n in range(2)]
DIGESTS = [digest_chain(prompt)[-1] for prompt in PROMPTS]
KEYS = st.sampled_from(["x", "x", "x", "y"])
WHICH = st.sampled_from([0, 0, 0, 1])


def decoded(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(answer.params)
    return found


class Histories(RuleBasedStateMachine):
    """A producer with prompts, a consumer with questions, and the messages between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.directory = PromptDirectory(clock=lambda: self.now_s)
        self.queries = PendingQueries()
        self.count = 0
        self.prefills: dict[str, int] = {}  # request to prompt, until it is over
        self.asking: dict[
            int, tuple[str, int]
        ] = {}  # open number to request and prompt
        self.open: dict[int, PromptQuery] = {}
        self.answers: list[Answer] = []
        self.tickets: dict[str, int] = {}  # request that was promised, to number

    @rule(key=KEYS, which=WHICH)
    def prefill(self, key: str, which: int) -> None:
        self.count += 1
        self.directory.arrived(f"p{self.count}", key, PROMPTS[which], 5)
        self.prefills[f"p{self.count}"] = which

    @precondition(lambda self: self.prefills)
    @rule(data=st.data(), how=st.sampled_from(["ticket", "ticket", "served", "failed"]))
    def go_on(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.prefills)))
        if how == "failed":
            self.directory.over(name, "ended")
        else:
            self.directory.ticket(name, {"name": name, "which": self.prefills[name]})
        if how != "ticket":
            if how == "served":
                self.directory.over(name)
            del self.prefills[name]

    @rule(key=KEYS, which=WHICH)
    def decode(self, key: str, which: int) -> None:
        self.count += 1
        assert self.queries.start(
            f"d{self.count}", PRODUCER, key, 5, DIGESTS[which], self.now_s
        )
        (command,) = self.queries.commands.take()
        assert isinstance(command, StartQuery)
        self.open[command.query.number] = command.query
        self.asking[command.query.number] = f"d{self.count}", which

    @precondition(lambda self: self.open)
    @rule(is_lost=st.booleans())
    def repeat(self, is_lost: bool) -> None:
        answers = self.directory.subscribe(
            b"peer", Subscribe(client_id="d", queries=tuple(self.open.values()))
        )
        self.answers += () if is_lost else answers.answers

    @rule(is_lost=st.booleans())
    def push(self, is_lost: bool) -> None:
        for _, answers in self.directory.changes():
            self.answers += () if is_lost else answers.answers

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """Out of order, and perhaps again later."""
        self.deliver(data.draw(st.sampled_from(self.answers)))

    @precondition(lambda self: self.open)
    @rule()
    def exchange(self) -> None:
        answers = self.directory.subscribe(
            b"peer", Subscribe(client_id="d", queries=tuple(self.open.values()))
        ).answers
        self.answers += answers
        for answer in answers:
            self.deliver(answer)

    def deliver(self, answer: Answer) -> None:
        opened = self.queries.answered(
            PRODUCER, answer.number, answer.progress, self.now_s
        )
        assert (opened is not None) == (
            answer.number in self.open
            and answer.progress in (PromptProgress.TICKET, PromptProgress.OVER)
        )
        if opened is not None:
            _, which = self.settle(answer.number)
            if answer.progress is PromptProgress.TICKET:
                params = decoded(answer)
                assert params["which"] == which, "a ticket for another prompt"
                assert (
                    self.tickets.setdefault(params["name"], answer.number)
                    == answer.number
                ), "given twice"

    @rule(passed_s=st.sampled_from([1.0, UNKNOWN_S, SUBSCRIPTION_S + KEPT_S]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s
        for opened in self.queries.give_up(self.now_s):
            assert not opened.known_by
            self.settle(opened.query.number)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.asking)))
        self.queries.finished(self.asking[number][0])
        assert self.asking[number][0] not in self.queries

    def settle(self, number: int) -> tuple[str, int]:
        del self.open[number]
        assert self.queries.commands.take() == (StopQuery(number),)
        self.directory.unsubscribe(Unsubscribe(client_id="d", numbers=(number,)))
        return self.asking.pop(number)

    @invariant()
    def only_open_questions_wait(self) -> None:
        assert len(self.queries) <= len(self.open)

    def teardown(self) -> None:
        """With the last messages delivered, every question about a prompt that nobody computes is over in time."""
        for name in self.prefills:
            self.directory.over(name, "ended")
        for _ in range(2):
            if self.open:
                for answer in self.directory.subscribe(
                    b"peer", Subscribe(client_id="d", queries=tuple(self.open.values()))
                ).answers:
                    if self.queries.answered(
                        PRODUCER, answer.number, answer.progress, self.now_s
                    ):
                        self.settle(answer.number)
        self.now_s += UNKNOWN_S
        for opened in self.queries.give_up(self.now_s):
            self.settle(opened.query.number)
        assert not self.open


Histories.TestCase.settings = settings(max_examples=draws(150), stateful_step_count=40)
TestHistories = Histories.TestCase


def query(number: int = 1, key: str = "x", which: int = 0) -> PromptQuery:
    return PromptQuery(number=number, key=key, num_tokens=5, digest=DIGESTS[which])


def test_a_change_is_pushed_once_to_who_has_asked() -> None:
    woken: list[int] = []
    directory = PromptDirectory()
    directory.wake = lambda: woken.append(1)
    (answer,) = directory.subscribe(
        b"peer", Subscribe(client_id="d", queries=(query(),))
    ).answers
    assert answer.progress is PromptProgress.UNKNOWN
    directory.arrived("p", "x", PROMPTS[0], 5)
    directory.ticket("p", {"a": 1})
    assert woken
    ((peer, answers),) = directory.changes()
    assert (peer, [(a.progress, decoded(a)) for a in answers.answers]) == (
        b"peer",
        [(PromptProgress.TICKET, {"a": 1})],
    )
    assert directory.changes() == []


def test_questions_and_prompts_are_bounded_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_directory, "MAX_PROMPTS", 4)
    monkeypatch.setattr(prompt_directory, "MAX_SUBSCRIPTIONS", 4)
    now_s = [0.0]
    directory = PromptDirectory(clock=lambda: now_s[0])
    for number in range(10):
        directory.arrived(f"p{number}", f"k{number}", PROMPTS[0], 5)
        directory.subscribe(
            b"peer", Subscribe(client_id="d", queries=(query(number, f"q{number}"),))
        )
    now = directory.snapshot()
    assert (len(now.prompts), len(now.subscriptions)) == (4, 4)
    for number in range(10):
        directory.over(f"p{number}", "ended")
    directory.changes()
    now_s[0] += SUBSCRIPTION_S + KEPT_S
    directory.arrived("last", "x", PROMPTS[0], 5)
    directory.changes()
    now = directory.snapshot()
    assert (set(now.prompts), now.subscriptions) == ({"last"}, frozenset())
    assert now.keys == {"x"}


def test_a_change_is_looked_at_for_the_question_that_it_answers_and_not_for_all_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients choose the key: 2,000 of either held the engine's thread up for 0.6 s."""
    count = 2000
    directory = PromptDirectory()
    for number in range(count):
        directory.arrived(f"p{number}", "x", Prompt(tokens=[number]), 1)
    queries = [
        PromptQuery(
            number=n, key="x", num_tokens=1, digest=digest_chain(Prompt(tokens=[n]))[-1]
        )
        for n in range(count)
    ]
    for start in range(0, count, 250):
        directory.subscribe(
            b"peer",
            Subscribe(client_id="d", queries=tuple(queries[start : start + 250])),
        )
    looked_at: list[int] = []
    answer = directory._answer

    def look(claimant: tuple[str, int], asked_for: PromptQuery) -> Answer:
        looked_at.append(asked_for.number)
        return answer(claimant, asked_for)

    monkeypatch.setattr(directory, "_answer", look)
    for number in range(count):
        directory.ticket(f"p{number}", {"number": number})
    ((_, answers),) = directory.changes()
    assert [decoded(one)["number"] for one in answers.answers] == list(range(count))
    assert sorted(looked_at) == list(range(count))


def test_every_prompt_is_digested_once_whatever_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[int] = []

    class Chain(GrowingChain):
        def __init__(self, prompt: Prompt) -> None:
            digested.append(prompt.tokens[0])
            super().__init__(prompt)

    monkeypatch.setattr(prompt_directory, "GrowingChain", Chain)
    directory = PromptDirectory()
    prompts = [Prompt(tokens=[n] * 5) for n in range(50)]
    for number, prompt in enumerate(prompts):
        directory.arrived(f"p{number}", "x", prompt, 5)
    for _ in range(3):
        for number, prompt in enumerate(prompts):
            asked_for = PromptQuery(
                number=number, key="x", num_tokens=5, digest=digest_chain(prompt)[-1]
            )
            (found,) = directory.subscribe(
                b"peer", Subscribe(client_id="d", queries=(asked_for,))
            ).answers
            assert found.progress is PromptProgress.QUEUED
    assert sorted(digested) == list(range(50))


@pytest.mark.parametrize("what", ["questions", "subscribers of one key"])
def test_the_engines_thread_never_waits_for_the_listeners(what: str) -> None:
    """Its part of the work takes no lock: whatever the listener's thread does, it is done in a moment."""
    is_inside = threading.Event()
    may_go_on = threading.Event()

    class Tokens(list[int]):
        def __getitem__(self, index: Any) -> Any:
            is_inside.set()
            assert may_go_on.wait(30.0)
            return super().__getitem__(index)

    directory = PromptDirectory()
    # One more than is asked about, so that it takes a part of the list.
    prompt = Prompt(tokens=Tokens(range(6)))
    directory.arrived("p", "x", prompt, 5)
    asked_for = query()
    ask = Subscribe(client_id="d", queries=(asked_for,))
    if what == "subscribers of one key":
        directory.subscribe(
            b"peer", msgspec.structs.replace(ask, queries=(query(number=2, key="y"),))
        )
        directory.arrived("late", "y", prompt, 5)
        busy = threading.Thread(target=directory.changes)
    else:
        busy = threading.Thread(target=directory.subscribe, args=(b"peer", ask))
    busy.start()
    assert is_inside.wait(30.0)
    directory.arrived("q", "x", PROMPTS[0], 5)
    directory.ticket("q", {"a": 1})
    assert directory.waiting("q") is None
    directory.over("q")
    directory.finished("p", "ended")
    assert busy.is_alive()
    may_go_on.set()
    busy.join()
    (found,) = directory.subscribe(
        b"peer", Subscribe(client_id="e", queries=(query(),))
    ).answers
    assert (found.progress, decoded(found)) == (PromptProgress.TICKET, {"a": 1})


def test_a_question_that_comes_with_its_prompt_is_answered_or_waits_for_a_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread reports, then looks for subscribers; the listener's subscribes, then looks for reports."""
    woken: list[int] = []
    directory = PromptDirectory()
    directory.wake = lambda: woken.append(1)
    take_news = directory._take_news

    def take_news_late() -> None:
        directory.arrived("p", "x", PROMPTS[0], 5)
        assert woken
        take_news()

    monkeypatch.setattr(directory, "_take_news", take_news_late)
    (found,) = directory.subscribe(
        b"peer", Subscribe(client_id="d", queries=(query(),))
    ).answers
    assert found.progress is PromptProgress.QUEUED


def test_a_question_of_an_ended_request_leaves_a_later_one_of_its_id_alone() -> None:
    queries = PendingQueries()
    assert queries.start("d", PRODUCER, "x", 5, DIGESTS[0], 0.0)
    queries.finished("d")
    assert queries.start("d", PRODUCER, "x", 5, DIGESTS[0], 0.0)
    first = queries.answered(PRODUCER, 0, PromptProgress.TICKET, 0.0)
    assert first is not None
    assert not first.waits
    assert "d" in queries
    second = queries.answered(PRODUCER, 1, PromptProgress.TICKET, 0.0)
    assert second is not None
    assert second.waits
    assert "d" not in queries


def test_a_question_keeps_its_prompt_when_an_equal_one_of_the_same_id_arrives() -> None:
    """Otherwise it would claim both, and who asks for the second one would compute it."""
    directory = PromptDirectory()

    def answer(number: int) -> tuple[PromptProgress, dict[str, str]]:
        (found,) = directory.subscribe(
            b"peer", Subscribe(client_id="d", queries=(query(number),))
        ).answers
        return found.progress, decoded(found)

    directory.arrived("p1", "x", PROMPTS[0], 5)
    assert answer(1)[0] is PromptProgress.QUEUED
    directory.arrived("p2", "x", PROMPTS[0], 5)
    directory.changes()
    assert answer(2)[0] is PromptProgress.QUEUED
    for name in ("p1", "p2"):
        directory.ticket(name, {"name": name})
    assert [answer(1), answer(2)] == [
        (PromptProgress.TICKET, {"name": "p1"}),
        (PromptProgress.TICKET, {"name": "p2"}),
    ]


def opened(
    queries: PendingQueries, count: int, host: str = "host", first: int = 0
) -> list[str]:
    """As many questions of requests that wait, at the time 0."""
    names = [f"{host}-{number}" for number in range(first, first + count)]
    for name in names:
        assert queries.start(name, (host, 1), "x", 5, DIGESTS[0], 0.0)
    return names


def numbers(queries: PendingQueries) -> list[int]:
    return [
        command.query.number
        for command in queries.commands.take()
        if isinstance(command, StartQuery)
    ]


def test_questions_of_ended_requests_leave_room_for_others_whatever_their_producer_answers() -> (
    None
):
    """16,384 aborted requests whose producer answers `queued` stopped streaming for as long as it answered."""
    pending_queries = PendingQueries()
    names = opened(pending_queries, module.MAX_OPEN)
    for number in numbers(pending_queries):
        pending_queries.answered(PRODUCER, number, PromptProgress.QUEUED, 1.0)
    for name in names:
        pending_queries.finished(name)
    assert len(pending_queries.snapshot().open) <= module.MAX_ENDED
    opened(pending_queries, module.MAX_OPEN, "other")
    assert len(pending_queries) == module.MAX_OPEN
    assert not list(pending_queries.give_up(1.0)), (
        "a request that waits has lost its place to one that has ended"
    )


@pytest.mark.parametrize(
    ("progress", "kept_s"),
    [(PromptProgress.QUEUED, ENDED_S), (PromptProgress.UNKNOWN, ENDED_UNKNOWN_S)],
)
def test_a_question_ends_soon_after_its_request(
    progress: PromptProgress, kept_s: float
) -> None:
    pending_queries = PendingQueries()
    ends, waits = opened(pending_queries, 2)
    ended, waiting = numbers(pending_queries)
    for number in (ended, waiting):
        pending_queries.answered(PRODUCER, number, progress, 0.0)
    pending_queries.finished(ends)
    assert not list(pending_queries.give_up(2.0))
    assert pending_queries.next_s() == 2.0 + kept_s
    pending_queries.answered(
        PRODUCER, ended, progress, 2.0 + kept_s / 2
    )  # it is repeated
    assert not list(pending_queries.give_up(2.0 + kept_s * 0.99))
    (given_up,) = pending_queries.give_up(2.0 + kept_s)
    assert given_up.query.number == ended
    assert pending_queries.commands.take() == (StopQuery(ended),)
    assert waits in pending_queries


def test_a_producer_that_forgets_the_prompt_of_an_ended_request_is_asked_for_a_moment_only() -> (
    None
):
    pending_queries = PendingQueries()
    (name,) = opened(pending_queries, 1)
    (number,) = numbers(pending_queries)
    pending_queries.answered(PRODUCER, number, PromptProgress.QUEUED, 0.0)
    pending_queries.finished(name)
    assert not list(pending_queries.give_up(0.0))
    pending_queries.answered(PRODUCER, number, PromptProgress.UNKNOWN, 1.0)
    assert not list(pending_queries.give_up(1.0))
    assert len(list(pending_queries.give_up(1.0 + ENDED_UNKNOWN_S))) == 1


def test_a_host_with_all_places_gives_its_newest_up_for_a_host_with_fewer_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 8)
    pending_queries = PendingQueries()
    opened(pending_queries, 8)
    assert not pending_queries.start("more", PRODUCER, "x", 5, DIGESTS[0], 0.0)
    assert not pending_queries.start(
        "more", (PRODUCER[0].upper(), 1), "x", 5, DIGESTS[0], 0.0
    ), "the same host"
    opened(pending_queries, 4, "other")
    assert not pending_queries.start("more", ("other", 1), "x", 5, DIGESTS[0], 0.0)
    crowded_out = list(pending_queries.give_up(0.0))
    assert [one.request_id for one in crowded_out] == [
        "host-7",
        "host-6",
        "host-5",
        "host-4",
    ]
    assert all(one.waits and one.is_crowded_out for one in crowded_out)
    assert len(pending_queries) == len(pending_queries.snapshot().open) == 8


def test_the_largest_host_is_found_among_very_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 1000)
    pending_queries = PendingQueries()
    opened(pending_queries, 301, "large")
    for number in range(699):
        opened(pending_queries, 1, f"host{number}")
    opened(pending_queries, 150, "other")
    assert {one.host for one in pending_queries.give_up(0.0)} == {"large"}
    assert not pending_queries.start("more", ("other", 1), "x", 5, DIGESTS[0], 0.0)
    for number in range(699):
        pending_queries.finished(f"host{number}-0")
    opened(pending_queries, 699, "other", 150)
    assert not list(pending_queries.give_up(0.0))
    opened(pending_queries, 100, "third")
    assert {one.host for one in pending_queries.give_up(0.0)} == {"other"}
