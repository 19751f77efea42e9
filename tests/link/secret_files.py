"""Secrets for tests, and files with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvferry.link.secrets import Secret


def secret(name: str) -> Secret:
    """A secret; the same for the same name."""
    return Secret(hashlib.sha256(name.encode()).digest())


OLD, NEW, OTHER = secret("old"), secret("new"), secret("other")


def write(path: Path, content: bytes | str, mode: int = 0o600) -> str:
    """A file with exactly this in it; returns its path."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return str(path)


def listing(*secrets: Secret) -> str:
    """The text of a file that lists them."""
    return "".join(f"{each.material.hex()}\n" for each in secrets)
