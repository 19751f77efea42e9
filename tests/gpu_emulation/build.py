"""Builds the environment of the emulated GPU, `.venv-gpu-emulation`, or brings it up to date:

    .venv/bin/python -m tests.gpu_emulation.build

Needs `.venv` (scripts/bootstrap.py), PyPI the first time (1.1 GB), gcc and binutils, 3 GB of disk. Two minutes at
first, then a second, or five where a stand-in has changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.build_commands import BuildFailed, said_by

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".venv-gpu-emulation"
COMMAND = ".venv/bin/python -m tests.gpu_emulation.build"
_PACKAGES = ENVIRONMENT / sysconfig.get_path("purelib", "venv", {"base": ""}).lstrip(
    "/"
)
_LIBRARIES = _PACKAGES / "nvidia" / "cu13" / "lib"
"""Where torch's own RPATH looks for NVIDIA's libraries."""

_NVIDIA_LIBRARY = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc|nvshmem_host)\.so\.\d+"
)
_NVIDIA_SYMBOL = re.compile(
    r"_*(cu[A-Z]|cuda|cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)"
)
_TEXT = re.compile(r"Get\w*(Error|Status)(String|Name)?$")
_LOADER = """\
# Every Python of this environment finds the packages of .venv behind its own, and starts as if a GPU were there.
import site; site.addsitedir({packages!r})
import sys; sys.path.insert(0, {root!r})
import tests.gpu_emulation.emulation.start
"""


def has_packages() -> bool:
    """Whether what takes long is there: the packages of these requirements."""
    return _holds("packages", _states())


def build() -> None:
    """Build what is not current.

    Raises:
        BuildFailed: a command failed.
    """
    states = _states()
    if not _holds("packages", states):
        _install_packages()
        _stamp("packages").write_text(states["packages"])
    if not _holds("stand-ins", states):
        _build_stand_ins()
        _write_loader()
        _check()
        _stamp("stand-ins").write_text(states["stand-ins"])


def _states() -> dict[str, str]:
    """What each part of the environment depends on, as a digest."""
    packages = [HERE / "requirements.txt"]
    stand_ins = [*packages, Path(__file__), *sorted((HERE / "stand_ins").iterdir())]
    return {
        name: hashlib.sha256(
            b"\0".join(path.read_bytes() for path in paths) + str(ROOT).encode()
        ).hexdigest()
        for name, paths in (("packages", packages), ("stand-ins", stand_ins))
    }


def _stamp(name: str) -> Path:
    return ENVIRONMENT / f"{name}.sha256"


def _holds(name: str, states: dict[str, str]) -> bool:
    return _stamp(name).is_file() and _stamp(name).read_text() == states[name]


def _install_packages() -> None:
    said_by(sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT))
    pip = (sys.executable, "-m", "pip", "--python", str(ENVIRONMENT / "bin" / "python"))
    said_by(
        *pip,
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "-r",
        str(HERE / "requirements.txt"),
    )


def _build_stand_ins() -> None:
    """One library with all functions, and beside it one without any for every name under which they are looked for."""
    modules = [
        *(_PACKAGES / "torch" / "lib").glob("*.so"),
        *(_PACKAGES / "vllm").rglob("*.so"),
    ]
    needed = {name for module in modules for name in _needed(module)}
    # Triton compiles its own use of the driver where it is installed.
    driver = (_PACKAGES / "triton" / "backends" / "nvidia" / "driver.c").read_text()
    # vLLM looks up by name what it calls beside its compiled files.
    devices = _PACKAGES / "vllm" / "distributed" / "device_communicators"
    looked_up = (devices / "cuda_wrapper.py").read_text()
    wanted = {
        *_nvidia_symbols(modules),
        *re.findall(r"\bcu[A-Z]\w+(?=\()", driver),
        *re.findall(r'"(cuda[A-Z]\w+)"', looked_up),
    }
    if not {"libcudart.so.13", "libcuda.so.1"} <= needed:
        raise BuildFailed(
            f"torch and vLLM in {_PACKAGES} ask for other libraries: {', '.join(sorted(needed))}"
        )
    with tempfile.TemporaryDirectory() as folder:
        objects = [
            _compiled(source, Path(folder))
            for source in sorted((HERE / "stand_ins").glob("*.c"))
        ]
        own = {name for each in objects for name in _defined(each)}
        rest = Path(folder) / "rest.c"
        rest.write_text(_refusals(sorted(wanted - own)))
        objects.append(_compiled(rest, Path(folder)))
        shutil.rmtree(_LIBRARIES, ignore_errors=True)
        _LIBRARIES.mkdir(parents=True)
        whole = _LIBRARIES / "libgpu_emulation.so"
        _link(whole, *map(str, objects), "-ldl", "-lpthread")
        link_whole = (
            "-Wl,--no-as-needed",
            f"-L{_LIBRARIES}",
            "-lgpu_emulation",
            "-Wl,-rpath,$ORIGIN",
        )
        _link(_LIBRARIES / "libnvidia-ml.so.1", *link_whole)
        for name in sorted(needed):
            # Symbols are asked for with the library's name as their version, of this one with another.
            versions = Path(folder) / "versions"
            versions.write_text(
                "NVSHMEM { };" if "nvshmem" in name else f"{name} {{ }};"
            )
            _link(_LIBRARIES / name, f"-Wl,--version-script={versions}", *link_whole)


def _needed(module: Path) -> Iterator[str]:
    """NVIDIA's libraries that a module is linked with."""
    for line in said_by("readelf", "-d", str(module)).splitlines():
        found = re.search(r"\(NEEDED\).*\[(.*)\]", line)
        if found and _NVIDIA_LIBRARY.fullmatch(found[1]):
            yield found[1]


def _nvidia_symbols(modules: Iterable[Path]) -> Iterator[str]:
    for line in said_by(
        "nm", "-D", "--undefined-only", *map(str, modules)
    ).splitlines():
        name, _, version = (
            line.split()[-1].partition("@") if line.strip() else ("", "", "")
        )
        if (
            _NVIDIA_LIBRARY.fullmatch(version)
            or version == "NVSHMEM"
            or _NVIDIA_SYMBOL.match(name)
        ):
            yield name


def _defined(file: Path) -> Iterator[str]:
    for line in said_by(
        "nm", "--defined-only", "--extern-only", str(file)
    ).splitlines():
        yield line.split()[-1]


def _refusals(names: Iterable[str]) -> str:
    """C for functions that say that they have no stand-in. What they return is an error, or its text."""
    lines = ["int missing(const char *);"]
    for name in names:
        if _TEXT.search(name):
            lines.append(f'const char *{name}(void) {{ return "no stand-in"; }}')
        else:
            lines.append(f'int {name}(void) {{ return missing("{name}"); }}')
    return "\n".join([*lines, ""])


def _compiled(source: Path, folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    headers = _PACKAGES / "triton" / "backends" / "nvidia" / "include"
    # Parameters that a stand-in does not look at are the rule.
    warnings = (
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-builtin-declaration-mismatch",
    )
    options = (
        "-std=gnu11",
        "-O1",
        "-g",
        "-fPIC",
        *warnings,
        f"-I{headers}",
        f"-I{source.parent}",
    )
    said_by("gcc", *options, "-c", str(source), "-o", str(target))
    return target


def _link(target: Path, *arguments: str) -> None:
    said_by(
        "gcc", "-shared", f"-Wl,-soname,{target.name}", "-o", str(target), *arguments
    )


def _write_loader() -> None:
    text = _LOADER.format(packages=sysconfig.get_path("purelib"), root=str(ROOT))
    (_PACKAGES / "gpu_emulation.pth").write_text(text)


def _check() -> None:
    """torch finds a GPU and computes on it."""
    code = (
        "import torch; from vllm.platforms import current_platform as here; "
        "print((torch.arange(4, device=here.device_type) * 2).sum())"
    )
    said = said_by(str(ENVIRONMENT / "bin" / "python"), "-c", code)
    if "tensor(12, device='cuda:0')" not in said:
        raise BuildFailed(f"vLLM does not take the stand-in for a GPU:\n{said}")


if __name__ == "__main__":
    build()
    print(f"{ENVIRONMENT.name} is current")
