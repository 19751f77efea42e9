"""Searches for prefixes by the query client over real sockets: whom it asks, what it passes on, what it gives up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvferry.link import limits
from kvferry.link.allowed_hosts import ANY_HOST
from kvferry.link.client import SideChannelClient
from kvferry.link.commands import Producer, StartQuery, StartSearch, StopQuery
from kvferry.link.counters import Counters
from kvferry.link.peer_link import PeerLinks
from kvferry.link.query_client import QueryClient
from kvferry.protocol.digests import GrowingChain, Prompt
from kvferry.protocol.handshake import Refused, encode
from kvferry.protocol.queries import Answer, PromptProgress, PromptQuery
from tests.harness.prefix_answers import (
    ScriptedAnswerer,
    chain_of,
    over,
    queued,
    silent,
    ticket,
)
from tests.link.channel import HOST
from tests.link.raw_listener import ZMTP, answer_of, receive_until
from tests.ports import free_port
from tests.waiting import wait_until

TOKENS = list(range(3000))
LONG = [index % 1000 for index in range(40_000)]
TICKET = b"\x80"
"""Params that nobody reads here."""


class Asker:
    """A query client, and what it has passed on."""

    def __init__(self) -> None:
        self.links = PeerLinks(SideChannelClient((), ANY_HOST), Counters())
        self.found: list[tuple[Producer, Answer]] = []
        self.client = QueryClient(
            self.links, "asker", self._unexpected, self.take_found
        )
        self._threads: set[int] = set()

    def _unexpected(self, producer: Producer, answer: Answer) -> None:
        raise AssertionError(f"{producer} has answered a prompt query: {answer}")

    def take_found(self, producer: Producer, answer: Answer) -> None:
        self._threads.add(threading.get_ident())
        self.found.append((producer, answer))

    def search(
        self, *producers: Producer, number: int = 1, tokens: list[int] | None = None
    ) -> GrowingChain:
        prompt = TOKENS if tokens is None else tokens
        chain = GrowingChain(Prompt(tokens=prompt))
        most = len(prompt) // 256 * 256
        self.client.submit([StartSearch(number, producers, chain, most, 300)])
        return chain

    def stop(self, number: int = 1) -> None:
        self.client.submit([StopQuery(number)])

    def wait(self, count: int = 1) -> list[tuple[int, PromptProgress]]:
        """Ports and answers, once there are so many."""
        wait_until(lambda: len(self.found) >= count, f"{count} answers")
        return [(producer[1], answer.progress) for producer, answer in self.found]

    def turn(self) -> None:
        """Wait until the client's loop has done what was submitted."""
        done = threading.Event()
        self.links.client.call_soon(done.set)
        assert done.wait(30.0)


@pytest.fixture
def asker() -> Iterator[Asker]:
    made = Asker()
    yield made
    made.links.close()


@pytest.fixture
def make() -> Iterator[Callable[..., ScriptedAnswerer]]:
    made: list[ScriptedAnswerer] = []

    def build(*args: object, **more: object) -> ScriptedAnswerer:
        made.append(ScriptedAnswerer(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_all_engines_are_asked_under_one_number_with_the_digests_of_whole_chunks(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    answerers = [make(over()), make(lambda query: ticket(query.number, TICKET))]
    asker.search(*((HOST, one.port) for one in answerers), number=7)
    assert set(asker.wait(2)) == {
        (answerers[0].port, PromptProgress.OVER),
        (answerers[1].port, PromptProgress.TICKET),
    }
    for one in answerers:
        (query,) = one.queries
        assert (query.number, query.min_tokens) == (7, 300)
        assert query.chain == chain_of(TOKENS)
    asker.stop(7)
    for one in answerers:
        wait_until(lambda one=one: one.unsubscribed == [7], "it is told")  # type: ignore[misc]


def test_the_digests_of_a_long_prompt_are_made_in_parts_and_are_the_same(
    asker: Asker, make: Callable[..., ScriptedAnswerer], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    whole = GrowingChain.grow

    def grow(chain: GrowingChain, num_tokens: int) -> None:
        before = chain.num_tokens
        whole(chain, num_tokens)
        parts.append(chain.num_tokens - before)

    monkeypatch.setattr(GrowingChain, "grow", grow)
    one = make(over())
    chain = asker.search((HOST, one.port), tokens=LONG)
    asker.wait()
    assert one.queries[0].chain == chain_of(LONG)
    assert max(parts) <= 8192
    assert chain.num_tokens == len(LONG) // 256 * 256


def test_a_search_that_is_stopped_before_its_digests_are_made_asks_nobody(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    one = make(over())
    prompt = LONG * 5
    chain = GrowingChain(Prompt(tokens=prompt))
    most = len(prompt) // 256 * 256
    asker.client.submit(
        [StartSearch(1, ((HOST, one.port),), chain, most, 1), StopQuery(1)]
    )
    asker.search((HOST, one.port), number=2)
    asker.wait()
    assert [query.number for query in one.queries] == [2]
    assert chain.num_tokens < most


def test_a_prompt_that_cannot_be_digested_is_nowhere_and_others_are_asked_for(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    one = make(over())
    producer = (HOST, one.port)
    bad = GrowingChain(Prompt(tokens=[-1] * 256))
    asker.client.submit([StartSearch(1, (producer,), bad, 256, 1)])
    asker.search(producer, number=2)
    asker.wait(2)
    assert [answer.number for _, answer in asker.found] == [1, 2]
    assert [query.number for query in one.queries] == [2]


def test_what_an_engine_repeats_is_passed_on_once(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    one = make(queued)
    asker.search((HOST, one.port))
    asker.wait()
    # In one message: the answer to the second search must not overtake the last of them.
    one.say(
        *[Answer(number=1, progress=PromptProgress.QUEUED)] * 3,
        *[ticket(1, TICKET)] * 3,
        Answer(number=1, progress=PromptProgress.OVER),
    )
    asker.wait(2)
    asker.search((HOST, one.port), number=2)
    found = asker.wait(3)
    assert [progress for _, progress in found] == [
        PromptProgress.QUEUED,
        PromptProgress.TICKET,
        PromptProgress.QUEUED,
    ]


def test_a_ticket_that_comes_after_the_end_of_its_search_is_passed_on_once(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    one = make(queued)
    asker.search((HOST, one.port))
    asker.wait()
    asker.stop()
    wait_until(lambda: one.unsubscribed == [1], "it is told")
    # In one message: the answer to the second search must not overtake the last of them.
    one.say(
        Answer(number=1, progress=PromptProgress.OVER, reason="no_prefix"),
        ticket(1, TICKET),
        ticket(1, TICKET),
    )
    asker.wait(2)
    asker.search((HOST, one.port), number=2)
    found = asker.wait(3)
    assert [answer.number for _, answer in asker.found] == [1, 1, 2]
    assert found[1][1] is PromptProgress.TICKET


def test_an_engine_without_prefix_queries_has_refused_and_answers_other_queries(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise its silence would end the connection, and tell the same.
    monkeypatch.setattr(limits, "REPEAT_S", 600.0)
    port = free_port()
    refusal = Refused(
        field="type", value="find_prefixes", expected="a message of this version"
    )
    with socket.create_server((HOST, port)) as server:
        over = threading.Event()
        thread = threading.Thread(
            target=refuse_and_stay, args=(server, encode(refusal), over)
        )
        thread.start()
        asker.search((HOST, port))
        # The connection stays, so it is the refusal that tells.
        assert asker.wait() == [(port, PromptProgress.UNKNOWN)]
        over.set()
        thread.join(30.0)


def refuse_and_stay(
    server: socket.socket, refusal: bytes, over: threading.Event
) -> None:
    """Accept a connection, refuse its query for prefixes, and keep it until the test is over."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(ZMTP)
        receive_until(connection, b"find_prefixes")
        connection.sendall(answer_of(refusal))
        over.wait(30.0)


def test_an_engine_that_cannot_be_reached_has_nothing(asker: Asker) -> None:
    closed = free_port()
    asker.search((HOST, closed))
    assert asker.wait() == [(closed, PromptProgress.UNKNOWN)]
    asker.stop()
    wait_until(
        lambda: not asker.links.snapshot().addresses, "nothing is wanted of it any more"
    )


def test_one_silent_engine_does_not_keep_the_answers_of_others(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    silent_one, good = make(silent), make(over())
    asker.search((HOST, silent_one.port), (HOST, good.port))
    assert asker.wait() == [(good.port, PromptProgress.OVER)]
    silent_one.wait_for_queries()


def test_prompts_and_prefixes_are_queried_over_one_connection(
    asker: Asker, make: Callable[..., ScriptedAnswerer]
) -> None:
    one = make(over())
    asker.client = QueryClient(asker.links, "both", asker.take_found, asker.take_found)
    prompt = PromptQuery(number=1, key="x", num_tokens=5, digest="0" * 32)
    asker.client.submit([StartQuery((HOST, one.port), prompt)])
    asker.search((HOST, one.port), number=2)
    asker.wait(2)
    progress = {answer.number: answer.progress for _, answer in asker.found}
    assert progress == {1: PromptProgress.UNKNOWN, 2: PromptProgress.OVER}
    assert len(asker.links.snapshot().addresses) == 1
