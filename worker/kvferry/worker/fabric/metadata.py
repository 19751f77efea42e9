"""The envelope in which an agent's metadata travels to its peers.

    magic (8 bytes) | BLAKE2b-128 of the rest (16) | length of the name (2, little endian) | agent name, UTF-8 | body

The body belongs to the fabric. Two fields are outside it. The name lets a fabric refuse an agent it knows *before*
its library replaces that agent's entry and invalidates its descriptors. The checksum is there because NIXL passes the
body to UCX, which crashes on some damaged addresses (found by flipping bytes): it turns damage into an error, and is
no defence against a malicious peer.
"""

from __future__ import annotations

import hashlib
import hmac

from kvferry.protocol.errors import shorten
from kvferry.worker.fabric.errors import InvalidMetadata, InvalidRequest

MAX_NAME_BYTES = 255

_MAGIC = b"KVFABRC1"
_DIGEST_BYTES = 16
_NAME_START = len(_MAGIC) + _DIGEST_BYTES + 2


def check_agent_name(agent_name: str) -> bytes:
    """The name in UTF-8; raises `InvalidRequest` unless that is 1 … `MAX_NAME_BYTES` bytes without a NUL."""
    try:
        name = agent_name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("name agent", f"{shorten(agent_name)} cannot be written in UTF-8") from error
    if not 0 < len(name) <= MAX_NAME_BYTES or b"\0" in name:
        raise InvalidRequest("name agent", f"{shorten(agent_name)}; expected 1 … {MAX_NAME_BYTES} bytes, no NUL")
    return name


def wrap_metadata(agent_name: str, body: bytes) -> bytes:
    """The envelope around `body`; raises `InvalidRequest` for a name that `check_agent_name` refuses."""
    name = check_agent_name(agent_name)
    rest = len(name).to_bytes(2, "little") + name + body
    return _MAGIC + _digest(rest) + rest


def open_metadata(metadata: bytes) -> tuple[str, bytes]:
    """(agent name, body); raises `InvalidMetadata` for anything that `wrap_metadata` did not make."""
    if not isinstance(metadata, bytes) or not metadata.startswith(_MAGIC) or len(metadata) < _NAME_START:
        raise InvalidMetadata("add peer", f"{shorten(metadata)} is no fabric metadata")
    digest, rest = metadata[len(_MAGIC) : _NAME_START - 2], metadata[_NAME_START - 2 :]
    if not hmac.compare_digest(digest, _digest(rest)):
        raise InvalidMetadata("add peer", f"the checksum of {len(metadata)} bytes of metadata is wrong")
    name_end = 2 + int.from_bytes(rest[:2], "little")
    try:
        name = rest[2:name_end].decode()
    except UnicodeDecodeError as error:
        raise InvalidMetadata("add peer", "the agent name is not UTF-8") from error
    if not 0 < name_end - 2 <= MAX_NAME_BYTES or len(rest) < name_end:
        raise InvalidMetadata("add peer", f"the agent name has {name_end - 2} bytes; expected 1 … {MAX_NAME_BYTES}")
    return name, rest[name_end:]


def _digest(rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=_DIGEST_BYTES).digest()
