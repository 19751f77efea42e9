"""The bundle for machines without a package index: what is carried, what is cut off, damaged deliveries."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.accuracy.settings import ROOT
from scripts.gpu_bundle import fatbin, unpack
from scripts.gpu_bundle.fatbin import ELF, PTX, fat_binaries, prune
from scripts.gpu_bundle.packages import (
    LEFT_OUT,
    PackagesError,
    environment_of,
    is_with_torch,
    lacking,
    read_lock,
    unzip,
)
from scripts.gpu_bundle.pieces import MIB, Archive, pack, write_bundle

HERE = Path(unpack.__file__).parent
PYTHON = ".".join(platform.python_version_tuple()[:2])
LINUX = environment_of("3.12")
INTO = ("site", "kvferry", "other")


def image(kind: int, sm: int, code: bytes) -> bytes:
    header = bytearray(64)
    header[0:2] = kind.to_bytes(2, "little")
    header[4:8] = (64).to_bytes(4, "little")
    header[8:16] = len(code).to_bytes(8, "little")
    header[28:32] = sm.to_bytes(4, "little")
    return bytes(header) + code


def fat_binary(*images: bytes) -> bytes:
    code = b"".join(images)
    return fatbin.HEADER.pack(fatbin.MAGIC, 1, 16, len(code)) + code


def kept(library: bytes) -> list[list[tuple[int, int, bytes]]]:
    return [
        [(one.kind, one.sm, library[one.start + 64 : one.end]) for one in binary.images]
        for binary in fat_binaries(library)
    ]


def test_a_pruned_library_has_each_kernel_for_the_gpu_and_every_other_byte_in_its_place() -> (
    None
):
    before = b"\x7fELF of the host" + fatbin.MAGIC + b"not a header"
    several = fat_binary(
        image(ELF, 80, b"a" * 100),
        image(ELF, 90, b"hopper"),
        image(ELF, 90, b"hopper, sm_90a"),
        image(PTX, 90, b"ptx"),
    )
    only_ptx = fat_binary(
        image(PTX, 80, b"older"), image(PTX, 89, b"newer"), image(PTX, 100, b"too new")
    )
    foreign = fat_binary(
        image(ELF, 100, b"large blackwell"), image(ELF, 120, b"blackwell")
    )
    library = b"".join([before, several, b"between", only_ptx, foreign, b"after"])
    pruned = prune(library, [90])
    assert kept(pruned.library) == [
        [(ELF, 90, b"hopper"), (ELF, 90, b"hopper, sm_90a")],
        [(PTX, 89, b"newer")],
        [
            (ELF, 120, b"blackwell")
        ],  # useless there, but an empty one would stop the library
    ]
    assert len(pruned.library) == len(library)
    assert pruned.library.startswith(before)
    assert pruned.library.endswith(b"after")
    assert pruned.library.index(b"between") == library.index(b"between")
    assert b"a" * 100 not in pruned.library
    assert (pruned.useless, pruned.ptx) == (1, 64 + len(b"newer"))
    assert pruned.before > pruned.after


def test_what_is_left_out_is_in_the_projects_lock() -> None:
    pins = read_lock((ROOT / "requirements" / "cuda.lock").read_text(), LINUX)
    assert LEFT_OUT.keys() <= pins.keys()
    carried = lacking(pins, {})
    assert {"vllm", "nixl-cu13", "vllm-router", "transformers"} <= carried.keys()
    assert not [name for name in carried if is_with_torch(name) or name in LEFT_OUT]


def test_a_wheel_is_unzipped_as_it_would_be_installed_and_never_outside(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "1")
        archive.writestr("a-1.data/platlib/a/module.so", "2")
        archive.writestr("a-1.data/scripts/a", "3")
    unzip(wheel, tmp_path / "site")
    files = {
        str(path.relative_to(tmp_path / "site"))
        for path in (tmp_path / "site").rglob("*.*")
    }
    assert files == {"a/__init__.py", "a/module.so"}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../outside", "4")
    with pytest.raises(PackagesError, match="outside"):
        unzip(wheel, tmp_path / "site")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Three archives of 1.5 MiB that cannot be compressed, in deliveries of 2 MiB."""
    archives = []
    for number, into in enumerate(INTO):
        folder = tmp_path / f"packed{number}"
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / f"file{number}").write_bytes(os.urandom(3 * MIB // 2))
        (folder / "link").symlink_to(f"deep/file{number}")
        archive = tmp_path / f"archive{number}.tar.xz"
        archives.append(Archive(archive, into, pack(folder, archive)))
    about = {"python": PYTHON, "glibc": 5}
    sizes = write_bundle(archives, tmp_path / "bundle", 2 * MIB, HERE, about)
    assert len(sizes) == 3
    return tmp_path / "bundle"


def run_sh(
    bundle: Path, home: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "KVFERRY_BUNDLE_HOME": str(home),
        **more,
    }
    return subprocess.run(
        ["bash", str(bundle / "run.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_deliveries_that_come_one_by_one_are_kept_and_the_missing_ones_are_named(
    bundle: Path, tmp_path: Path
) -> None:
    whole = bundle.rename(tmp_path / "whole")
    home = tmp_path / "home"
    for number, missing in (("3", "folder 1, 2;"), ("1", "folder 2;"), ("2", "")):
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir()
        for name in ("run.sh", "unpack.py", "manifest.json"):
            shutil.copy(whole / name, bundle)
        shutil.copytree(whole / number, bundle / number)
        done = run_sh(bundle, home, "--unpack-only")
        assert (done.returncode, missing in done.stdout) == (
            3 if missing else 0,
            True,
        ), done
    assert (home / "bundle" / "other" / "link").exists()
    environment = str(home / "env" / "bin" / "python")
    said = subprocess.run(
        [environment, "-c", "import sys, torch; print(sys.path)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(home / "bundle" / "site") in said.stdout
    again = run_sh(bundle, home, "--unpack-only")
    assert (again.returncode, again.stdout) == (0, "")


@pytest.mark.parametrize("damage", ["inverted", "shortened"])
def test_a_damaged_piece_is_refused_by_its_name_and_nothing_is_unpacked(
    damage: str, bundle: Path, tmp_path: Path
) -> None:
    (piece, *_) = sorted((bundle / "2").iterdir())
    content = bytearray(piece.read_bytes())
    if damage == "inverted":
        content[1000] ^= 1
    else:
        del content[1000:]
    piece.write_bytes(content)
    done = run_sh(bundle, tmp_path / "home", "--unpack-only")
    assert done.returncode == 2
    assert f"{piece} is damaged" in done.stderr
    assert "deliver folder 2 again" in done.stderr
    assert not (tmp_path / "home" / "bundle").exists()


def edited(bundle: Path, **changes: Any) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"python": "3.9"}, "built for Python 3.9.*build with --python"),
        ({"glibc": 99}, "need glibc 2.99"),
        ({"kvferry_gpu_bundle": 7}, "schema 7"),
    ],
)
def test_a_bundle_for_another_machine_is_refused_with_what_to_do(
    changes: dict[str, Any], said: str, bundle: Path, tmp_path: Path
) -> None:
    edited(bundle, **changes)
    done = run_sh(bundle, tmp_path / "home", "--unpack-only")
    assert done.returncode == 2
    assert re.search(said, done.stderr)
