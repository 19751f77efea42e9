"""`kv_transfer_params` that are wrong: the answer is `InvalidParams`, quickly, and by name of the field."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.ids import MAX_GROUPS
from kvferry.protocol.params import (
    MAX_BLOCKS,
    MAX_DIGESTS,
    MAX_KEYS,
    RemotePrefill,
    decode_params,
    most_blocks,
    read_params,
    read_turn,
)
from kvferry.protocol.queries import encode_params
from tests.protocol.frames import deep
from tests.protocol.samples import make_params

ABSENT = object()
MAX_MESSAGE = 700

TEXTS: list[object] = [
    ABSENT,
    None,
    "",
    "x" * 513,
    7,
    ["a"],
    "a\nb",
    "a\n",
    "\ud800",
    "\x00",
    "\x7f",
]
SMALL_INTEGERS: list[object] = [
    ABSENT,
    None,
    "1",
    "",
    0,
    -1,
    65537,
    2**53 + 2,
    10**400,
    1.5,
    1e300,
    True,
    [1],
    {},
]
FLAGS: list[object] = [0, 1, 1.0, "true", "", [], {}]

MALFORMED_HEX: dict[str, list[object]] = {
    f"kvferry.{name}": [
        *(ABSENT, None, "", 7, [], {}),
        *(digits[:-1], digits + "0", digits.upper(), digits + "\n", " " + digits),
    ]
    for name, digits in (
        ("boot", "ab" * 16),
        ("lease_epoch", "abcdef012345678"),
        ("mac", "ab" * 32),
    )
}

WRONG: dict[str, list[object]] = MALFORMED_HEX | {
    "do_remote_prefill": FLAGS,
    "do_remote_decode": FLAGS,
    "remote_engine_id": TEXTS,
    "remote_request_id": TEXTS,
    "remote_host": TEXTS,
    "remote_port": [*SMALL_INTEGERS, 65536],
    "tp_size": SMALL_INTEGERS,
    "pp_size": [wrong for wrong in SMALL_INTEGERS if wrong is not ABSENT],
    "dcp_size": [wrong for wrong in SMALL_INTEGERS if wrong is not ABSENT],
    "remote_num_tokens": [
        ABSENT,
        None,
        "300",
        0,
        -1,
        2**40 + 1,
        10**400,
        1.5,
        float("nan"),
        True,
        [],
        {},
    ],
    "remote_block_ids": [
        *(ABSENT, None, "1", 1, 1.5, True, {}, [], {"0": [1]}, [[]] * (MAX_GROUPS + 1)),
        *(
            ["12"],
            [[1], {}],
            [[1, None]],
            [["1"]],
            [[-1]],
            [[2**31]],
            [[1.5]],
            [[[1]]],
        ),
    ],
    "transfer_mode": [None, "Push", "", 1, True, [], {}, "x" * 10_000],
    "kvferry": ["ticket", 1, 1.5, True, [], [1]],
    "kvferry.version": [ABSENT, None, "1", 0, 2, -1, 1.5, True, [], {}],
    "kvferry.lease_slot": [
        ABSENT,
        None,
        "7",
        -1,
        2**24,
        1.5,
        True,
        [],
        {},
        2**63,
        10**400,
    ],
    "kvferry.lease_s": [
        ABSENT,
        "30",
        -1.0,
        0.049,
        1e6,
        float("nan"),
        float("inf"),
        10**400,
    ],
    "kvferry.digests": [
        *(
            ABSENT,
            None,
            "a1" * 16,
            1,
            {},
            [],
            ["a1" * 16],
            ["a1" * 16] * 3,
            ["a1" * 16, 5],
            ["a1" * 16, None],
        ),
        *(
            ["a1" * 16, "A1" * 16],
            ["a1" * 16, "a1" * 15],
            ["a1" * 16, "a1" * 16 + "\n"],
            [["a1" * 16], ["b2" * 16]],
        ),
    ],
    "kvferry.held_from": [
        None,
        0,
        {},
        "0",
        [-1],
        [0.5],
        [2**41],
        ["0"],
        [None],
        [[0]],
        [0] * 65,
        [0] * 10**5,
        [1e300],
    ],
    "kvferry.opens_within_s": [
        None,
        "1",
        -0.001,
        60.1,
        float("nan"),
        float("inf"),
        10**400,
        True,
        [],
        {},
    ],
    "kvferry.stream_row": ["1", -1, 64, 1.5, True, 2**63, 10**400, [], {}],
}


def with_wrong(path: str, wrong: object) -> dict[str, Any]:
    """Valid params with one field replaced or removed."""
    raw = make_params().to_json()
    holder: dict[str, Any] = raw["kvferry"] if path.startswith("kvferry.") else raw
    key = path.removeprefix("kvferry.")
    if wrong is ABSENT:
        del holder[key]
    else:
        holder[key] = wrong
    return raw


LONE_SURROGATES: list[object] = ["\ud800", ["\ud800"], [["\ud800"]]]
"""msgspec raises no error of its own for one that stands in place of a number."""


@pytest.mark.parametrize("path", WRONG)
def test_every_wrong_value_is_refused_by_the_name_of_its_field(path: str) -> None:
    nested = [] if path == "remote_block_ids" else [deep()]
    for wrong in (*WRONG[path], *LONE_SURROGATES, *nested):
        with pytest.raises(InvalidParams) as refused:
            read_params(with_wrong(path, wrong))
        assert refused.value.field.startswith(path), (path, wrong, str(refused.value))
        assert path in str(refused.value)
        assert len(str(refused.value)) < MAX_MESSAGE


def test_every_field_has_wrong_values_above() -> None:
    answer = make_params().to_json()
    assert set(WRONG) == set(answer) | {f"kvferry.{name}" for name in answer["kvferry"]}


def test_epoch_zero_is_refused_because_an_empty_slot_could_pass_for_it() -> None:
    with pytest.raises(InvalidParams, match="lease_epoch"):
        read_params(with_wrong("kvferry.lease_epoch", "0" * 15))


@pytest.mark.parametrize("kind", [int, float])
def test_block_ids_are_bounded_by_the_prompt_that_they_are_for(kind: type) -> None:
    """Before they are read: a client chooses their number, and a million took 0.6 s of the engine's thread."""
    prompt_tokens = 300
    most = most_blocks(prompt_tokens)
    assert prompt_tokens < most < 20 * prompt_tokens
    whole = with_wrong("remote_block_ids", [[kind(1)] * (most - 1), [kind(2)]])
    assert isinstance(read_params(whole, prompt_tokens), RemotePrefill)
    one_more = with_wrong("remote_block_ids", [[kind(1)] * most, [kind(2)]])
    with pytest.raises(
        InvalidParams, match=f"at most {most} for a prompt of 300 tokens"
    ):
        read_params(one_more, prompt_tokens)
    with pytest.raises(
        InvalidParams, match=f"at most {most} for a prompt of 300 tokens"
    ):
        decode_params(
            encode_params(with_wrong("remote_block_ids", [[1] * (most + 1)])),
            prompt_tokens,
        )
    with pytest.raises(InvalidParams, match="bytes"):
        decode_params(
            encode_params(with_wrong("remote_block_ids", [[1] * 50 * most])),
            prompt_tokens,
        )
    with pytest.raises(InvalidParams, match="digests"):
        read_params(
            with_wrong("kvferry.digests", ["a1" * 16] * (most + 1)), prompt_tokens
        )
    with pytest.raises(
        InvalidParams, match=f"at most {most} for a prompt of 300 tokens"
    ):
        read_turn(one_more, prompt_tokens)


@pytest.mark.parametrize(
    "raw",
    [
        "do_remote_prefill",
        b"",
        7,
        1.5,
        True,
        False,
        [],
        [{"do_remote_prefill": True}],
        {1},
    ],
)
def test_params_that_are_no_object_are_refused(raw: object) -> None:
    with pytest.raises(InvalidParams, match="an object"):
        read_params(raw)


def ten_million(size: int = 10_000_000) -> list[tuple[str, Callable[[], object]]]:
    ids = list(range(1000)) * (size // 1000)
    return [
        ("remote_block_ids", lambda: with_wrong("remote_block_ids", [ids])),
        (
            "remote_block_ids",
            lambda: with_wrong("remote_block_ids", [ids[: MAX_BLOCKS // 2 + 1]] * 2),
        ),
        ("remote_block_ids", lambda: with_wrong("remote_block_ids", ids)),
        ("remote_block_ids", lambda: with_wrong("remote_block_ids", [[]] * size)),
        ("kvferry.digests", lambda: with_wrong("kvferry.digests", ["a1" * 16] * size)),
        (
            "kvferry.digests",
            lambda: with_wrong("kvferry.digests", ["a1" * 16] * (MAX_DIGESTS + 1)),
        ),
        ("remote_host", lambda: with_wrong("remote_host", ids)),
        ("remote_host", lambda: with_wrong("remote_host", "x" * size)),
        ("kvferry", lambda: with_wrong("kvferry", dict.fromkeys(range(size // 10)))),
        (
            "kvferry",
            lambda: with_wrong(
                "kvferry",
                make_params().to_json()["kvferry"] | dict.fromkeys(range(10**6)),
            ),
        ),
        (
            "kv_transfer_params",
            lambda: (
                make_params().to_json() | {str(key): key for key in range(MAX_KEYS)}
            ),
        ),
        ("kv_transfer_params", lambda: ids),
    ]


def test_ten_million_of_anything_are_refused_within_50_ms_without_being_walked() -> (
    None
):
    for field, build in ten_million():
        raw = build()
        times = []
        for _ in range(3):
            start = time.thread_time()
            with pytest.raises(InvalidParams) as refused:
                read_params(raw)
            times.append(time.thread_time() - start)
        assert refused.value.field == field
        assert len(str(refused.value)) < MAX_MESSAGE
        assert min(times) < 0.05, (field, times)


def test_a_value_that_looks_like_an_error_message_does_not_become_another_fields_name() -> (
    None
):
    for forged in (
        "x` - at `$.remote_host`",
        "x - at `$.remote_host`",
        "Object missing required field `mac`",
    ):
        with pytest.raises(InvalidParams) as refused:
            read_params(with_wrong("transfer_mode", forged))
        assert refused.value.field == "transfer_mode"
