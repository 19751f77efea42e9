"""Searches for prefixes: every order of answers, failures, ends and time, against the rules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.link import limits
from kvferry.link.commands import QueryCommands, StartSearch, StopQuery
from kvferry.link.limits import Backoff
from kvferry.protocol.digests import GrowingChain, Prompt
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.queries import PromptProgress
from kvferry.scheduler.consumer import prefix_searches as module
from kvferry.scheduler.consumer.prefix_searches import PrefixSearches
from kvferry.scheduler.requests import PrefixSearch, RequestTable
from tests.draws import draws
from tests.protocol.samples import make_ticket, params_of_length

PRODUCERS = [("p0", 1), ("p0", 2), ("p1", 1)]
MOST = 1024
CHAIN = GrowingChain(Prompt(tokens=list(range(MOST))))
_EPOCHS = itertools.count(1)


def ticket(num_tokens: int) -> RemotePrefill:
    """A new lease on so many tokens."""
    made = params_of_length(num_tokens)
    return params_of_length(
        num_tokens,
        kvferry=make_ticket(
            lease_epoch=f"{next(_EPOCHS):015x}", digests=made.kvferry.digests
        ),
    )


def begin(
    searches: PrefixSearches,
    request_id: str = "r",
    *producers: tuple[str, int],
    until_s: float = 10.0,
) -> int:
    """Start a search and return its number."""
    searches.start(
        request_id,
        producers or PRODUCERS,
        CHAIN,
        most_tokens=MOST,
        min_tokens=256,
        now_s=0.0,
        until_s=until_s,
    )
    (command,) = searches.commands.take()
    assert isinstance(command, StartSearch)
    return command.number


def made() -> PrefixSearches:
    return PrefixSearches(RequestTable(), QueryCommands())


def test_the_longest_prefix_of_several_is_taken_and_the_others_are_given_back() -> None:
    searches = made()
    number = begin(searches)
    tickets = [ticket(256), ticket(768), ticket(512)]
    settled = None
    for producer, one in zip(PRODUCERS, tickets, strict=True):
        assert settled is None
        settled = searches.answered(
            producer,
            number,
            PromptProgress.TICKET,
            1.0,
            ticket=one,
            wait_s=lambda tokens: 1.0,
        )
    assert settled is not None
    assert settled.best == tickets[1]
    assert settled.best_from == PRODUCERS[1]
    assert searches.take_unused() == (tickets[0], tickets[2])
    assert searches.commands.take() == (StopQuery(number),)
    assert len(searches) == 0


def test_who_has_all_that_was_asked_for_settles_it_at_once() -> None:
    searches = made()
    number = begin(searches)
    everything = ticket(MOST)
    settled = searches.answered(
        PRODUCERS[2], number, PromptProgress.TICKET, 0.5, ticket=everything
    )
    assert settled is not None
    assert settled.best == everything


def test_with_a_ticket_a_request_waits_for_a_longer_one_as_long_as_the_rest_takes() -> (
    None
):
    searches = made()
    number = begin(searches)
    found = ticket(768)
    assert (
        searches.answered(
            PRODUCERS[0],
            number,
            PromptProgress.TICKET,
            1.0,
            ticket=found,
            wait_s=lambda tokens: tokens / 1024,
        )
        is None
    )
    assert searches.next_s() == 1.25
    assert list(searches.give_up(1.24)) == []
    (settled,) = searches.give_up(1.25)
    assert settled.best == found


def test_an_engine_without_the_prompt_settles_it_with_its_reason() -> None:
    searches = made()
    number = begin(searches, "r", PRODUCERS[0])
    settled = searches.answered(
        PRODUCERS[0], number, PromptProgress.OVER, 1.0, reason="no_lease"
    )
    assert settled is not None
    assert (settled.best, settled.reason) == (None, "no_lease")


def test_a_ticket_after_the_end_is_given_back_and_one_that_is_repeated_is_not() -> None:
    searches = made()
    number = begin(searches, "r", *PRODUCERS[:2])
    first = ticket(256)
    for _ in range(2):
        searches.answered(
            PRODUCERS[0],
            number,
            PromptProgress.TICKET,
            0.0,
            ticket=first,
            wait_s=lambda tokens: 5.0,
        )
    assert searches.take_unused() == ()
    (settled,) = searches.give_up(5.0)
    assert settled.best == first
    late = ticket(512)
    searches.answered(PRODUCERS[1], number, PromptProgress.TICKET, 6.0, ticket=late)
    assert searches.take_unused() == (late,)


def test_a_request_that_ends_gives_back_what_was_found_for_it() -> None:
    searches = made()
    number = begin(searches)
    found = ticket(256)
    searches.answered(
        PRODUCERS[0],
        number,
        PromptProgress.TICKET,
        0.0,
        ticket=found,
        wait_s=lambda tokens: 5.0,
    )
    searches.end("r")
    assert searches.take_unused() == (found,)
    assert searches.commands.take() == (StopQuery(number),)
    searches.end("r")
    assert searches.commands.take() == ()


@pytest.mark.parametrize(
    ("progress", "reason"),
    [(None, "no_answer"), (PromptProgress.QUEUED, "too_late")],
    ids=["silent", "has something"],
)
def test_when_its_time_is_over_a_request_waits_no_more(
    progress: PromptProgress | None, reason: str
) -> None:
    searches = made()
    number = begin(searches, "r", PRODUCERS[0], until_s=2.0)
    if progress is not None:
        searches.answered(PRODUCERS[0], number, progress, 1.0)
    assert list(searches.give_up(1.99)) == []
    assert [settled.reason for settled in searches.give_up(2.0)] == [reason]
    # Who has answered something is asked again.
    assert searches.is_paused(PRODUCERS[0], 2.0) is (progress is None)


def test_an_engine_that_does_not_answer_is_asked_again_after_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(1.0, 4.0))
    monkeypatch.setattr("random.uniform", lambda low, high: 1.0)
    searches = made()
    now_s = 0.0
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        number = begin(searches, "r", PRODUCERS[0])
        for _ in range(3):
            searches.answered(PRODUCERS[0], number, PromptProgress.UNKNOWN, now_s)
        assert searches.is_paused(PRODUCERS[0], now_s + pause_s - 0.01)
        now_s += pause_s
        assert not searches.is_paused(PRODUCERS[0], now_s)
        searches.commands.take()
    searches.answered(PRODUCERS[0], number, PromptProgress.OVER, now_s)
    searches.answered(PRODUCERS[0], number, PromptProgress.UNKNOWN, now_s)
    assert not searches.is_paused(PRODUCERS[0], now_s + 1.0), "it begins anew"


def test_searches_and_paused_engines_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SEARCHES", 4)
    monkeypatch.setattr(module, "MAX_PAUSED", 4)
    searches = made()
    for index in range(4):
        assert not searches.is_full
        begin(searches, f"r{index}")
    assert searches.is_full
    for port in range(10):
        searches.answered(("p", port), 0, PromptProgress.UNKNOWN, 0.0)
    paused = [port for port in range(10) if searches.is_paused(("p", port), 0.0)]
    assert paused == [6, 7, 8, 9]


class Histories(RuleBasedStateMachine):
    """Any order of what can happen; a ticket is used once, or given back once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable()
        self.searches = PrefixSearches(self.table, QueryCommands())
        self.now_s = 0.0
        self.count = 0
        self.open: dict[int, str] = {}
        self.until_s: dict[int, float] = {}
        self.stopped: set[int] = set()
        self.issued: list[RemotePrefill] = []
        self.used: list[RemotePrefill] = []

    def over(self, search: PrefixSearch | None) -> None:
        if search is not None:
            assert self.open.pop(search.number) == search.request_id
            if search.best is not None:
                self.used.append(search.best)

    @rule(which=st.sets(st.sampled_from(PRODUCERS), min_size=1), wait=st.integers(0, 5))
    def start(self, which: set[tuple[str, int]], wait: int) -> None:
        self.count += 1
        number = self.count - 1
        self.table.enter(f"r{number}").is_unfinished = True
        self.searches.start(
            f"r{number}",
            which,
            CHAIN,
            most_tokens=MOST,
            min_tokens=256,
            now_s=self.now_s,
            until_s=self.now_s + wait,
        )
        self.open[number] = f"r{number}"
        self.until_s[number] = self.now_s + wait

    @precondition(lambda self: self.count)
    @rule(
        data=st.data(),
        producer=st.sampled_from(PRODUCERS),
        what=st.sampled_from([*PromptProgress, PromptProgress.TICKET]),
        tokens=st.sampled_from([256, 512, MOST]),
    )
    def answer(
        self,
        data: st.DataObject,
        producer: tuple[str, int],
        what: PromptProgress,
        tokens: int,
    ) -> None:
        number = data.draw(st.integers(0, self.count - 1))
        found = ticket(tokens) if what is PromptProgress.TICKET else None
        if found is not None:
            self.issued.append(found)
        self.over(
            self.searches.answered(
                producer,
                number,
                what,
                self.now_s,
                reason="no_prefix",
                ticket=found,
                wait_s=lambda tokens: tokens / 512,
            )
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.searches.end(self.open.pop(number))

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        for search in self.searches.give_up(self.now_s):
            assert self.now_s >= search.until_s
            self.over(search)

    @invariant()
    def agrees(self) -> None:
        now = self.searches.snapshot()
        assert now.open == self.open
        assert len(self.searches) == len(self.open)
        waiting = {
            record.request_id
            for record in self.table.values()
            if record.search is not None and record.waits_for_answer
        }
        assert waiting == set(self.open.values())
        next_s = self.searches.next_s()
        if self.open:
            assert next_s is not None
            assert next_s <= min(self.until_s[number] for number in self.open)
        else:
            assert next_s is None

    def teardown(self) -> None:
        for search in self.searches.give_up(self.now_s + 100):
            self.over(search)
        assert not self.open
        back = self.searches.take_unused()
        epochs = [one.kvferry.lease_epoch for one in (*back, *self.used)]
        assert sorted(epochs) == sorted(one.kvferry.lease_epoch for one in self.issued)
        commands = self.searches.commands.take()
        stops = [one.number for one in commands if isinstance(one, StopQuery)]
        assert sorted(stops) == list(range(self.count))


Histories.TestCase.settings = settings(max_examples=draws(150), stateful_step_count=40)
TestHistories = Histories.TestCase
