"""A consumer with an allow-list in vLLM's scheduler: no params lead to a connection to a host that is not listed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connector.scheduler_side.asking import Settled
from kvferry.protocol.asks import Answer, Progress
from kvferry.protocol.side_channel import host_names
from tests.engine_core.offers import Eavesdropper, offer
from tests.harness.core.scheduler import Engine, tokens

PROMPT = tokens(40)


class OtherPeer:
    """A host that must not be connected to: this machine, under a name or address that is not listed."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]

    def was_asked(self) -> bool:
        try:
            self._server.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def other_peer() -> Iterator[OtherPeer]:
    other_peer = OtherPeer()
    yield other_peer
    other_peer.close()


@pytest.fixture
def asked_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were looked up; all of them lead to this machine."""
    names: list[str] = []

    def ask(host: str) -> str:
        names.append(host)
        return "127.0.0.1"

    monkeypatch.setattr(host_names, "look_up", ask)
    return names


@pytest.fixture
def make(make_engine: Any, asked_names: list[str]) -> Any:
    def build(allowed: list[str] | None, **extra: Any) -> Any:
        return make_engine("kv_both", extra={**extra, **({} if allowed is None else {"allowed_hosts": allowed})})

    return build


def computed_here(engine: Engine, name: str) -> bool:
    answer = engine.run()[name]
    return answer.finish_reason == "length" and engine.is_whole


ALLOWED = ["10.0.0.0/8", "*.prefill.example"]
HOSTS = ["127.0.0.1", "::ffff:127.0.0.1", "0x7f.1", "2130706433", "localhost", "evil.example", "prefill.example", "0"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("how", ["a prompt", "a rejected prompt", "an aborted prompt", "a turn", "a turn unasked for"])
def test_whatever_names_a_host_that_is_not_listed_leads_to_no_connection_and_no_look_up(
    make: Any, other_peer: OtherPeer, asked_names: list[str], host: str, how: str
) -> None:
    engine = make(ALLOWED, bidirectional_kv_xfer=how == "a turn")
    params = offer(PROMPT, port=other_peer.port, remote_host=host, lease_s=0.05)
    if "turn" in how:
        params |= {"do_remote_prefill": False, "do_remote_decode": True}
    engine.add("d", PROMPT, params, abort_immediately=how == "a rejected prompt")
    if "ted prompt" in how:
        engine.abort("d")
        engine.step()
        assert engine.is_whole
    else:
        assert computed_here(engine, "d") or "turn" in how
    engine.connector.scheduler_side.close()  # whatever was to be sent has been sent
    engine.step()
    assert not other_peer.was_asked()
    assert asked_names == []
    assert engine.counted("loads") == engine.counted("leases_given_back") == 0
    counters = engine.connector.scheduler_side.monitor.counters
    assert counters.total("local_recomputes", "host_not_allowed") == 1


def test_a_ticket_from_elsewhere_for_a_request_that_has_ended_leads_to_no_connection(
    make: Any, other_peer: OtherPeer
) -> None:
    engine = make(ALLOWED)
    ticket = Answer(number=0, progress=Progress.TICKET, params=offer(PROMPT, port=other_peer.port))
    engine.connector.scheduler_side._intake.answered(Settled("d", waits=False, answer=ticket), None)
    engine.connector.scheduler_side.close()
    assert not other_peer.was_asked()
    assert engine.counted("leases_given_back") == 0


def test_without_a_list_the_same_params_lead_to_a_connection(make: Any, other_peer: OtherPeer) -> None:
    engine = make(None)
    engine.add("d", PROMPT, offer(PROMPT, port=other_peer.port))
    engine.abort("d")
    engine.connector.scheduler_side.close()
    assert other_peer.was_asked()


@pytest.mark.parametrize("host", ["127.0.0.1", "p0.prefill.example"])
def test_a_listed_host_is_connected_to(
    make: Any, eavesdropper: Eavesdropper, asked_names: list[str], host: str
) -> None:
    engine = make([*ALLOWED, "127.0.0.1"])
    engine.add("d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=3, remote_host=host))
    engine.abort("d")
    assert eavesdropper.released() == [3]
    assert engine.counted("local_recomputes") == 0
    assert asked_names == ([] if host == "127.0.0.1" else [host])
