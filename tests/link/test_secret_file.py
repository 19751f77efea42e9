"""The file of secrets: what is a secret, who may read the file, that no error or repr ever shows one; and its keys."""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.link.secrets import (
    KEY_BYTES,
    MAX_FILE_BYTES,
    MAX_SECRETS,
    VARIABLE,
    derive_key,
    read_secrets,
    secrets_from_environment,
)
from kvferry.protocol.errors import InvalidConfig, InvalidSecretFile
from tests.link.secret_files import NEW, OLD, listing, secret, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "secret"


def refusal(path: str) -> str:
    with pytest.raises(InvalidSecretFile) as refused:
        read_secrets(path)
    assert str(refused.value).startswith(f"secret file: {VARIABLE}={path} is ")
    return str(refused.value)


def test_secrets_come_in_the_files_order_without_comments_and_repetitions(
    path: Path,
) -> None:
    text = f"# since spring\r\n\n  {NEW.material.hex()}  \n\n{listing(OLD)}# {listing(secret('gone'))}{listing(NEW)}"
    assert read_secrets(write(path, text)) == (NEW, OLD)


@pytest.mark.parametrize(
    "line",
    [
        OLD.material.hex(),
        OLD.material.hex().upper(),
        base64.b64encode(OLD.material).decode(),
        base64.urlsafe_b64encode(OLD.material).decode(),
    ],
)
def test_a_secret_may_be_written_in_either_way(path: Path, line: str) -> None:
    assert read_secrets(write(path, line)) == (OLD,)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640, 0o700, 0o550])
def test_a_file_that_only_its_user_and_group_may_read_is_taken(
    path: Path, mode: int
) -> None:
    assert read_secrets(write(path, listing(OLD), mode)) == (OLD,)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o660, 0o666, 0o777])
def test_a_file_that_others_may_read_or_change_is_refused_with_what_to_type(
    path: Path, mode: int
) -> None:
    reported = refusal(write(path, listing(OLD), mode))
    assert f"mode {mode:04o}" in reported
    command = reported[reported.index("chmod ") :]
    subprocess.run(["bash", "-c", command], check=True, timeout=30)
    assert read_secrets(str(path)) == (OLD,)


def test_a_file_of_another_user_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, listing(OLD))
    owner = path.stat().st_uid
    status = os.stat_result((0o100600, 1, 1, 1, owner + 4711, 0, 65, 0, 0, 0))
    monkeypatch.setattr("kvferry.link.secrets.os.fstat", lambda _: status)
    reported = refusal(str(path))
    assert f"user {owner + 4711}" in reported
    assert f"chown {os.geteuid()} {path}" in reported


def test_a_file_of_root_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is every secret that Kubernetes mounts."""
    write(path, listing(OLD))
    status = os.stat_result((0o100440, 1, 1, 1, 0, 0, 65, 0, 0, 0))
    monkeypatch.setattr("kvferry.link.secrets.os.fstat", lambda _: status)
    monkeypatch.setattr("kvferry.link.secrets.os.geteuid", lambda: 4711)
    assert read_secrets(str(path)) == (OLD,)


def test_what_is_no_file_is_refused_at_once(path: Path) -> None:
    assert "No such file" in refusal(str(path))
    assert "a directory" in refusal(str(path.parent))
    os.mkfifo(path)
    assert "a named pipe" in refusal(str(path))


def test_a_path_that_could_forge_a_line_is_refused() -> None:
    with pytest.raises(InvalidSecretFile, match="printable") as refused:
        read_secrets("/tmp/a\nb")
    assert "\n" not in str(refused.value)


SHORT = os.urandom(31)
BAD = {
    "nothing": (b"", "no secret"),
    "comments": (b"# none\n\n", "no secret"),
    "short hex": (SHORT.hex().encode(), "31 bytes in line 1"),
    "hex that base64 would take": (os.urandom(30).hex().encode(), "30 bytes in line 1"),
    "short base64": (b"#\n" + base64.b64encode(SHORT), "31 bytes in line 2"),
    "words": (b"correct horse battery staple", "line 1, which is neither"),
    "a name before it": (
        b"key: " + OLD.material.hex().encode(),
        "line 1, which is neither",
    ),
    "half a digit": (OLD.material.hex().encode()[:-1], "line 1, which is neither"),
    "raw bytes": (b"\xff\xfe" + bytes(range(64)), "which is neither"),
    "no random bytes": (b"00" * 32, "line 1, which is not random"),
    "a repeated word": (b"deadbeef" * 8, "line 1, which is not random"),
    "a long one": (os.urandom(513).hex().encode(), "513 bytes in line 1"),
    "too many": (
        listing(*(secret(str(n)) for n in range(MAX_SECRETS + 1))).encode(),
        f"more than {MAX_SECRETS}",
    ),
    "a large file": (b"#" * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD)
def test_what_is_no_secret_is_refused_by_its_line_and_never_shown(
    path: Path, content: bytes, said: str
) -> None:
    reported = refusal(write(path, content))
    assert said in reported
    for word in content.split():
        assert len(word) < 8 or word.decode("latin1") not in reported


@given(
    st.binary(max_size=400)
    | st.text(st.sampled_from("0aF=+/# \n\r\t\0"), max_size=400).map(str.encode)
)
def test_whatever_is_in_the_file_there_are_secrets_or_a_typed_error(
    content: bytes,
) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            secrets = read_secrets(file.name)
        except InvalidSecretFile:
            return
    assert all(len(each.material) >= 32 for each in secrets)
    assert secrets


def test_without_the_variable_there_are_no_secrets_and_an_empty_one_stops_the_start(
    path: Path,
) -> None:
    assert secrets_from_environment({}) == ()
    assert secrets_from_environment({VARIABLE: write(path, listing(OLD, NEW))}) == (
        OLD,
        NEW,
    )
    with pytest.raises(InvalidConfig, match="unset it"):
        secrets_from_environment({VARIABLE: ""})


def test_no_repr_shows_a_secret() -> None:
    shown = f"{OLD} {OLD!r} {(OLD, NEW)} {[OLD]!s}"
    assert OLD.fingerprint in shown
    assert OLD.material.hex()[:8] not in shown
    assert repr(OLD.material)[2:10] not in shown


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
    "A.3": (
        bytes([0x0B]) * 22,
        b"",
        b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d",
    ),
}
"""Secret, salt, label and the first 32 bytes of the output, by the number of the test case in RFC 5869."""


@pytest.mark.parametrize(
    ("secret", "salt", "label", "key"), VECTORS.values(), ids=VECTORS
)
def test_the_first_block_is_that_of_the_rfc(
    secret: bytes, salt: bytes, label: bytes, key: str
) -> None:
    assert derive_key(secret, salt=salt, label=label).hex() == key
    assert len(key) == 2 * KEY_BYTES


def test_a_link_is_followed_as_mounted_secrets_are_links(path: Path) -> None:
    write(path, listing(OLD))
    link = path.with_name("link")
    link.symlink_to(path)
    assert read_secrets(str(link)) == (OLD,)
