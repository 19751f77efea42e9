"""Whatever clients name and peers do, in whatever order: in the end no slot, no link and no task is left."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from kvferry.link import limits
from kvferry.link.commands import Producer, StartQuery, StopQuery
from kvferry.link.limits import Backoff
from kvferry.link.peer_link import Message
from kvferry.protocol.errors import ConnectionEnded
from kvferry.protocol.handshake import LeaseName, Release, encode
from kvferry.protocol.queries import (
    Answer,
    Answers,
    PromptProgress,
    Subscribe,
    Unsubscribe,
)
from tests.link.test_query_client import Network, query

HOSTS = ("a", "b", "c.example", "127.0.0.1")
PORTS = range(1, 12)
STEPS = 300
NEVER_S = 60.0
RELEASE = encode(Release(boot="f" * 32, leases=(LeaseName(slot=1, epoch="1" * 15),)))
PROGRESS = (PromptProgress.UNKNOWN, PromptProgress.QUEUED, PromptProgress.TICKET)


class Play:
    """A network in which everything happens by dice."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.network = Network(self.reply)
        self.num_queries = 0

    def reply(
        self, _: Network, __: Producer, message: Subscribe | Unsubscribe
    ) -> Answers | None:
        if self.dice.random() < 0.1:
            raise ConnectionEnded("it is gone")
        if isinstance(message, Unsubscribe) or self.dice.random() < 0.2:
            return None
        answers = tuple(
            Answer(number=asked.number, progress=self.dice.choice(PROGRESS))
            for asked in message.queries
        )
        return Answers(answers=answers, siblings=tuple(self.dice.sample(PORTS, 4)))

    def step(self) -> None:
        address = (self.dice.choice(HOSTS), self.dice.choice(PORTS))
        self.dice.choice(
            [
                self.start,
                self.start,
                self.stop,
                self.send,
                self.change,
                self.cut,
                self.bring,
            ]
        )(address)

    def start(self, address: Producer) -> None:
        self.num_queries += 1
        self.network.query_client.submit([StartQuery(address, query(self.num_queries))])

    def stop(self, _: Producer) -> None:
        number = self.dice.randint(0, self.num_queries)
        self.network.query_client.submit([StopQuery(number)])

    def send(self, address: Producer) -> None:
        boot = self.dice.choice("xyz")
        for _ in range(self.dice.choice([1, 1, limits.QUEUED_MESSAGES + 1])):
            self.network.links.to(address).send(
                Message(RELEASE, boot, "leases_given_back")
            )

    def change(self, _: Producer) -> None:
        self.network.closed = self.dice.sample(PORTS, 3)
        self.network.refusing = self.dice.sample(PORTS, 2)
        self.network.silent = self.dice.sample(PORTS, 2)

    def cut(self, _: Producer) -> None:
        if self.network.connections:
            self.dice.choice(self.network.connections).cut()

    def bring(self, _: Producer) -> None:
        """An answer that comes late, or to somebody else's query."""
        used = [
            link
            for link in self.network.connections
            if link.is_used and not link.is_closed
        ]
        if used:
            number = self.dice.randint(1, self.num_queries + 1)
            answer = Answer(number=number, progress=PromptProgress.QUEUED)
            self.dice.choice(used).bring(Answers(answers=(answer,), siblings=(1, 2)))

    def is_over(self) -> bool:
        return (
            not self.network.links.snapshot().addresses
            and len(asyncio.all_tasks()) == 1
        )

    def end(self) -> None:
        self.network.closed = ()
        self.network.refusing = ()
        self.network.silent = ()
        self.network.query_client.submit(
            StopQuery(number) for number in range(1, self.num_queries + 1)
        )


@pytest.mark.parametrize("seed", range(40))
def test_no_slot_no_link_and_no_task_is_left_whatever_clients_name_and_peers_do(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(limits, "SLOTS", dice.choice([1, 1, 2, 8]))
    monkeypatch.setattr(limits, "MAX_WAITING", dice.choice([2, 8, 4096]))
    monkeypatch.setattr(limits, "CONNECT_S", 0.02)
    monkeypatch.setattr(limits, "IDLE_S", 0.03)
    monkeypatch.setattr(limits, "REPEAT_S", 0.02)
    monkeypatch.setattr(limits, "REFUSED_S", 0.01)
    monkeypatch.setattr(limits, "RETRY", Backoff(0.001, 0.01))
    failed: list[dict[str, Any]] = []

    async def run() -> Network:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failed.append(context)
        )
        play = Play(dice)
        for _ in range(STEPS):
            play.step()
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            if dice.random() < 0.1:
                await asyncio.sleep(0.003)  # timers run out
        play.end()
        until_s = asyncio.get_running_loop().time() + NEVER_S
        while not play.is_over():
            assert asyncio.get_running_loop().time() < until_s, (
                "a link or a task is left"
            )
            await asyncio.sleep(0.01)
        return play.network

    network = asyncio.run(run())
    assert not failed
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert all(connection.is_closed for connection in network.connections)
    slots = network.links.snapshot().slots
    assert (slots.in_use, slots.idle, slots.connecting, slots.waiting) == (
        {},
        {},
        {},
        {},
    )
    now = network.query_client.snapshot()
    assert (now.open, now.producers, now.siblings) == (frozenset(), {}, frozenset())
