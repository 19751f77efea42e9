"""Questions about prompts: any history of both engines, with messages that are lost, late or repeated."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.protocol.asks import Answer, Ask, Progress, Question, Unask
from kvferry.protocol.digests import GrowingChain, Prompt, digest_chain
from kvferry.scheduler.consumer import questions as questions_module
from kvferry.scheduler.consumer.questions import (
    ENDED_S,
    ENDED_UNKNOWN_S,
    UNKNOWN_S,
    Questions,
    StartAsking,
    StopAsking,
)
from kvferry.scheduler.producer import asked_prompts
from kvferry.scheduler.producer.asked_prompts import KEPT_S, SUBSCRIPTION_S, AskedPrompts

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
        self.asked = AskedPrompts(clock=lambda: self.now_s)
        self.questions = Questions()
        self.count = 0
        self.prefills: dict[str, int] = {}  # request to prompt, until it is over
        self.asking: dict[int, tuple[str, int]] = {}  # open number to request and prompt
        self.open: dict[int, Question] = {}
        self.answers: list[Answer] = []
        self.tickets: dict[str, int] = {}  # request that was promised, to number

    @rule(key=KEYS, which=WHICH)
    def prefill(self, key: str, which: int) -> None:
        self.count += 1
        self.asked.arrived(f"p{self.count}", key, PROMPTS[which], 5)
        self.prefills[f"p{self.count}"] = which

    @precondition(lambda self: self.prefills)
    @rule(data=st.data(), how=st.sampled_from(["ticket", "ticket", "served", "failed"]))
    def go_on(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.prefills)))
        if how == "failed":
            self.asked.over(name, "ended")
        else:
            self.asked.ticket(name, {"name": name, "which": self.prefills[name]})
        if how != "ticket":
            if how == "served":
                self.asked.over(name)
            del self.prefills[name]

    @rule(key=KEYS, which=WHICH)
    def decode(self, key: str, which: int) -> None:
        self.count += 1
        assert self.questions.ask(f"d{self.count}", PRODUCER, key, 5, DIGESTS[which], self.now_s)
        (command,) = self.questions.take_commands()
        assert isinstance(command, StartAsking)
        self.open[command.question.number] = command.question
        self.asking[command.question.number] = f"d{self.count}", which

    @precondition(lambda self: self.open)
    @rule(is_lost=st.booleans())
    def repeat(self, is_lost: bool) -> None:
        answers = self.asked.ask(b"peer", Ask(asker="d", questions=tuple(self.open.values())))
        self.answers += () if is_lost else answers.answers

    @rule(is_lost=st.booleans())
    def push(self, is_lost: bool) -> None:
        for _, answers in self.asked.changes():
            self.answers += () if is_lost else answers.answers

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """Out of order, and perhaps again later."""
        self.deliver(data.draw(st.sampled_from(self.answers)))

    @precondition(lambda self: self.open)
    @rule()
    def exchange(self) -> None:
        answers = self.asked.ask(b"peer", Ask(asker="d", questions=tuple(self.open.values()))).answers
        self.answers += answers
        for answer in answers:
            self.deliver(answer)

    def deliver(self, answer: Answer) -> None:
        opened = self.questions.answered(PRODUCER, answer.number, answer.progress, self.now_s)
        assert (opened is not None) == (
            answer.number in self.open and answer.progress in (Progress.TICKET, Progress.OVER)
        )
        if opened is not None:
            _, which = self.settle(answer.number)
            if answer.progress is Progress.TICKET:
                params = decoded(answer)
                assert params["which"] == which, "a ticket for another prompt"
                assert self.tickets.setdefault(params["name"], answer.number) == answer.number, "given twice"

    @rule(passed_s=st.sampled_from([1.0, UNKNOWN_S, SUBSCRIPTION_S + KEPT_S]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s
        for opened in self.questions.give_up(self.now_s):
            assert not opened.known_by
            self.settle(opened.question.number)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.asking)))
        self.questions.finished(self.asking[number][0])
        assert self.asking[number][0] not in self.questions

    def settle(self, number: int) -> tuple[str, int]:
        del self.open[number]
        assert self.questions.take_commands() == (StopAsking(number),)
        self.asked.unask(Unask(asker="d", numbers=(number,)))
        return self.asking.pop(number)

    @invariant()
    def only_open_questions_wait(self) -> None:
        assert len(self.questions) <= len(self.open)

    def teardown(self) -> None:
        """With the last messages delivered, every question about a prompt that nobody computes is over in time."""
        for name in self.prefills:
            self.asked.over(name, "ended")
        for _ in range(2):
            if self.open:
                for answer in self.asked.ask(b"peer", Ask(asker="d", questions=tuple(self.open.values()))).answers:
                    if self.questions.answered(PRODUCER, answer.number, answer.progress, self.now_s):
                        self.settle(answer.number)
        self.now_s += UNKNOWN_S
        for opened in self.questions.give_up(self.now_s):
            self.settle(opened.question.number)
        assert not self.open


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestHistories = Histories.TestCase


def question(number: int = 1, key: str = "x", which: int = 0) -> Question:
    return Question(number=number, key=key, num_tokens=5, digest=DIGESTS[which])


def test_a_change_is_pushed_once_to_who_has_asked() -> None:
    woken: list[int] = []
    asked = AskedPrompts()
    asked.wake = lambda: woken.append(1)
    (answer,) = asked.ask(b"peer", Ask(asker="d", questions=(question(),))).answers
    assert answer.progress is Progress.UNKNOWN
    asked.arrived("p", "x", PROMPTS[0], 5)
    asked.ticket("p", {"a": 1})
    assert woken
    ((peer, answers),) = asked.changes()
    assert (peer, [(a.progress, decoded(a)) for a in answers.answers]) == (b"peer", [(Progress.TICKET, {"a": 1})])
    assert asked.changes() == []


def test_questions_and_prompts_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_prompts, "MAX_PROMPTS", 4)
    monkeypatch.setattr(asked_prompts, "MAX_SUBSCRIPTIONS", 4)
    now_s = [0.0]
    asked = AskedPrompts(clock=lambda: now_s[0])
    for number in range(10):
        asked.arrived(f"p{number}", f"k{number}", PROMPTS[0], 5)
        asked.ask(b"peer", Ask(asker="d", questions=(question(number, f"q{number}"),)))
    assert (len(asked._by_request), len(asked._subscriptions)) == (4, 4)
    for number in range(10):
        asked.over(f"p{number}", "ended")
    asked.changes()
    now_s[0] += SUBSCRIPTION_S + KEPT_S
    asked.arrived("last", "x", PROMPTS[0], 5)
    asked.changes()
    assert (len(asked._by_request), len(asked._subscriptions)) == (1, 0)
    assert set(asked._by_key) == {"x"}


def test_a_change_is_looked_at_for_the_question_that_it_answers_and_not_for_all_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients choose the key: 2,000 of either held the engine's thread up for 0.6 s."""
    count = 2000
    asked = AskedPrompts()
    for number in range(count):
        asked.arrived(f"p{number}", "x", Prompt(tokens=[number]), 1)
    questions = [
        Question(number=n, key="x", num_tokens=1, digest=digest_chain(Prompt(tokens=[n]))[-1]) for n in range(count)
    ]
    for start in range(0, count, 250):
        asked.ask(b"peer", Ask(asker="d", questions=tuple(questions[start : start + 250])))
    looked_at: list[int] = []
    answer = asked._answer

    def look(claimant: tuple[str, int], asked_for: Question) -> Answer:
        looked_at.append(asked_for.number)
        return answer(claimant, asked_for)

    monkeypatch.setattr(asked, "_answer", look)
    for number in range(count):
        asked.ticket(f"p{number}", {"number": number})
    ((_, answers),) = asked.changes()
    assert [decoded(one)["number"] for one in answers.answers] == list(range(count))
    assert sorted(looked_at) == list(range(count))


def test_every_prompt_is_digested_once_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []

    class Chain(GrowingChain):
        def __init__(self, prompt: Prompt) -> None:
            digested.append(prompt.tokens[0])
            super().__init__(prompt)

    monkeypatch.setattr(asked_prompts, "GrowingChain", Chain)
    asked = AskedPrompts()
    prompts = [Prompt(tokens=[n] * 5) for n in range(50)]
    for number, prompt in enumerate(prompts):
        asked.arrived(f"p{number}", "x", prompt, 5)
    for _ in range(3):
        for number, prompt in enumerate(prompts):
            asked_for = Question(number=number, key="x", num_tokens=5, digest=digest_chain(prompt)[-1])
            (found,) = asked.ask(b"peer", Ask(asker="d", questions=(asked_for,))).answers
            assert found.progress is Progress.QUEUED
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

    asked = AskedPrompts()
    prompt = Prompt(tokens=Tokens(range(5)))
    asked.arrived("p", "x", prompt, 5)
    asked_for = question()
    ask = Ask(asker="d", questions=(asked_for,))
    if what == "subscribers of one key":
        asked.ask(b"peer", msgspec.structs.replace(ask, questions=(question(number=2, key="y"),)))
        asked.arrived("late", "y", prompt, 5)
        busy = threading.Thread(target=asked.changes)
    else:
        busy = threading.Thread(target=asked.ask, args=(b"peer", ask))
    busy.start()
    assert is_inside.wait(30.0)
    asked.arrived("q", "x", PROMPTS[0], 5)
    asked.ticket("q", {"a": 1})
    assert asked.waiting("q") is None
    asked.over("q")
    asked.finished("p", "ended")
    assert busy.is_alive()
    may_go_on.set()
    busy.join()
    (found,) = asked.ask(b"peer", Ask(asker="e", questions=(question(),))).answers
    assert (found.progress, decoded(found)) == (Progress.TICKET, {"a": 1})


def test_a_question_that_comes_with_its_prompt_is_answered_or_waits_for_a_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread reports and then looks who has asked; the listener's remembers and then looks what is new."""
    woken: list[int] = []
    asked = AskedPrompts()
    asked.wake = lambda: woken.append(1)
    take_news = asked._take_news

    def take_news_late() -> None:
        asked.arrived("p", "x", PROMPTS[0], 5)
        assert woken
        take_news()

    monkeypatch.setattr(asked, "_take_news", take_news_late)
    (found,) = asked.ask(b"peer", Ask(asker="d", questions=(question(),))).answers
    assert found.progress is Progress.QUEUED


def test_a_question_of_an_ended_request_leaves_a_later_one_of_its_id_alone() -> None:
    questions = Questions()
    assert questions.ask("d", PRODUCER, "x", 5, DIGESTS[0], 0.0)
    questions.finished("d")
    assert questions.ask("d", PRODUCER, "x", 5, DIGESTS[0], 0.0)
    first = questions.answered(PRODUCER, 0, Progress.TICKET, 0.0)
    assert first is not None
    assert not first.waits
    assert "d" in questions
    second = questions.answered(PRODUCER, 1, Progress.TICKET, 0.0)
    assert second is not None
    assert second.waits
    assert "d" not in questions


def test_a_question_keeps_its_prompt_when_an_equal_one_of_the_same_id_arrives() -> None:
    """Otherwise it would claim both, and who asks for the second one would compute it."""
    asked = AskedPrompts()

    def answer(number: int) -> tuple[Progress, dict[str, str]]:
        (found,) = asked.ask(b"peer", Ask(asker="d", questions=(question(number),))).answers
        return found.progress, decoded(found)

    asked.arrived("p1", "x", PROMPTS[0], 5)
    assert answer(1)[0] is Progress.QUEUED
    asked.arrived("p2", "x", PROMPTS[0], 5)
    asked.changes()
    assert answer(2)[0] is Progress.QUEUED
    for name in ("p1", "p2"):
        asked.ticket(name, {"name": name})
    assert [answer(1), answer(2)] == [(Progress.TICKET, {"name": "p1"}), (Progress.TICKET, {"name": "p2"})]


def opened(questions: Questions, count: int, host: str = "host", first: int = 0) -> list[str]:
    """As many questions of requests that wait, at the time 0."""
    names = [f"{host}-{number}" for number in range(first, first + count)]
    for name in names:
        assert questions.ask(name, (host, 1), "x", 5, DIGESTS[0], 0.0)
    return names


def numbers(questions: Questions) -> list[int]:
    return [command.question.number for command in questions.take_commands() if isinstance(command, StartAsking)]


def test_questions_of_ended_requests_leave_room_for_others_whatever_their_producer_answers() -> None:
    """16,384 aborted requests whose producer answers `queued` stopped streaming for as long as it answered."""
    open_questions = Questions()
    names = opened(open_questions, questions_module.MAX_OPEN)
    for number in numbers(open_questions):
        open_questions.answered(PRODUCER, number, Progress.QUEUED, 1.0)
    for name in names:
        open_questions.finished(name)
    assert len(open_questions._by_number) <= questions_module.MAX_ENDED
    opened(open_questions, questions_module.MAX_OPEN, "other")
    assert len(open_questions) == questions_module.MAX_OPEN
    assert not list(open_questions.give_up(1.0)), "a request that waits has lost its place to one that has ended"


@pytest.mark.parametrize(("progress", "kept_s"), [(Progress.QUEUED, ENDED_S), (Progress.UNKNOWN, ENDED_UNKNOWN_S)])
def test_a_question_ends_soon_after_its_request(progress: Progress, kept_s: float) -> None:
    open_questions = Questions()
    ends, waits = opened(open_questions, 2)
    ended, waiting = numbers(open_questions)
    for number in (ended, waiting):
        open_questions.answered(PRODUCER, number, progress, 0.0)
    open_questions.finished(ends)
    assert not list(open_questions.give_up(2.0))
    assert open_questions.next_s() == 2.0 + kept_s
    open_questions.answered(PRODUCER, ended, progress, 2.0 + kept_s / 2)  # it is repeated
    assert not list(open_questions.give_up(2.0 + kept_s * 0.99))
    (given_up,) = open_questions.give_up(2.0 + kept_s)
    assert given_up.question.number == ended
    assert open_questions.take_commands() == (StopAsking(ended),)
    assert waits in open_questions


def test_a_producer_that_forgets_the_prompt_of_an_ended_request_is_asked_for_a_moment_only() -> None:
    open_questions = Questions()
    (name,) = opened(open_questions, 1)
    (number,) = numbers(open_questions)
    open_questions.answered(PRODUCER, number, Progress.QUEUED, 0.0)
    open_questions.finished(name)
    assert not list(open_questions.give_up(0.0))
    open_questions.answered(PRODUCER, number, Progress.UNKNOWN, 1.0)
    assert not list(open_questions.give_up(1.0))
    assert len(list(open_questions.give_up(1.0 + ENDED_UNKNOWN_S))) == 1


def test_a_host_with_all_places_gives_its_newest_up_for_a_host_with_fewer_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions_module, "MAX_OPEN", 8)
    open_questions = Questions()
    opened(open_questions, 8)
    assert not open_questions.ask("more", PRODUCER, "x", 5, DIGESTS[0], 0.0)
    assert not open_questions.ask("more", (PRODUCER[0].upper(), 1), "x", 5, DIGESTS[0], 0.0), "the same host"
    opened(open_questions, 4, "other")
    assert not open_questions.ask("more", ("other", 1), "x", 5, DIGESTS[0], 0.0)
    crowded_out = list(open_questions.give_up(0.0))
    assert [one.request_id for one in crowded_out] == ["host-7", "host-6", "host-5", "host-4"]
    assert all(one.waits and one.is_crowded_out for one in crowded_out)
    assert len(open_questions) == len(open_questions._by_number) == 8


def test_the_largest_host_is_found_among_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions_module, "MAX_OPEN", 1000)
    open_questions = Questions()
    opened(open_questions, 301, "large")
    for number in range(699):
        opened(open_questions, 1, f"host{number}")
    opened(open_questions, 150, "other")
    assert {one.host for one in open_questions.give_up(0.0)} == {"large"}
    assert not open_questions.ask("more", ("other", 1), "x", 5, DIGESTS[0], 0.0)
    for number in range(699):
        open_questions.finished(f"host{number}-0")
    opened(open_questions, 699, "other", 150)
    assert not list(open_questions.give_up(0.0))
    opened(open_questions, 100, "third")
    assert {one.host for one in open_questions.give_up(0.0)} == {"other"}
