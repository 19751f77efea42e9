"""The correlation value: from a header to the body to the scheduler; invalid ones are dropped."""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.tracing.correlation import (
    CORRELATION_ARG,
    MAX_CORRELATION,
    Correlations,
    CorrelationSource,
    read_correlation,
)
from kvferry.connector.tracing.correlation_middleware import (
    MAX_SPACE,
    CorrelationMiddleware,
    Message,
    Receive,
    Scope,
    Send,
)
from kvferry.protocol.errors import InvalidCorrelation
from kvferry.scheduler.state.counters import Counters

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
GOOD = st.text(
    st.sampled_from([chr(code) for code in range(33, 127) if chr(code) not in '"\\']), min_size=1, max_size=128
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOSTILE = ["", " ", "a b", 'a"b', "a\\b", "a\nb", "a\x00", "ä", "x" * (MAX_CORRELATION + 1), 7, None, ["a"], {"a": 1}]


class App:
    """The app behind the middleware: records its input."""

    def __init__(self) -> None:
        self.body = b""
        self.scope: Scope = {}
        self.last = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        message = await receive()
        while message["type"] == "http.request":
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                break
            message = await receive()
        self.last = message["type"]

    @property
    def length(self) -> int:
        return int(dict(self.scope["headers"])[b"content-length"])


def through(chunks: list[bytes], *headers: tuple[str, str], source: str = "X-Correlation-Id", **scope: Any) -> App:
    """Send a body of these chunks through the middleware."""
    app = App()
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    raw.append((b"content-length", str(sum(map(len, chunks))).encode()))
    messages: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = False

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    whole: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw, **scope}
    asyncio.run(CorrelationMiddleware(app, CorrelationSource.parse(source))(whole, receive, send))
    assert not messages
    return app


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[low:high] for low, high in pairwise(edges)] or [b""]


@given(
    fields=st.dictionaries(st.text(max_size=9).filter(lambda key: key != "vllm_xargs"), JSON, min_size=1, max_size=4),
    value=GOOD,
    space=st.text(" \t\r\n", max_size=4),
    places=st.lists(st.integers(0, 10_000), max_size=5),
)
def test_the_value_is_in_the_body_whatever_the_chunks(
    fields: dict[str, Any], value: str, space: str, places: list[int]
) -> None:
    body = (space + "{" + space + json.dumps(fields)[1:]).encode()
    app = through(cut(body, places), ("X-Correlation-Id", value))
    read = json.loads(app.body)
    assert read_correlation(read.pop("vllm_xargs")) == value
    assert read == fields
    assert app.length == len(app.body)


@pytest.mark.parametrize("body", [b"", b"{}", b" { } ", b"[1]", b"7", b"\x1f\x8b{"])
def test_a_body_that_is_no_object_with_members_is_not_changed(body: bytes) -> None:
    for chunks in ([body], [body[:1], body[1:]]):
        app = through(chunks, ("X-Correlation-Id", "a1"))
        assert app.body == body
        assert app.length == len(body)


def test_space_without_end_is_not_waited_for() -> None:
    chunks = [b" " * (MAX_SPACE + 1), b'{"a":1}']
    assert through(chunks, ("X-Correlation-Id", "a1")).body == b"".join(chunks)


def test_arguments_that_the_client_sends_itself_count() -> None:
    body = b'{"vllm_xargs": {"kvferry_correlation": "mine"}, "prompt": "p"}'
    assert read_correlation(json.loads(through([body], ("x-correlation-id", "a1")).body)["vllm_xargs"]) == "mine"


@pytest.mark.parametrize("scope", [{"path": "/v1/embeddings"}, {"method": "GET"}, {"type": "websocket"}])
def test_other_requests_are_left_alone(scope: dict[str, str]) -> None:
    assert through([b'{"a": 1}'], ("X-Correlation-Id", "a1"), **scope).body == b'{"a": 1}'


@pytest.mark.parametrize("scope", [{"path": "/v1/completions"}, {"path": "/llm/v1/completions"}])
def test_a_server_below_a_path_is_one_too(scope: dict[str, str]) -> None:
    body = through([b'{"a": 1}'], ("X-Correlation-Id", "a1"), root_path="/llm", **scope).body
    assert read_correlation(json.loads(body)["vllm_xargs"]) == "a1"


@pytest.mark.parametrize("value", [value for value in HOSTILE if isinstance(value, str)])
def test_a_hostile_header_changes_no_body_and_one_line_says_so(value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert through([b'{"a": 1}'], ("X-Correlation-Id", value)).body == b'{"a": 1}'
    assert len(caplog.messages) == bool(value.strip())


def test_a_client_that_disconnects_is_passed_on() -> None:
    app, messages = App(), [{"type": "http.request", "body": b" ", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return cast(Message, messages.pop(0))

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"x-id", b"a1")]}
    asyncio.run(CorrelationMiddleware(app, CorrelationSource.parse("x-id"))(scope, receive, send))
    assert app.last == "http.disconnect"


@pytest.mark.parametrize(
    ("source", "headers", "want"),
    [
        ("X-Id", [("x-id", " a1 ")], "a1"),
        ("x-id", [("x-id", ""), ("X-ID", "a2")], "a2"),
        ("x-id", [("x-other", "a1")], None),
        ("traceparent", [("traceparent", TRACE)], TRACE),
        ("baggage:id", [("baggage", "user=u, id=a1;secret=1 ,x=y")], "a1"),
        ("baggage:id", [("baggage", "user=u"), ("baggage", "id = a%2F2")], "a/2"),
        ("baggage:id", [("baggage", "identity=a1,=,,id")], None),
    ],
)  # fmt: skip
def test_the_source_names_a_header_or_a_member_of_baggage(
    source: str, headers: list[tuple[str, str]], want: str | None
) -> None:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    assert CorrelationSource.parse(source).value(raw) == want


@pytest.mark.parametrize("text", ["", "x id", "x-id:member", "baggage:", "baggage:a=b", "x\n", "a" * 200, "X:Y:Z"])
def test_a_start_with_no_header_named_is_refused_with_what_to_set(text: str) -> None:
    with pytest.raises(InvalidCorrelation, match=r"KVFERRY_CORRELATION_HEADER is .*; expected the name of a header"):
        CorrelationSource.from_environment({"KVFERRY_CORRELATION_HEADER": text})


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_is_dropped_and_counted_and_logged_once(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    correlations = Correlations(counters)
    request: Any = SimpleNamespace(request_id="r", sampling_params=SimpleNamespace(extra_args={CORRELATION_ARG: value}))
    with caplog.at_level(logging.WARNING):
        assert correlations.of(request) is None
        assert correlations.of(request) is None
    assert counters.total("dropped_correlations") == 2
    assert len(caplog.messages) == 1
    assert len(caplog.messages[0]) < 400


@pytest.mark.parametrize("params", [None, SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={"k": 1})])
def test_a_request_without_a_value_has_none(params: object) -> None:
    counters = Counters()
    request: Any = SimpleNamespace(request_id="r", sampling_params=params)
    assert Correlations(counters).of(request) is None
    assert not counters.take()
