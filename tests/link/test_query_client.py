"""Asking producers over connections that bring answers, break, or are about to be closed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Container

import pytest

from kvferry.link import limits
from kvferry.link.commands import Producer, QueryCommand, StartQuery, StopQuery
from kvferry.link.connection_slots import ConnectionSlotsSnapshot
from kvferry.link.counters import Counters
from kvferry.link.limits import Backoff
from kvferry.link.peer_link import Message, PeerLinks, PeerLinksSnapshot
from kvferry.link.query_client import QueryClient
from kvferry.protocol.errors import (
    ConnectionEnded,
    HandshakeFailed,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.handshake import LeaseName, Release, decode_request, encode
from kvferry.protocol.queries import (
    Answer,
    Answers,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
)

HOST, PORT, SIBLING = "127.0.0.1", 5600, 5601
LEASE = LeaseName(slot=1, epoch=f"{2:015x}")
NEVER_S = 30.0

Reply = Callable[["Network", Producer, "Subscribe | Unsubscribe"], "Answers | None"]


def query(number: int) -> PromptQuery:
    return PromptQuery(
        number=number, key=f"cmpl-{number}", num_tokens=5, digest="0" * 32
    )


class Network:
    """The client: its loop, connections, and producers that answer with `reply`. The engine settles tickets."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.counters = Counters()
        self.sent: list[tuple[Producer, Subscribe | Unsubscribe]] = []
        self.answers: list[tuple[Producer, Answer]] = []
        self.commands_under_way = 0
        self.connections: list[Connection] = []
        self.closed: Container[int] = ()
        self.silent: Container[int] = ()
        self.refusing: Container[int] = ()
        self.released: list[Release] = []
        self.links = PeerLinks(self, self.counters)  # type: ignore[arg-type]
        self.query_client = QueryClient(self.links, "decode-0", self.on_answer)

    def on_answer(self, producer: Producer, answer: Answer) -> None:
        self.answers.append((producer, answer))
        if answer.progress is PromptProgress.TICKET:
            self.query_client.submit([StopQuery(answer.number)])

    def call_soon(self, call: Callable[[], object]) -> None:
        def run() -> None:
            self.commands_under_way -= 1
            call()

        self.commands_under_way += 1
        asyncio.get_running_loop().call_soon(run)

    async def connect(self, host: str, port: int, max_answer_bytes: int) -> Connection:
        if port in self.closed:
            raise NothingListens("nothing listens there")
        if port in self.refusing:
            raise PeerRefused("it has another secret")
        while port in self.silent:
            await asyncio.sleep(NEVER_S)
        self.connections.append(Connection(self, (host, port)))
        return self.connections[-1]

    async def run(self, *commands: QueryCommand) -> None:
        """Until no producer has an open question, and what has settled the last one is sent."""
        self.query_client.submit(commands)
        await asyncio.sleep(0)
        while self.commands_under_way or not self.is_quiet():
            await asyncio.sleep(0)

    def is_quiet(self) -> bool:
        """Whether no producer is queried, or has to be told that a query is over."""
        now = self.query_client.snapshot()
        return not now.is_sending and not any(now.producers.values())


class Connection:
    """A connection to one producer."""

    def __init__(self, network: Network, producer: Producer) -> None:
        self.network = network
        self.producer = producer
        self.max_answer_bytes = 0
        self.ended: asyncio.Future[HandshakeFailed] = (
            asyncio.get_running_loop().create_future()
        )
        self._on_frame: Callable[[bytes], None] | None = None

    @property
    def is_closed(self) -> bool:
        return self.ended.done()

    @property
    def is_used(self) -> bool:
        """Whether its link takes what it brings."""
        return self._on_frame is not None

    def send(self, frame: bytes) -> None:
        if self.is_closed:
            raise HandshakeFailed("is closed")
        message = decode_request(frame)
        if isinstance(message, Release):
            self.network.released.append(message)
            return
        assert isinstance(message, (Subscribe, Unsubscribe))
        self.network.sent.append((self.producer, message))
        try:
            answers = self.network.reply(self.network, self.producer, message)
        except ConnectionEnded:
            self.cut()
        else:
            if answers is not None:
                self.bring(answers)

    def receive_all(self, on_frame: Callable[[bytes], None]) -> None:
        self._on_frame = on_frame

    def bring(self, answers: Answers) -> None:
        """Let these answers arrive."""
        asyncio.get_running_loop().call_soon(self._arrive, encode(answers))

    def cut(self) -> None:
        """Let the other end close it."""
        asyncio.get_running_loop().call_soon(
            self.end, ConnectionEnded("the test cut it")
        )

    def end(self, why: HandshakeFailed) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    def close(self, linger_ms: int) -> None:
        assert linger_ms
        self.end(ConnectionEnded("was closed here"))

    def _arrive(self, frame: bytes) -> None:
        assert self._on_frame is not None
        if not self.is_closed:
            self._on_frame(frame)


def answered(
    message: Subscribe, progress: PromptProgress, siblings: tuple[int, ...] = ()
) -> Answers:
    return Answers(
        answers=tuple(
            Answer(number=asked.number, progress=progress) for asked in message.queries
        ),
        siblings=siblings,
    )


def play(reply: Reply, *commands: QueryCommand) -> Network:
    async def run() -> Network:
        network = Network(reply)
        await asyncio.wait_for(network.run(*commands), NEVER_S)
        return network

    return asyncio.run(run())


def asked_of(network: Network, producer: Producer) -> list[int]:
    messages = [
        message
        for to, message in network.sent
        if to == producer and isinstance(message, Subscribe)
    ]
    return [asked.number for message in messages for asked in message.queries]


def test_a_question_that_comes_while_the_last_one_is_taken_back_is_asked() -> None:
    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if isinstance(message, Subscribe):
            return answered(message, PromptProgress.TICKET)
        if message.numbers == (1,):
            network.query_client.submit([StartQuery(producer, query(2))])
        return None

    network = play(reply, StartQuery((HOST, PORT), query(1)))
    assert asked_of(network, (HOST, PORT)) == [1, 2]
    assert [answer.number for _, answer in network.answers] == [1, 2]


def test_a_connection_that_breaks_is_made_again_and_all_open_questions_are_repeated() -> (
    None
):
    breaks = [True]

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if breaks:
            breaks.clear()
            raise ConnectionEnded("the test cut it")
        return (
            answered(message, PromptProgress.TICKET)
            if isinstance(message, Subscribe)
            else None
        )

    network = play(
        reply, *(StartQuery((HOST, PORT), query(number)) for number in (1, 2))
    )
    assert asked_of(network, (HOST, PORT)) == [1, 2, 1, 2]
    found = [answer.progress for _, answer in network.answers]
    assert found == [PromptProgress.UNKNOWN] * 2 + [PromptProgress.TICKET] * 2
    assert network.counters.total("side_channel_errors") == 1


def test_what_a_connection_takes_no_more_is_sent_over_the_next_whatever_else_was_to_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RETRY", Backoff(0.001, 0.01))
    monkeypatch.setattr("kvferry.link.query_client.MAX_QUERIES", 1)
    refused: list[int] = []
    failed: list[str] = []

    def reply(
        _: Network, __: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if isinstance(message, Unsubscribe):
            return None
        number = message.queries[0].number
        if number > 1 and not refused:
            refused.append(number)
            raise HandshakeFailed("takes no messages")
        return answered(message, PromptProgress.TICKET)

    async def run() -> Network:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, bug: failed.append(bug["message"]))
        network = Network(reply)
        first, *others = (
            StartQuery((HOST, PORT), query(number)) for number in (1, 2, 3)
        )
        await asyncio.wait_for(network.run(first), NEVER_S)
        await asyncio.wait_for(network.run(*others), NEVER_S)
        return network

    network = asyncio.run(run())
    assert not failed
    assert len(network.connections) == 2
    settled = [
        answer.number
        for _, answer in network.answers
        if answer.progress is PromptProgress.TICKET
    ]
    assert settled == [1, 2, 3]


def test_what_one_rank_does_not_know_is_asked_of_its_siblings_and_taken_back_from_both() -> (
    None
):
    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if isinstance(message, Unsubscribe):
            return None
        known = producer == (HOST, SIBLING)
        return answered(
            message,
            PromptProgress.TICKET if known else PromptProgress.UNKNOWN,
            () if known else (PORT, SIBLING),
        )

    network = play(reply, StartQuery((HOST, PORT), query(1)))
    assert asked_of(network, (HOST, PORT)) == asked_of(network, (HOST, SIBLING)) == [1]
    assert {to for to, message in network.sent if isinstance(message, Unsubscribe)} == {
        (HOST, PORT),
        (HOST, SIBLING),
    }


def settle(
    network: Network, producer: Producer, message: Subscribe | Unsubscribe
) -> Answers | None:
    return (
        answered(message, PromptProgress.TICKET)
        if isinstance(message, Subscribe)
        else None
    )


def test_no_more_producers_have_a_connection_at_once_than_the_limit_and_all_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 8)
    most = 0

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        nonlocal most
        most = max(most, len([one for one in network.connections if not one.is_closed]))
        return settle(network, producer, message)

    network = play(
        reply, *(StartQuery((HOST, number + 1), query(number)) for number in range(30))
    )
    assert len({to for to, _ in network.sent}) == 30
    assert most <= 2 * 8 + 2, "with the idle ones, and the turns to connect"
    assert network.counters.total("side_channel_errors") == 0


def test_a_connection_is_kept_for_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        network = Network(settle)
        for number in (1, 2):
            await network.run(StartQuery((HOST, PORT), query(number)))
        assert asked_of(network, (HOST, PORT)) == [1, 2]
        (kept,) = network.connections
        assert not kept.is_closed
        monkeypatch.setattr(limits, "IDLE_S", 0.0)
        await network.run(StartQuery((HOST, PORT), query(3)))
        await asyncio.wait((kept.ended,))
        assert not network.query_client.snapshot().producers

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


def test_an_idle_connection_makes_room_for_another_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 1)

    async def run() -> None:
        network = Network(settle)
        for number in range(3):
            await network.run(StartQuery((HOST, PORT + number), query(number)))
        while not network.connections[0].is_closed:
            await asyncio.sleep(0)
        assert [one.is_closed for one in network.connections] == [True, False, False]
        assert len(network.answers) == 3
        assert network.counters.total("side_channel_errors") == 0

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


def test_the_end_of_an_idle_connection_is_no_error_and_the_next_question_has_a_new_one() -> (
    None
):
    async def run() -> None:
        network = Network(settle)
        await network.run(StartQuery((HOST, PORT), query(1)))
        network.connections[0].cut()
        while network.query_client.snapshot().producers:
            await asyncio.sleep(0)
        await network.run(StartQuery((HOST, PORT), query(2)))
        assert [answer.progress for _, answer in network.answers] == [
            PromptProgress.TICKET
        ] * 2
        assert network.counters.total("side_channel_errors") == 0

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


def test_questions_are_repeated_although_news_comes_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The producer forgets a question that is not repeated."""
    monkeypatch.setattr(limits, "REPEAT_S", 0.05)
    later: list[asyncio.TimerHandle] = []

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if not isinstance(message, Subscribe):
            return None
        newest = max(asked.number for asked in message.queries)
        command = StartQuery(producer, query(newest + 1))
        later.append(
            asyncio.get_running_loop().call_later(
                0.005, network.query_client.submit, [command]
            )
        )
        is_over = asked_of(network, producer).count(1) == 3
        return answered(
            message, PromptProgress.TICKET if is_over else PromptProgress.QUEUED
        )

    async def run() -> None:
        network = Network(reply)
        network.query_client.submit([StartQuery((HOST, PORT), query(1))])
        while asked_of(network, (HOST, PORT)).count(1) < 3:
            await asyncio.sleep(0.001)
        assert network.counters.total("side_channel_errors") == 0
        for timer in later:
            timer.cancel()  # or one could begin a task while the loop ends

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


def test_a_producer_that_answers_no_more_knows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that is gone ends no connection."""
    monkeypatch.setattr(limits, "REPEAT_S", 0.05)
    monkeypatch.setattr(limits, "RETRY", Backoff(0.001, 2.0))

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if not isinstance(message, Subscribe):
            return None
        times = asked_of(network, producer).count(1)
        if times == 1:
            return answered(message, PromptProgress.QUEUED)
        return answered(message, PromptProgress.TICKET) if times > 2 else None

    network = play(reply, StartQuery((HOST, PORT), query(1)))
    assert [answer.progress for _, answer in network.answers] == [
        PromptProgress.QUEUED,
        PromptProgress.UNKNOWN,
        PromptProgress.TICKET,
    ]
    assert network.counters.total("side_channel_errors") == 1


PORTS = range(20_000, 20_300)
"""Of the host of the honest producers; the attacks name them."""


async def turns(count: int = 200) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_requests_that_name_300_ports_of_a_host_delay_no_producer_there_and_close_no_connection(
    kind: str,
) -> None:
    """Of the 256 places they had all for 10 s, and honest prompts waited as long: 0.02 s became 10.02."""

    async def run() -> None:
        network = Network(settle)
        setattr(network, kind, PORTS)
        await network.run(StartQuery((HOST, PORT), query(0)))
        network.query_client.submit(
            StartQuery((HOST, port), query(port)) for port in PORTS
        )
        await turns()
        for number, producer in enumerate([(HOST, PORT), ("10.0.0.1", PORT)], start=1):
            network.query_client.submit([StartQuery(producer, query(number))])
            await turns(20)
            assert network.answers[-1] == (
                producer,
                Answer(number=number, progress=PromptProgress.TICKET),
            )
        assert (
            len([one for one in network.connections if one.producer == (HOST, PORT)])
            == 1
        ), "it was kept"
        network.query_client.submit(StopQuery(port) for port in PORTS)
        await turns()
        assert set(network.query_client.snapshot().producers) == {
            (HOST, PORT),
            ("10.0.0.1", PORT),
        }
        network.query_client.submit([StartQuery((HOST, SIBLING), query(3))])
        await turns(20)
        assert network.answers[-1][0] == (HOST, SIBLING), (
            "aborted requests have left their turns"
        )

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


@pytest.mark.parametrize("kind", ["closed", "silent", ""])
def test_a_listener_that_offers_255_siblings_gets_no_place_of_another_producer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 16)

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if isinstance(message, Unsubscribe):
            return None
        if producer[1] in (1, *PORTS):
            return answered(message, PromptProgress.UNKNOWN, tuple(PORTS))
        return answered(message, PromptProgress.TICKET)

    async def run() -> None:
        network = Network(reply)
        if kind:
            setattr(network, kind, PORTS)
        await network.run(StartQuery((HOST, PORT), query(0)))
        network.query_client.submit([StartQuery((HOST, 1), query(1))])
        await turns()
        assert (
            0
            < len(network.query_client.snapshot().siblings)
            <= limits.MAX_SIBLINGS_OF_ONE
        )
        for number, port in enumerate((SIBLING, PORT, PORTS[-1]), start=2):
            network.silent, network.closed = (), ()
            network.query_client.submit([StartQuery((HOST, port), query(number))])
            await turns(30)
            assert number in asked_of(network, (HOST, port))
        assert (
            len([one for one in network.connections if not one.is_closed])
            <= 2 * 16 + 4 + 1
        )
        network.query_client.submit(StopQuery(number) for number in range(1, 5))
        await turns()
        assert not network.query_client.snapshot().open
        assert not any(network.query_client.snapshot().producers.values())

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


def test_answers_that_change_nothing_are_not_passed_on_and_a_prompt_is_known_while_one_rank_knows_it() -> (
    None
):
    says: dict[int, PromptProgress] = {
        PORT: PromptProgress.UNKNOWN,
        SIBLING: PromptProgress.QUEUED,
    }

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        return (
            answered(message, says[producer[1]], (PORT, SIBLING))
            if isinstance(message, Subscribe)
            else None
        )

    async def run() -> None:
        network = Network(reply)
        network.query_client.submit([StartQuery((HOST, PORT), query(1))])
        await turns()
        named, sibling = network.connections

        async def repeat(connection: Connection, progress: PromptProgress) -> None:
            answer = Answer(number=1, progress=progress)
            connection.bring(Answers(answers=(answer,), siblings=(PORT, SIBLING)))
            await turns(10)

        for _ in range(10):
            await repeat(named, PromptProgress.UNKNOWN)
            await repeat(sibling, PromptProgress.QUEUED)
        assert [(port, answer.progress) for (_, port), answer in network.answers] == [
            (PORT, PromptProgress.UNKNOWN),
            (SIBLING, PromptProgress.QUEUED),
        ]
        await repeat(named, PromptProgress.QUEUED)
        await repeat(sibling, PromptProgress.UNKNOWN)
        assert network.answers[2:] == [
            ((HOST, PORT), Answer(number=1, progress=PromptProgress.QUEUED))
        ]
        await repeat(named, PromptProgress.UNKNOWN)
        assert network.answers[3:] == [
            ((HOST, PORT), Answer(number=1, progress=PromptProgress.UNKNOWN))
        ]
        await repeat(sibling, PromptProgress.TICKET)
        await turns()
        assert network.answers[-1][1].progress is PromptProgress.TICKET
        assert not network.query_client.snapshot().open

    asyncio.run(asyncio.wait_for(run(), NEVER_S))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_nothing_is_left_when_all_questions_are_settled(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases go over the same connections, some of them to engines that have restarted."""
    dice = random.Random(seed)
    monkeypatch.setattr(limits, "SLOTS", 6)
    monkeypatch.setattr(limits, "IDLE_S", 0.0)
    monkeypatch.setattr(limits, "RETRY", Backoff(0.0, 2.0))
    monkeypatch.setattr(limits, "CONNECT_S", 0.01)
    monkeypatch.setattr(limits, "REFUSED_S", 0.002)
    # Far longer than a turn of the loop on a busy machine: all open queries are sent again then. At a millisecond every
    # turn repeated up to 300 queries to six producers, for 20 seconds.
    monkeypatch.setattr(limits, "REPEAT_S", 0.05)

    def reply(
        network: Network, producer: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if isinstance(message, Unsubscribe) or dice.random() < 0.1:
            return None
        if dice.random() < 0.05:
            raise ConnectionEnded("the test cut it")
        progress = dice.choice(
            [
                PromptProgress.UNKNOWN,
                PromptProgress.UNKNOWN,
                PromptProgress.QUEUED,
                PromptProgress.TICKET,
            ]
        )
        return answered(message, progress, tuple(dice.sample(range(1, 30), 5)))

    async def run() -> None:
        network = Network(reply)
        network.closed = (3, 9, 27)
        network.silent = (4, 16)
        network.refusing = (7, 25)
        started = 0
        for _ in range(300):
            network.query_client.submit(
                [StartQuery((HOST, dice.randrange(1, 30)), query(started))]
            )
            started += 1
            if dice.random() < 0.5:
                network.query_client.submit([StopQuery(dice.randrange(started))])
            if dice.random() < 0.3:
                link = network.links.to(
                    (dice.choice([HOST, "localhost"]), dice.randrange(1, 30))
                )
                boot = f"{dice.randrange(2):032x}"
                link.send(
                    Message(
                        encode(Release(boot=boot, leases=(LEASE,))), boot, "released"
                    )
                )
            await turns(dice.randrange(5))
        network.query_client.submit(StopQuery(number) for number in range(started))
        # One whose slot was taken is forgotten at once, and closes its connection some turns later.
        nothing = ConnectionSlotsSnapshot(in_use={}, idle={}, connecting={}, waiting={})
        while network.links.snapshot() != PeerLinksSnapshot(
            addresses=(), slots=nothing
        ):
            await asyncio.sleep(0.001)
        assert all(one.is_closed for one in network.connections)
        assert network.counters.total("released") == len(network.released) > 0
        left = network.query_client.snapshot()
        assert (left.open, left.siblings, left.producers) == (
            frozenset(),
            frozenset(),
            {},
        )

    asyncio.run(asyncio.wait_for(run(), NEVER_S))
