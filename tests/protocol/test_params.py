"""`kv_transfer_params` that are right, or that ask for nothing, or that another connector wrote."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ForeignParams, InvalidParams
from kvferry.protocol.params import (
    SHORTEST_LEASE_S,
    RemoteDecode,
    RemotePrefill,
    Ticket,
    read_params,
    read_turn,
)
from tests.protocol.samples import make_params, make_ticket, params_of_length

NAMES = st.text(
    st.characters(
        min_codepoint=32,
        exclude_characters=[chr(code) for code in range(127, 160)],
        exclude_categories=["Cs"],
    ),
    min_size=1,
    max_size=512,
)
SIZES = st.integers(1, 65536)


@st.composite
def remote_prefills(draw: st.DrawFn) -> RemotePrefill:
    """Any params that a producer may send, up to 2,000 tokens."""
    chunks = draw(st.integers(1, 8))
    tokens = draw(st.integers((chunks - 1) * 256 + 1, chunks * 256))
    hex128 = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")
    ticket = make_ticket(
        boot=draw(hex128),
        lease_slot=draw(st.integers(0, 2**24 - 1)),
        lease_epoch=draw(
            st.integers(1, 2**60 - 1).map(lambda number: f"{number:015x}")
        ),
        lease_s=draw(st.floats(SHORTEST_LEASE_S, 86400 * 7)),
        digests=tuple(draw(st.lists(hex128, min_size=chunks, max_size=chunks))),
        mac=draw(st.integers(0, 2**256 - 1).map(lambda number: f"{number:064x}")),
        held_from=tuple(draw(st.lists(st.integers(0, 2**40), max_size=4))),
        stream_row=draw(st.none() | st.integers(0, 63)),
    )
    groups = draw(
        st.lists(
            st.lists(st.integers(0, 2**31 - 1), max_size=8), min_size=1, max_size=4
        )
    )
    return make_params(
        ticket=ticket,
        remote_engine_id=draw(NAMES),
        remote_request_id=draw(NAMES),
        remote_block_ids=tuple(tuple(group) for group in groups),
        remote_host=draw(NAMES),
        remote_port=draw(st.integers(1, 65535)),
        tp_size=draw(SIZES),
        pp_size=draw(SIZES),
        dcp_size=draw(SIZES),
        remote_num_tokens=tokens,
    )


def through_a_router(
    params: RemotePrefill, order: random.Random, *, floats: bool
) -> dict[str, Any]:
    """The object after a router has decoded and encoded it, with another order of keys and other number types."""

    def shuffled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        order.shuffle(pairs)
        return dict(pairs)

    parse_int = float if floats else int
    decoded = json.loads(
        json.dumps(params.to_json()), parse_int=parse_int, object_pairs_hook=shuffled
    )
    arrived = json.loads(json.dumps(decoded))
    assert isinstance(arrived, dict)
    return arrived


@given(remote_prefills(), st.randoms(use_true_random=False), st.booleans())
def test_params_survive_json_float64_numbers_and_reordered_keys(
    params: RemotePrefill, order: random.Random, floats: bool
) -> None:
    assert read_params(through_a_router(params, order, floats=floats)) == params


def test_the_keys_are_those_that_every_nixl_router_passes_on() -> None:
    answer = make_params().to_json()
    ours = answer.pop("kvferry")
    assert set(answer) == {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_request_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
        "tp_size",
        "pp_size",
        "dcp_size",
        "remote_num_tokens",
        "transfer_mode",
    }
    assert answer["do_remote_prefill"] is True
    assert answer["do_remote_decode"] is False
    assert answer["transfer_mode"] == "pull"
    assert set(ours) == {
        "version",
        "boot",
        "lease_slot",
        "lease_epoch",
        "lease_s",
        "digests",
        "mac",
        "held_from",
        "opens_within_s",
        "stream_row",
    }


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 512, 513, 1000])
def test_a_prompt_has_one_digest_for_every_256_tokens_begun(tokens: int) -> None:
    right = params_of_length(tokens)
    assert read_params(right.to_json()) == right
    for wrong in (right.kvferry.digests[:-1], (*right.kvferry.digests, "0" * 32)):
        ticket = msgspec.structs.replace(right.kvferry, digests=wrong)
        with pytest.raises(InvalidParams) as refused:
            read_params(msgspec.structs.replace(right, kvferry=ticket).to_json())
        assert refused.value.field == "kvferry.digests"


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        {"do_remote_prefill": False},
        {"do_remote_prefill": None, "do_remote_decode": None},
        {"do_remote_decode": False, "remote_host": 17},
        {"another": "connector"},
    ],
)
def test_an_object_that_asks_for_nothing_is_nothing(raw: object) -> None:
    assert read_params(raw) is None


def test_what_routers_send_to_the_producer_asks_for_a_remote_decode() -> None:
    sent = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert read_params(sent) == RemoteDecode()
    assert read_params({"do_remote_decode": True}) == RemoteDecode()


def test_an_answers_params_say_the_opposite_of_a_prompts_and_hold_the_same() -> None:
    prompt, answer = make_params().to_json(), make_params().to_json(is_turn=True)
    assert {key for key in prompt if prompt[key] != answer[key]} == {
        "do_remote_prefill",
        "do_remote_decode",
    }
    assert (answer["do_remote_prefill"], answer["do_remote_decode"]) == (False, True)
    assert read_params(answer) == RemoteDecode()
    assert read_turn(answer) == make_params()
    assert read_turn(json.loads(json.dumps(answer), parse_int=float)) == make_params()


@pytest.mark.parametrize(
    "nothing", [{}, {"remote_block_ids": None}, {"remote_block_ids": []}]
)
def test_a_prompt_to_be_prefilled_without_blocks_offers_no_turn(
    nothing: dict[str, Any],
) -> None:
    assert read_turn({"do_remote_decode": True, "kvferry": None, **nothing}) is None


def test_a_turn_of_the_stock_connector_is_foreign_and_a_broken_one_names_its_field() -> (
    None
):
    answer = make_params().to_json(is_turn=True)
    with pytest.raises(ForeignParams):
        read_turn({key: value for key, value in answer.items() if key != "kvferry"})
    with pytest.raises(InvalidParams, match="remote_port"):
        read_turn(answer | {"remote_port": 0})


def test_asking_for_both_at_once_is_refused() -> None:
    with pytest.raises(InvalidParams, match="do_remote_decode"):
        read_params({"do_remote_decode": True, "do_remote_prefill": True})


def test_unknown_keys_are_ignored_in_both_objects() -> None:
    raw = make_params().to_json()
    raw |= {
        "remote_prefill_cached_tokens": 12,
        "later": {"nested": [1]},
        "remote_blocks_expiry_time": 1.5e9,
    }
    raw["kvferry"] |= {"later": "field", "later_number": 1.5}
    assert read_params(raw) == make_params()


def test_later_fields_have_defaults_so_that_older_producers_are_understood() -> None:
    """The fields without a default are those of version 1, and no later one may join them."""
    required = {
        field.name for field in msgspec.structs.fields(RemotePrefill) if field.required
    }
    assert required == {
        "remote_engine_id",
        "remote_request_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
        "tp_size",
        "remote_num_tokens",
        "kvferry",
    }
    later = {"held_from", "opens_within_s", "stream_row"}
    assert {
        field.name for field in msgspec.structs.fields(Ticket) if field.required
    } == set(msgspec.structs.asdict(make_ticket())) - later


@pytest.mark.parametrize("version", [0, 2, 2**31, -1, "1", None, [1], 1.5])
def test_another_version_of_the_ticket_is_refused_by_its_version(
    version: object,
) -> None:
    raw = make_params().to_json()
    raw["kvferry"]["version"] = version
    raw["kvferry"].pop("mac")
    raw.pop("remote_host")
    with pytest.raises(InvalidParams) as refused:
        read_params(raw)
    assert refused.value.field == "kvferry.version"


@pytest.mark.parametrize("ticket", [{}, {"kvferry": None}])
def test_params_of_the_stock_connector_are_foreign(ticket: dict[str, None]) -> None:
    stock = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "5a1c",
        "remote_request_id": "cmpl-17",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": 1754300000.25,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    with pytest.raises(ForeignParams):
        read_params(stock | ticket)
