"""Keys out of a secret, against the vectors of RFC 5869."""

from __future__ import annotations

import pytest

from kvferry.protocol.side_channel.secrets import KEY_BYTES, derive_key

VECTORS = {
    "A.1": (
        bytes([0x0B]) * 22,
        bytes(range(0x0D)),
        bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf",
    ),
    "A.2": (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c",
    ),
    "A.3": (bytes([0x0B]) * 22, b"", b"", "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"),
}
"""Secret, salt, label and the first 32 bytes of the output, by the number of the test case."""


@pytest.mark.parametrize(("secret", "salt", "label", "key"), VECTORS.values(), ids=VECTORS)
def test_the_first_block_is_that_of_the_rfc(secret: bytes, salt: bytes, label: bytes, key: str) -> None:
    assert derive_key(secret, salt=salt, label=label).hex() == key
    assert len(key) == 2 * KEY_BYTES
