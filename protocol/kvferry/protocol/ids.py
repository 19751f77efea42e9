"""Types of the identifiers that cross process borders, with the bounds that their decoders enforce."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, NewType

from msgspec import Meta

BootId = NewType("BootId", str)
"""One life of an engine: 128 random bits as 32 hexadecimal digits, new at every start."""

NO_BOOT = BootId("0" * 32)
"""In descriptions that are only planned with."""

Epoch = NewType("Epoch", int)
"""One lease of one slot: 60 random bits, never zero. The slot itself holds `epoch << 4 | state`."""

EPOCH_BITS = 60

# No control characters, which could forge lines of a log; no lone surrogates, which cannot be encoded.
_CHARACTER = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]"
_MAX_TEXT = 512
Text = Annotated[
    str, Meta(min_length=1, max_length=_MAX_TEXT, pattern=rf"\A{_CHARACTER}+\Z")
]
"""A name of a host, an engine, a request or a layer."""
TEXT = re.compile(rf"{_CHARACTER}{{1,{_MAX_TEXT}}}")
"""A whole `Text`."""
# Numbers of more than 53 bits are text: some routers decode JSON numbers to float64, which would change them.
Hex128 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Hex256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
HexEpoch = Annotated[str, Meta(pattern=r"\A(?!0+\Z)[0-9a-f]{15}\Z")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Size = Annotated[int, Meta(ge=1, le=65536)]
"""A parallel size."""
Rank = Annotated[int, Meta(ge=0, le=65535)]
MAX_WORKERS = 4096
"""Most workers of an engine."""
MAX_GROUPS = 64
"""Most cache groups of an engine."""
WorkerIndex = Annotated[int, Meta(ge=0, lt=MAX_WORKERS)]
WorkerCount = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
SlotIndex = Annotated[int, Meta(ge=0, lt=2**24)]
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def new_boot_id() -> BootId:
    """A fresh boot id."""
    return BootId(secrets.token_hex(16))
