"""Legs of llm-d's sidecar with `--kv-connector=offloading`, exactly as it writes them, and hostile ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.params import (
    NamedPrefill,
    RemoteDecode,
    read_params,
    read_transfer_id,
    request_key,
)
from kvferry.protocol.prefix_sources import read_sources

ID = "2f0c6f7e-6a4e-4a55-8f4e-1d3b5a1c9a10"
PREFILL_LEG = {"remote_decoder": {"kv_request_id": ID}}
DECODE_LEG = {
    "remote_prefiller": {
        "kv_request_id": ID,
        "remote_host": "10.1.2.3",
        "remote_port": 5600,
    }
}
SOURCE = {"kv_request_id": "another", "remote_host": "10.1.2.4", "remote_port": 5600}


def test_both_legs_are_read_and_have_one_key() -> None:
    prefill = json.loads(json.dumps(PREFILL_LEG))
    assert isinstance(read_params(prefill), RemoteDecode)
    decode = read_params(json.loads(json.dumps(DECODE_LEG)))
    assert decode == NamedPrefill(
        remote_host="10.1.2.3", remote_port=5600, transfer_id=ID
    )
    assert isinstance(decode, NamedPrefill)
    assert (decode.engine_id, decode.boot) == (None, None)
    keys = {
        request_key("cmpl-a-0-0123abcd", read_transfer_id(prefill)),
        request_key("cmpl-b-0-89efcdab", decode.transfer_id),
    }
    assert len(keys) == 1


def test_a_prefill_leg_may_name_the_source_of_its_prefix() -> None:
    leg = {**PREFILL_LEG, "remote_kv_source": SOURCE}
    assert isinstance(read_params(leg), RemoteDecode)
    assert [source.remote_host for source in read_sources(leg)] == ["10.1.2.4"]


def test_the_keys_of_the_nixl_contract_come_first() -> None:
    assert isinstance(
        read_params({"do_remote_decode": True, **DECODE_LEG}), RemoteDecode
    )
    leg = {"do_remote_decode": True, "transfer_id": "t", **PREFILL_LEG}
    assert read_transfer_id(leg) == "t"


@pytest.mark.parametrize("role", ["remote_decoder", "remote_prefiller"])
def test_a_role_that_is_null_is_none(role: str) -> None:
    assert read_params({role: None}) is None


def test_a_port_that_became_a_float_is_the_same_port() -> None:
    changed = {
        "remote_prefiller": {**DECODE_LEG["remote_prefiller"], "remote_port": 5600.0}
    }
    assert read_params(changed) == read_params(DECODE_LEG)


def prefiller(**changed: Any) -> dict[str, Any]:
    return {"remote_prefiller": {**DECODE_LEG["remote_prefiller"], **changed}}


WRONG: dict[str, tuple[Any, str]] = {
    "a text": ({"remote_decoder": ID}, "remote_decoder"),
    "a list": ({"remote_prefiller": [[]]}, "remote_prefiller"),
    "an empty decoder": ({"remote_decoder": {}}, "remote_decoder.kv_request_id"),
    "an empty prefiller": ({"remote_prefiller": {}}, "remote_prefiller.kv_request_id"),
    "an id that is a number": (
        {"remote_decoder": {"kv_request_id": 7}},
        "remote_decoder.kv_request_id",
    ),
    "a long id": (
        {"remote_decoder": {"kv_request_id": "x" * 513}},
        "remote_decoder.kv_request_id",
    ),
    "no host": (prefiller(remote_host=None), "remote_prefiller.remote_host"),
    "a host of lines": (prefiller(remote_host="a\nb"), "remote_prefiller.remote_host"),
    "port 0": (prefiller(remote_port=0), "remote_prefiller.remote_port"),
    "port true": (prefiller(remote_port=True), "remote_prefiller.remote_port"),
    "both roles": ({**PREFILL_LEG, **DECODE_LEG}, "remote_prefiller"),
}


@pytest.mark.parametrize(("raw", "field"), WRONG.values(), ids=WRONG)
def test_a_role_that_cannot_be_used_is_refused_by_its_field(
    raw: Any, field: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        read_params(raw)
    assert refused.value.field == field
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("wrong", [None, 7, "", "x" * 513, [], {}])
def test_an_id_of_no_use_is_none(wrong: Any) -> None:
    assert read_transfer_id({"remote_decoder": {"kv_request_id": wrong}}) is None
    assert read_transfer_id({"remote_decoder": wrong}) is None
