"""HKDF-SHA256 (RFC 5869) for keys of one hash's length."""

from __future__ import annotations

import hashlib
import hmac

KEY_BYTES = 32


def derive_key(secret: bytes, *, salt: bytes, label: bytes) -> bytes:
    """A key of 32 bytes: the first block of `T(1) | T(2) | …`, which is all that so short a key takes.

    Args:
        secret: input keying material.
        salt: may be empty.
        label: HKDF's `info`; another one gives an independent key.
    """
    extracted = hmac.new(salt or bytes(KEY_BYTES), secret, hashlib.sha256).digest()
    return hmac.new(extracted, label + b"\x01", hashlib.sha256).digest()
