"""A consumer with an allow-list in vLLM's scheduler: no params lead to a connection to a host that is not listed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connector.scheduler_side.prompt_queries import Settled
from kvferry.link import allowed_hosts, host_names
from kvferry.link.allowed_hosts import AllowedHosts, TrustedHosts
from kvferry.link.secrets import VARIABLE
from kvferry.protocol.hosts import HOST_VARIABLE
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.params import announced_id
from kvferry.protocol.queries import Answer, PromptProgress, encode_params
from tests.engine_core.offers import Eavesdropper, offer
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.promises import promise

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
    def build(
        allowed: list[str] | None, policy: str = "recompute", **extra: Any
    ) -> Any:
        extra |= {} if allowed is None else {"allowed_hosts": allowed}
        return make_engine("kv_both", policy=policy, extra=extra)

    return build


def computed_here(engine: SchedulerEngine, name: str) -> bool:
    answer = engine.run()[name]
    return answer.finish_reason == "length" and engine.is_whole


def check_it_ends_here(
    engine: SchedulerEngine, params: dict[str, Any], how: str
) -> None:
    """A request with these params is rejected, aborted, or computed here, as `how` says, and leaves nothing."""
    engine.add("d", PROMPT, params, abort_immediately=how == "a rejected prompt")
    if "ted prompt" in how:
        engine.abort("d")
        engine.step()
        assert engine.is_whole
    else:
        assert computed_here(engine, "d") or "turn" in how


ALLOWED = ["10.0.0.0/8", "*.prefill.example"]
HOSTS = [
    "127.0.0.1",
    "::ffff:127.0.0.1",
    "0x7f.1",
    "2130706433",
    "localhost",
    "evil.example",
    "prefill.example",
    "0",
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "how",
    [
        "a prompt",
        "a rejected prompt",
        "an aborted prompt",
        "a turn",
        "a turn unasked for",
    ],
)
def test_whatever_names_a_host_that_is_not_listed_leads_to_no_connection_and_no_look_up(
    make: Any, other_peer: OtherPeer, asked_names: list[str], host: str, how: str
) -> None:
    engine = make(ALLOWED, bidirectional_kv_xfer=how == "a turn")
    params = offer(PROMPT, port=other_peer.port, remote_host=host, lease_s=0.05)
    if "turn" in how:
        params |= {"do_remote_prefill": False, "do_remote_decode": True}
    check_it_ends_here(engine, params, how)
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
    ticket = Answer(
        number=0,
        progress=PromptProgress.TICKET,
        params=encode_params(offer(PROMPT, port=other_peer.port)),
    )
    engine.connector.scheduler_side.intake.answered(
        Settled("d", waits=False, answer=ticket), None
    )
    engine.connector.scheduler_side.close()
    assert not other_peer.was_asked()
    assert engine.counted("leases_given_back") == 0


@pytest.mark.parametrize(
    "allowed", [None, ["*"], ["127.0.0.0/8"]], ids=["this host", "any", "listed"]
)
def test_params_of_an_allowed_host_lead_to_a_connection(
    make: Any, other_peer: OtherPeer, allowed: list[str] | None
) -> None:
    engine = make(allowed)
    engine.add("d", PROMPT, offer(PROMPT, port=other_peer.port))
    engine.abort("d")
    engine.connector.scheduler_side.close()
    assert other_peer.was_asked()


@pytest.mark.parametrize("host", ["127.0.0.1", "p0.prefill.example"])
def test_a_listed_host_is_connected_to(
    make: Any, eavesdropper: Eavesdropper, asked_names: list[str], host: str
) -> None:
    engine = make([*ALLOWED, "127.0.0.1"])
    engine.add(
        "d", PROMPT, offer(PROMPT, port=eavesdropper.port, slot=3, remote_host=host)
    )
    engine.abort("d")
    assert eavesdropper.released() == [3]
    assert engine.counted("local_recomputes") == 0
    assert asked_names == ([] if host == "127.0.0.1" else [host])


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of this machine that counts as another host's, as an attacker has one."""
    monkeypatch.setattr(allowed_hosts, "is_this_host", lambda address: False)
    return "127.0.0.1"


@promise(1)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    "how",
    [
        "a prompt",
        "a rejected prompt",
        "an aborted prompt",
        "a turn",
        "both legs at once",
    ],
)
def test_a_client_that_listens_elsewhere_is_no_producer(
    make: Any,
    other_peer: OtherPeer,
    foreign: str,
    asked_names: list[str],
    how: str,
    policy: str,
) -> None:
    """Its cache is not read and its metadata not parsed: nothing is sent to it. The prompt is computed here, whatever
    the policy."""
    engine = make(None, bidirectional_kv_xfer=how == "a turn", policy=policy)
    params = offer(PROMPT, port=other_peer.port, remote_host=foreign)
    if how == "a turn":
        params |= {"do_remote_prefill": False, "do_remote_decode": True}
    if how == "both legs at once":
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": announced_id(new_boot_id(), "producer"),
            "remote_host": foreign,
            "remote_port": other_peer.port,
            "remote_request_id": "d",
        }
    check_it_ends_here(engine, params, how)
    engine.connector.scheduler_side.close()
    assert not other_peer.was_asked()
    assert asked_names == []
    assert engine.counted("loads") == engine.counted("leases_given_back") == 0
    assert (
        engine.connector.scheduler_side.monitor.counters.total(
            "local_recomputes", "host_not_allowed"
        )
        == 1
    )


@pytest.mark.parametrize(
    "host", ["evil.example", "10.255.0.1", "p0", "169.254.169.254"]
)
def test_the_log_says_once_for_a_host_which_key_to_set_with_its_value(
    make: Any, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(None)
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT, offer(PROMPT, remote_host=host))
        engine.run()
    said = [
        record.getMessage()
        for record in caplog.records
        if VARIABLE in record.getMessage() and host in record.getMessage()
    ]
    assert len(said) == 1
    assert f'"allowed_hosts": ["{host}"]' in said[0]


def test_clients_that_name_ever_more_hosts_do_not_fill_the_log_or_the_memory(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = TrustedHosts(AllowedHosts.without_list(()), has_list=False)
    assert all(trusted.why_not(f"host-{number}.example") for number in range(1000))
    assert len(caplog.records) == len(trusted._advised) == 256


@pytest.mark.parametrize(
    ("allowed", "host", "said"),
    [
        (ALLOWED, "p1.example", 'add "p1.example" to allowed_hosts'),
        (ALLOWED, "localhost", HOST_VARIABLE),
        (ALLOWED, "0.0.0.0", HOST_VARIABLE),
        (None, "::", HOST_VARIABLE),
        (["*"], "fd00::2%2]:0;[::1", HOST_VARIABLE),
    ],
)
def test_the_advice_is_what_helps(
    make: Any,
    allowed: list[str] | None,
    host: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make(allowed)
    engine.add("a", PROMPT, offer(PROMPT, remote_host=host))
    assert computed_here(engine, "a")
    assert (
        engine.connector.scheduler_side.monitor.counters.total(
            "local_recomputes", "host_not_allowed"
        )
        == 1
    )
    assert any(said in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        (None, "only from producers on this host"),
        (["*"], '["*"]'),
        (["10.0.0.0/8"], None),
    ],
)
def test_an_engine_that_reads_without_a_secret_says_at_its_start_whom_it_trusts(
    make: Any,
    allowed: list[str] | None,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(allowed)
    warned = [
        record.getMessage()
        for record in caplog.records
        if "secret" in record.getMessage()
    ]
    assert len(warned) == (said is not None)
    assert said is None or said in warned[0]
