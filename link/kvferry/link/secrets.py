"""The side channel's shared secrets: a file that the operator writes and every engine of a fleet reads at its start.

One secret a line, as hexadecimal digits or base64 of at least 32 random bytes; blank lines and lines that begin with
`#` are skipped. A listener uses the first, a client tries each: so secrets can be rotated.

No log and no error shows the text of a line. Keys are derived by HKDF-SHA256 (RFC 5869).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.protocol.errors import InvalidSecretFile

VARIABLE = "KVFERRY_SECRET_FILE"
MAKE_ONE = "openssl rand -hex 32"

KEY_BYTES = 32
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 512
MAX_SECRETS = 8
MAX_FILE_BYTES = 16 << 10

_SALT = b"kvferry side channel 1"
# 32 random bytes have fewer different values than this once in 10²⁰ files: a secret below it is not random.
_FEWEST_VALUES = 12

_HEX = re.compile(r"[0-9A-Fa-f]+")


def derive_key(secret: bytes, *, salt: bytes, label: bytes) -> bytes:
    """A key of 32 bytes, by HKDF-SHA256.

    Args:
        secret: input keying material.
        salt: may be empty.
        label: HKDF's `info`; each label gives an independent key.
    """
    extracted = hmac.new(salt or bytes(KEY_BYTES), secret, hashlib.sha256).digest()
    # The first block of RFC 5869's `T(1) | T(2) | …`, which is as long as the key.
    return hmac.new(extracted, label + b"\x01", hashlib.sha256).digest()


@dataclass(frozen=True, slots=True)
class Secret:
    """One shared secret. Its repr, and so every log and error, shows the fingerprint only."""

    material: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Eight digits to compare the secrets of two engines. They reveal nothing about the secret."""
        return self.key(b"fingerprint")[:4].hex()

    def key(self, label: bytes) -> bytes:
        """32 bytes for one purpose, independent of those for other purposes."""
        return derive_key(self.material, salt=_SALT, label=label)

    def __repr__(self) -> str:
        return f"Secret({self.fingerprint})"


Secrets = tuple[Secret, ...]
"""All listed secrets, in order; empty without a file."""


def secrets_from_environment(environment: Mapping[str, str] = os.environ) -> Secrets:
    """The secrets of the file that the environment variable names; none when it is not set.

    Raises:
        InvalidSecretFile: as `read_secrets`, or the variable is empty.
    """
    path = environment.get(VARIABLE)
    if path is None:
        return ()
    if not path:
        # Most likely a template without its value: do not run without protection.
        raise InvalidSecretFile(
            VARIABLE, "", "the path of a file of secrets; unset it to run without"
        )
    return read_secrets(path)


def read_secrets(path: str) -> Secrets:
    """The secrets of a file, without duplicates.

    Raises:
        InvalidSecretFile: there is no such file, others could read or change it, or a line is no secret. The text
            has the path, the problem and the command that mends it, and nothing of the file's content.
    """
    if not path.isprintable():
        raise InvalidSecretFile(VARIABLE, path, "a path of printable characters")
    try:
        written = _read_checked(path)
    except OSError as refused:
        problem = refused.strerror or type(refused).__name__
        remedy = "a file that this process can read; mount it, or give this process access to it"
        raise _invalid(path, problem, remedy) from None
    if len(written) > MAX_FILE_BYTES:
        raise _invalid(path, f"more than {MAX_FILE_BYTES} bytes", "one secret a line")
    return _parse(path, written)


def _read_checked(path: str) -> bytes:
    # Non-blocking: a named pipe must not block the start. Links are followed: Kubernetes mounts secrets as links.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The open file is checked, not its path, which could lead to another file a moment later.
        _check_owner_and_mode(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_owner_and_mode(path: str, status: os.stat_result) -> None:
    quoted = shlex.quote(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _kind(status.st_mode)
        raise _invalid(path, f"a {kind}", f"a regular file: {MAKE_ONE} > {quoted}")
    this_user = os.geteuid()
    if status.st_uid not in (0, this_user):
        owner = f"a file of user {status.st_uid}"
        raise _invalid(
            path, owner, f"one of this user or of root: chown {this_user} {quoted}"
        )
    # A group may read: a mounted secret belongs to root and to a group of the process.
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        expected = (
            f"no access for others and no writing by the group: chmod g-w,o= {quoted}"
        )
        raise _invalid(path, f"a file of mode {mode:04o}", expected)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "device or socket"


def _parse(path: str, written: bytes) -> Secrets:
    secrets: dict[Secret, None] = {}  # in order, without duplicates
    for number, line in enumerate(written.split(b"\n"), start=1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        secrets[_secret(path, number, text)] = None
        if len(secrets) > MAX_SECRETS:
            expected = "one, or two while they are rotated"
            raise _invalid(path, f"more than {MAX_SECRETS} secrets", expected)
    if not secrets:
        raise _invalid(
            path, "no secret", f"a line with one: {MAKE_ONE} > {shlex.quote(path)}"
        )
    return tuple(secrets)


def _secret(path: str, number: int, text: bytes) -> Secret:
    # The errors name the line and never show it.
    line = f"line {number}"
    material = _decoded(text)
    if material is None:
        expected = f"hexadecimal digits or base64, as of {MAKE_ONE}"
        raise _invalid(path, f"{line}, which is neither", expected)
    if not MIN_SECRET_BYTES <= len(material) <= MAX_SECRET_BYTES:
        bounds = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        expected = f"{bounds} random bytes a line, as of {MAKE_ONE}"
        raise _invalid(path, f"{len(material)} bytes in {line}", expected)
    if len(set(material)) < _FEWEST_VALUES:
        expected = f"random bytes, as of {MAKE_ONE}"
        raise _invalid(path, f"{line}, which is not random", expected)
    return Secret(material)


def _decoded(text: bytes) -> bytes | None:
    """The bytes that hexadecimal digits or base64 stand for; None if it is neither."""
    try:
        plain = text.decode("ascii")
        # First, since hexadecimal digits are valid base64 too, of other bytes.
        if _HEX.fullmatch(plain):
            return bytes.fromhex(plain)
        standard = plain.replace("-", "+").replace("_", "/")
        return base64.b64decode(standard, validate=True)
    except (ValueError, binascii.Error):
        return None


def _invalid(path: str, problem: str, expected: str) -> InvalidSecretFile:
    return InvalidSecretFile(f"{VARIABLE}={path}", problem, expected)
