"""Making the environment: what is installed when, and the message where torch has no CPU build."""

from __future__ import annotations

import json
import platform
import threading
import venv
from pathlib import Path

import pytest

from scripts import bootstrap
from scripts.bootstrap import ROOT, BootstrapError, Environment
from tests.waiting import wait_until

LOCKED = " ".join(bootstrap.LOCKED)


def report(version: str, url: str) -> str:
    return json.dumps(
        {"install": [{"metadata": {"version": version}, "download_info": {"url": url}}]}
    )


@pytest.mark.parametrize(
    ("version", "url", "offered"),
    [
        (
            "2.13.0+cpu",
            "file:///w/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl",
            True,
        ),
        (
            "2.13.0",
            "https://x/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl",
            False,
        ),
        (
            "2.13.0+cu130",
            "https://x/torch-2.13.0%2Bcu130-cp311-cp311-linux_x86_64.whl",
            False,
        ),
    ],
)
def test_the_cpu_build_of_torch_is_distinguished_from_others(
    monkeypatch: pytest.MonkeyPatch, version: str, url: str, offered: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert bootstrap.cpu_torch_is_offered(report(version, url))[0] is offered
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert bootstrap.cpu_torch_is_offered(report(version, url))[0]


class FakeEnvironment(Environment):
    """Records what pip would be asked."""

    def __init__(self, folder: Path, torch: str) -> None:
        super().__init__(folder)
        folder.mkdir(exist_ok=True)
        self._torch = torch
        self.asked: list[str] = []

    def create(self) -> None:
        self.asked.append("create")

    def compile(self) -> None:
        """Nothing is installed."""

    def install(self, file: Path, *options: str) -> None:
        self.asked.append(" ".join((file.name, *options)))

    def pip(self, *arguments: str) -> None:
        if "--dry-run" in arguments:
            if not self._torch:
                raise BootstrapError(
                    "ERROR: No matching distribution found for torch==2.13.0"
                )
            url = f"https://x/torch-{self._torch}-cp311-cp311-manylinux_2_28_x86_64.whl"
            Path(arguments[arguments.index("--report") + 1]).write_text(
                report(self._torch, url)
            )
        else:
            self.asked.append(Path(arguments[-1]).name)


@pytest.mark.parametrize(
    ("runtimes", "asked"),
    [
        (
            [],
            [
                "create",
                f"torch=={bootstrap.cpu_torch()}",
                f"cpu.lock {LOCKED}",
                f"dev.lock {LOCKED}",
                ROOT.name,
            ],
        ),
        (["cpu"], ["create", f"dev.lock {LOCKED}"]),
        (["cuda"], ["create", f"dev.lock {LOCKED}"]),
    ],
    ids=["nothing", "cpu", "cuda"],
)
def test_development_adds_its_tools_to_what_the_accuracy_test_has_installed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runtimes: list[str],
    asked: list[str],
) -> None:
    made: list[FakeEnvironment] = []

    def make(folder: Path) -> FakeEnvironment:
        made.append(FakeEnvironment(folder, "2.13.0+cpu"))
        return made[-1]

    monkeypatch.setattr(bootstrap, "Environment", make)
    where = ("--venv", str(tmp_path))
    assert not runtimes or bootstrap.main([*where, *runtimes]) == 0
    assert bootstrap.main(where) == 0
    # torch and the lock are installed beside each other, so either may be first.
    assert sorted(made[-1].asked) == sorted(asked)
    assert made[-1].asked[0] == "create"
    assert bootstrap.main(where) == 0
    assert made[-1].asked == ["create"]


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_the_environment_holds_one_runtime_at_a_time(
    tmp_path: Path, first: str, second: str
) -> None:
    """Both have a `vllm`, and pip takes the torch of one for the other's."""
    environment = FakeEnvironment(tmp_path, "2.13.0+cpu")
    bootstrap.make(environment, [first])
    environment.asked.clear()
    bootstrap.make(environment, [second, "dev"])
    assert environment.asked[:2] == ["create", "triton"], (
        "the last of those that are uninstalled"
    )
    assert (environment.holds(first), environment.holds(second)) == (False, True)
    environment.asked.clear()
    bootstrap.make(environment, [second])
    assert environment.asked == ["create"]


@pytest.mark.parametrize("torch", ["2.13.0", ""], ids=["CUDA build", "none"])
def test_without_a_cpu_build_of_torch_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    environment = FakeEnvironment(tmp_path, torch)
    with pytest.raises(BootstrapError, match="PIP_EXTRA_INDEX_URL"):
        bootstrap.make(environment, ["cpu"])
    assert environment.asked == ["create"]


def test_what_was_installed_is_compiled_though_pip_did_not(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    package = tmp_path / "lib" / "package"
    (package / "tests").mkdir(parents=True)
    (package / "right.py").write_text("x = 1\n")
    (package / "wrong.py").write_text("print 'of another Python'\n")
    (package / "tests" / "test_right.py").write_text("x = 1\n")
    seldom = tmp_path / "lib" / "transformers" / "models"
    seldom.mkdir(parents=True)
    (seldom / "one_of_thousands.py").write_text("x = 1\n")
    environment = Environment(tmp_path)
    environment.compile()
    (package / "later.py").write_text("x = 1\n")
    environment.compile()
    compiled = {file.name.partition(".")[0] for file in tmp_path.rglob("*.pyc")}
    assert compiled == {"right", "later"}


class Stopped(FakeEnvironment):
    """Is stopped when it compiles for the first time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "2.13.0+cpu")
        self.compiled = 0

    def compile(self) -> None:
        self.compiled += 1
        if self.compiled == 1:
            raise KeyboardInterrupt


def test_what_was_stopped_before_it_had_compiled_does_so_later(tmp_path: Path) -> None:
    environment = Stopped(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.make(environment, ["cpu"])
    for _ in range(2):
        bootstrap.make(environment, ["cpu"])
    assert environment.compiled == 2
    bootstrap.make(environment, ["cpu", "dev"])
    assert environment.compiled == 3


def test_of_two_commands_in_one_checkout_one_waits(tmp_path: Path) -> None:
    waits = threading.Event()

    class Second(FakeEnvironment):
        def say(self, text: str) -> None:
            if text.startswith("wait for another command"):
                waits.set()

    order: list[str] = []

    def second() -> None:
        with Second(tmp_path, "").alone():
            order.append("second")

    other = threading.Thread(target=second)
    with FakeEnvironment(tmp_path, "").alone():
        other.start()
        wait_until(waits.is_set, "the second waits")
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_a_long_installation_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = threading.Event()

    class Telling(FakeEnvironment):
        def say(self, text: str) -> None:
            if text.strip() == "0 packages found, 2 installed":
                said.set()

    def install(environment: Environment) -> None:
        packages = environment.folder / "lib" / "python3.11" / "site-packages"
        for name in ("a", "b"):
            (packages / f"{name}-1.dist-info").mkdir(parents=True)
        wait_until(said.is_set, "it says how far it is")

    monkeypatch.setattr(bootstrap, "_SILENT_S", 0.01)
    Telling(tmp_path, "").once("slow", "key", install)
