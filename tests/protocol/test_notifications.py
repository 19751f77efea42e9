"""Notifications over NIXL: their bytes, and notifications of other senders."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.protocol.slots import (
    MAGIC,
    Done,
    decode_notification,
    encode_notification,
)
from tests.protocol.frames import (
    decode_plain,
    encode_plain,
    hostile_frames,
    refused,
    wrong_values,
)
from tests.protocol.samples import BOOT, DONE, EPOCH

BODY = encode_notification(DONE)[len(MAGIC) :]


def decode_body(body: bytes) -> Done:
    return decode_notification(MAGIC + body)


def test_the_bytes_of_a_done_are_these() -> None:
    """Engines of two versions meet on these bytes; a change that old readers misunderstand takes a new magic."""
    fields = (
        b"\xa4slot\x07\xa5epoch\xaf"
        + EPOCH.encode()
        + b"\xa8consumer\xd9\x20"
        + BOOT.encode()
    )
    assert (
        encode_notification(DONE)
        == b"KVF1\x86\xa4type\xa4done" + fields + b"\xa6worker\x03\xa8expected\x04"
    )


def test_hostile_frames_are_invalid_messages() -> None:
    for _, frame in hostile_frames(BODY):
        refused(decode_body, frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"KVF",
        b"KVF0" + BODY,
        b"kvf1" + BODY,
        BODY,
        b"cmpl-1-0:4",
        b"HB:cmpl-1",
        b"\xff",
    ],
)
def test_a_notification_of_another_sender_is_refused_by_its_magic(frame: bytes) -> None:
    assert refused(decode_notification, frame).field == "magic"


def test_every_wrong_value_is_refused_by_the_name_of_its_field() -> None:
    wrong: dict[str, list[object]] = {
        "slot": [..., None, -1, 2**24, 1.5, "7", True],
        "epoch": [..., None, "", "0" * 15, "f" * 16, "F" * 15, "f" * 15 + "\n", 7],
        "consumer": [..., None, "", "a" * 31, "a" * 32 + "\n", "A" * 32, 7],
        "worker": [..., None, -1, 65536, 0.5, "0"],
        "expected": [..., None, 0, -1, 65537, "1", False],
    }
    assert set(wrong) == {field.name for field in msgspec.structs.fields(Done)}
    for path, body in wrong_values(BODY, wrong):
        assert refused(decode_body, body).field == path


def test_unknown_fields_are_ignored() -> None:
    assert (
        decode_body(
            encode_plain({"before": [1], **decode_plain(BODY), "after": {"x": 1}})
        )
        == DONE
    )
