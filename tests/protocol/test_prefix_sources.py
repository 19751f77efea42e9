"""Engines that routers name as sources of a prefix, exactly as they write them, and hostile ones."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.params import RemoteDecode, read_params
from kvferry.protocol.prefix_sources import (
    MAX_ACTIONS,
    MAX_SOURCES,
    PrefixSource,
    read_hint,
    read_hints,
    read_sources,
)

LLM_D = {
    "kv_request_id": "2f0c6f7e-6a4e-4a55-8f4e-1d3b5a1c9a10",
    "remote_host": "10.1.2.3",
    "remote_port": 7777,
}
"""As llm-d's sidecar writes it: `kv_request_id` is a new UUID."""
SOURCE = PrefixSource(remote_host="10.1.2.3", remote_port=7777)


def action(payload: Any, kind: str = "kv.fetch", version: Any = "1.0") -> Any:
    """An action of vLLM's `KvHintsEnvelope`."""
    return SimpleNamespace(
        action_id="a", action_type=kind, action_version=version, payload=payload
    )


def fetch(endpoint: Any, **more: Any) -> Any:
    """As Dynamo's router writes it."""
    return action({"source_control_endpoint": endpoint, "block_hashes": [1], **more})


def test_the_source_of_llm_ds_sidecar_is_read_alone_and_on_a_prefill_leg() -> None:
    alone = json.loads(json.dumps({"remote_kv_source": LLM_D}))
    assert read_params(alone) is None
    assert read_sources(alone) == (SOURCE,)
    # Its NIXL leg has all of these keys, most of them null.
    leg = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "remote_kv_source": LLM_D,
    }
    assert isinstance(read_params(leg), RemoteDecode)
    assert read_sources(leg) == (SOURCE,)


@pytest.mark.parametrize("none", [None, {}, []])
def test_a_router_that_knows_no_source_names_none(none: Any) -> None:
    assert read_sources({"remote_kv_source": none}) == ()
    assert read_sources({}) == ()


def test_several_sources_are_a_list_in_the_routers_order() -> None:
    others = [{"remote_host": "p1", "remote_port": port} for port in (5601, 5600)]
    read = read_sources({"remote_kv_source": [LLM_D, *others]})
    assert [source.remote_port for source in read] == [7777, 5601, 5600]


def test_a_port_that_became_a_float_is_the_same_port() -> None:
    changed = {"remote_kv_source": {**LLM_D, "remote_port": 7777.0}}
    assert read_sources(changed) == (SOURCE,)


WRONG_SOURCES: dict[str, tuple[Any, str]] = {
    "a text": ("10.1.2.3:7777", "remote_kv_source"),
    "a number": (7, "remote_kv_source"),
    "no port": ({"remote_host": "p0"}, "remote_kv_source.remote_port"),
    "no host": ({"remote_port": 1}, "remote_kv_source.remote_host"),
    "port 0": ({**LLM_D, "remote_port": 0}, "remote_kv_source.remote_port"),
    "port true": ({**LLM_D, "remote_port": True}, "remote_kv_source.remote_port"),
    "a quoted port": ({**LLM_D, "remote_port": "7777"}, "remote_kv_source.remote_port"),
    "port nan": (
        {**LLM_D, "remote_port": float("nan")},
        "remote_kv_source.remote_port",
    ),
    "a long host": (
        {**LLM_D, "remote_host": "x" * 513},
        "remote_kv_source.remote_host",
    ),
    "a host of lines": (
        {**LLM_D, "remote_host": "a\nb"},
        "remote_kv_source.remote_host",
    ),
    "a list's second": (
        [LLM_D, {"remote_host": "p0"}],
        "remote_kv_source[1].remote_port",
    ),
    "too many": ([LLM_D] * (MAX_SOURCES + 1), "remote_kv_source"),
    "a list in a list": ([[LLM_D]], "remote_kv_source[0]"),
    "many keys": ({str(key): 1 for key in range(65)}, "remote_kv_source"),
}


@pytest.mark.parametrize(("named", "field"), WRONG_SOURCES.values(), ids=WRONG_SOURCES)
def test_a_source_that_cannot_be_used_is_refused_by_its_field(
    named: Any, field: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        read_sources({"remote_kv_source": named})
    assert refused.value.field == field
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://10.1.2.3:25000", "10.1.2.3", 25000),
        ("p0.example:5600", "p0.example", 5600),
        ("tcp://[fd00::7]:5600", "fd00::7", 5600),
    ],
)
def test_a_fetch_hint_names_the_side_channel_of_its_source(
    endpoint: str, host: str, port: int
) -> None:
    source = PrefixSource(remote_host=host, remote_port=port)
    assert read_hints([fetch(endpoint)]) == (source,)
    assert read_hints([fetch(endpoint, mode="copy")]) == (source,)


def test_vllms_own_envelope_is_read() -> None:
    hints = pytest.importorskip("vllm.v1.kv_hints")
    envelope = hints.KvHintsEnvelope(
        protocol_version="0.1",
        message_id="m",
        actions=[
            hints.KvHintAction("a", "kv.retain", "1.0", {"scope": None}),
            hints.KvHintAction(
                "b", "kv.fetch", "1.0", fetch("tcp://10.1.2.3:7777").payload
            ),
        ],
    )
    assert read_hints(envelope.actions) == (SOURCE,)


def hint(*actions: Any) -> dict[str, Any]:
    """As Dynamo's worker writes it into `kv_transfer_params`."""
    plain = [vars(one) for one in actions]
    whole = {"protocol_version": "0.1", "message_id": "m", "actions": plain}
    return {"kv_hint": whole}


def test_a_hint_among_the_params_is_read_alone_and_on_a_prefill_leg() -> None:
    alone = hint(action({}, "kv.retain"), fetch("tcp://10.1.2.3:7777"))
    assert read_params(alone) is None
    assert read_hint(json.loads(json.dumps(alone))) == (SOURCE,)
    assert isinstance(read_params({"do_remote_decode": True, **alone}), RemoteDecode)
    assert read_hint({}) == read_hint({"kv_hint": None}) == read_hint(hint()) == ()


WRONG_HINT: dict[str, tuple[Any, str]] = {
    "a text": ({"kv_hint": "p0:1"}, "kv_hint"),
    "actions that are none": ({"kv_hint": {"actions": "all"}}, "kv_hint.actions"),
    "another mode": (
        hint(fetch("p0:1", mode="move")),
        "kv_hint.actions[0].payload.mode",
    ),
    "too many actions": (
        hint(*[action({}, "kv.x")] * (MAX_ACTIONS + 1)),
        "kv_hint.actions",
    ),
}


@pytest.mark.parametrize(("raw", "field"), WRONG_HINT.values(), ids=WRONG_HINT)
def test_a_hint_among_the_params_is_refused_by_its_field(raw: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        read_hint(raw)
    assert refused.value.field == field


@pytest.mark.parametrize("none", [7, "kv.fetch", None, [], {"action_type": 7}])
def test_what_is_no_action_is_not_read(none: Any) -> None:
    assert read_hint({"kv_hint": {"actions": [none]}}) == ()
    numbered = {**vars(action({})), "action_version": 7}
    assert read_hint({"kv_hint": {"actions": [numbered]}}) == ()


def test_other_actions_other_versions_and_hints_without_a_source_name_none() -> None:
    others = [
        action({"scope": None}, "kv.retain"),
        action({"source_control_endpoint": "p0:1"}, version="2.0"),
        action("bad", "kv.future"),
        action({"block_hashes": [1]}),
    ]
    assert read_hints(others) == ()
    assert read_hints([*others, fetch("10.1.2.3:7777")]) == (SOURCE,)


WRONG_HINTS: dict[str, tuple[list[Any], str]] = {
    "no payload": ([action(None)], "kv_hints.actions[0].payload"),
    "another mode": (
        [fetch("p0:1", mode="move")],
        "kv_hints.actions[0].payload.mode",
    ),
    "no endpoint": (
        [fetch("p0")],
        "kv_hints.actions[0].payload.source_control_endpoint",
    ),
    "a number": ([fetch(7)], "kv_hints.actions[0].payload.source_control_endpoint"),
    "another scheme": (
        [action({}), fetch("ipc:///tmp/x")],
        "kv_hints.actions[1].payload.source_control_endpoint",
    ),
    "all hosts": (
        [fetch("0.0.0.0:1")],
        "kv_hints.actions[0].payload.source_control_endpoint",
    ),
    "a long one": (
        [fetch("p" * 1000 + ":1")],
        "kv_hints.actions[0].payload.source_control_endpoint",
    ),
    "too many sources": ([fetch("p0:1")] * (MAX_SOURCES + 1), "kv_hints.actions"),
    "too many actions": ([action({}, "kv.x")] * (MAX_ACTIONS + 1), "kv_hints.actions"),
}


@pytest.mark.parametrize(("actions", "field"), WRONG_HINTS.values(), ids=WRONG_HINTS)
def test_a_hint_that_cannot_be_used_is_refused_by_its_field(
    actions: list[Any], field: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        read_hints(actions)
    assert refused.value.field == field
