"""First contacts of one worker: with silent producers, and on a system without threads."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.link import limits
from kvferry.link.counters import Counters
from kvferry.link.limits import PLANS_AT_ONCE
from kvferry.plan.cost import Costs
from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import Refused
from kvferry.worker.peers.first_contact import FirstContact
from kvferry.worker.peers.handshakes import HandshakeResult
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.peers.plan_cache import PlanCache
from kvferry.worker.settings import WorkerSettings
from tests.link.channel import HOST, ask, listening
from tests.plan import samples
from tests.processes import task_count
from tests.waiting import wait_until

PEERS = 256
OTHER_BOOT = "0" * 31 + "1"


@pytest.fixture
def contact() -> Iterator[FirstContact]:
    settings = WorkerSettings(handshake_timeout_s=60.0)
    made = FirstContact(samples.engine(workers=[samples.worker()]), Costs(), settings)
    yield made
    made.close()


def test_threads_are_as_many_with_256_silent_producers_as_with_one(
    contact: FirstContact,
) -> None:
    ended: queue.SimpleQueue[HandshakeResult] = queue.SimpleQueue()
    with socket.create_server((HOST, 0), backlog=PEERS) as silent:
        _, port = silent.getsockname()
        accepted: list[socket.socket] = []

        def connect(count: int) -> None:
            for number in range(count):
                contact.begin(PeerKey(HOST, port, f"P{number}", "0" * 32), ended.put)
            while len(accepted) < count:
                accepted.append(silent.accept()[0])

        connect(1)
        with_one = task_count()
        connect(PEERS)
        assert task_count() == with_one
        assert ended.empty()
        for connection in accepted:
            connection.close()
    contact.close()
    results = [ended.get(timeout=60) for _ in range(PEERS + 1)]
    assert all(isinstance(result, HandshakeFailed) for result in results)


def test_a_hundred_descriptions_are_planned_by_a_fixed_number_of_threads(
    contact: FirstContact,
) -> None:
    ended: queue.SimpleQueue[HandshakeResult] = queue.SimpleQueue()
    description = samples.engine(workers=[samples.worker()])
    with listening(Counters(), description=description) as (_, port):
        key = PeerKey(HOST, port, description.engine_id, OTHER_BOOT)
        for _ in range(100):
            contact.begin(key, ended.put)
        results = [ended.get(timeout=60) for _ in range(100)]
    assert all(isinstance(result, PeerRefused) for result in results), (
        "it has another boot"
    )
    planners = [
        one for one in threading.enumerate() if one.name.startswith("kvferry-planner")
    ]
    assert 1 <= len(planners) <= PLANS_AT_ONCE
    contact.close()
    wait_until(
        lambda: not any(one.is_alive() for one in planners), "they end with the worker"
    )


@pytest.mark.parametrize("boot", ["its own", "another"])
def test_a_connection_is_kept_until_the_agents_are_connected_or_will_not_be(
    contact: FirstContact, boot: str
) -> None:
    ended: queue.SimpleQueue[HandshakeResult] = queue.SimpleQueue()
    description = samples.engine(workers=[samples.worker()])
    is_known = boot == "its own"
    with listening(Counters(), description=description) as (listener, port):
        named = description.boot if is_known else OTHER_BOOT
        key = PeerKey(HOST, port, description.engine_id, named)
        contact.begin(key, ended.put)
        assert isinstance(ended.get(timeout=60), PeerRefused) is not is_known
        withdrawing = threading.Thread(target=listener.withdraw)
        withdrawing.start()
        if is_known:
            wait_until(lambda: isinstance(ask(port), Refused), "nobody hears of it")
            assert withdrawing.is_alive()
            contact.over(key)
        withdrawing.join(limits.CONTACTS_S / 2)
        assert not withdrawing.is_alive()


def test_a_system_that_gives_no_more_threads_fails_the_contact_and_not_the_next(
    contact: FirstContact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: queue.SimpleQueue[HandshakeResult] = queue.SimpleQueue()
    description = samples.engine(workers=[samples.worker()])
    with listening(Counters(), description=description) as (_, port):
        key = PeerKey(HOST, port, description.engine_id, OTHER_BOOT)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            contact.begin(key, ended.put)
            failed = ended.get(timeout=60)
        assert isinstance(failed, HandshakeFailed)
        assert "no thread" in str(failed)
        contact.begin(key, ended.put)
        assert isinstance(ended.get(timeout=60), PeerRefused)


def test_a_bug_in_the_plan_is_not_taken_for_a_lack_of_threads(
    contact: FirstContact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(PlanCache, "plan", fail)
    ended: queue.SimpleQueue[HandshakeResult] = queue.SimpleQueue()
    description = samples.engine(workers=[samples.worker()])
    with listening(Counters(), description=description) as (_, port):
        key = PeerKey(HOST, port, description.engine_id, description.boot)
        contact.begin(key, ended.put)
        failed = ended.get(timeout=60)
    # The registry logs an error that is none of kvferry's with its traceback.
    assert repr(failed) == "RuntimeError('a bug')"
