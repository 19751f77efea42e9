"""Questions about prompts: any history of both engines, with messages that are lost, late or repeated."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.protocol.asks import Answer, Ask, Progress, Question, Unask
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.scheduler.consumer.questions import UNKNOWN_S, Questions, StartAsking, StopAsking
from kvferry.scheduler.producer import asked_prompts
from kvferry.scheduler.producer.asked_prompts import KEPT_S, SUBSCRIPTION_S, AskedPrompts

PRODUCER = ("host", 1)
PROMPTS = [Prompt(tokens=list(range(n, n + 5))) for n in range(2)]
DIGESTS = [digest_chain(prompt)[-1] for prompt in PROMPTS]
KEYS = st.sampled_from(["x", "x", "x", "y"])
WHICH = st.sampled_from([0, 0, 0, 1])


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
                assert answer.params["which"] == which, "a ticket for another prompt"
                assert self.tickets.setdefault(answer.params["name"], answer.number) == answer.number, "given twice"

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
    assert (peer, [(a.progress, a.params) for a in answers.answers]) == (b"peer", [(Progress.TICKET, {"a": 1})])
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
    now_s[0] += SUBSCRIPTION_S + KEPT_S
    asked.arrived("last", "x", PROMPTS[0], 5)
    assert (len(asked._by_request), len(asked._subscriptions)) == (1, 0)
    assert (set(asked._by_key), asked._subscribed) == ({"x"}, {})


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
        return found.progress, found.params

    asked.arrived("p1", "x", PROMPTS[0], 5)
    assert answer(1)[0] is Progress.QUEUED
    asked.arrived("p2", "x", PROMPTS[0], 5)
    asked.changes()
    assert answer(2)[0] is Progress.QUEUED
    for name in ("p1", "p2"):
        asked.ticket(name, {"name": name})
    assert [answer(1), answer(2)] == [(Progress.TICKET, {"name": "p1"}), (Progress.TICKET, {"name": "p2"})]
