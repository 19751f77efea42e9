"""Where fuzzers begin: valid messages, and decisions that lead to them."""

from __future__ import annotations

import functools
import json

from tests.fuzz.targets import FORMATS, OTHER_FORMATS, SIGNED

DEPTH = 10_000
"""Levels of JSON."""

DECISIONS = tuple(bytes([first]) + bytes(range(start, start + 24)) for first in range(8) for start in (0, 100))
"""Seeds of targets whose bytes are decisions, see `tests.fuzz.source`."""

_DEEP_JSON = (b"[" * DEPTH, b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH)
_ODD_JSON = (b"[1]", b"7", b"NaN", b'"ticket"', b"true", b'{"version":NaN}', b'{"version":1e999}')


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Seeds of one target: valid messages, and nesting as deep as a frame can have."""
    if target == "params":
        signed = (json.dumps(SIGNED.to_json(is_turn=turn)).encode() for turn in (False, True))
        return (*signed, *_ODD_JSON, *_DEEP_JSON)
    form = (FORMATS | OTHER_FORMATS).get(target)
    if form is None:
        return DECISIONS
    valid = map(form.write, form.messages)
    if target == "description_json":
        (text,) = valid
        return (text, text[:-3] + b',"":0}', *_DEEP_JSON)
    return (*valid, form.magic + b"\x91" * 4000, form.magic + b"\x81\xa1a" * 1300, b"\x91" * 60_000)
