"""A user's program, checked by `mypy --strict` against the installed wheel, far from the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.conftest import Distributions
from tests.packaging.outside import PACKAGES, Installed

PROGRAM = """\
from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.cli.plan.short_form import read_short_form
from kvferry.connector.config import FerryConfig, read_config
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.handshake import EngineDescription
from kvferry.scheduler.state import Counters
from kvferry.trace.reading import Recording, read_recording
from kvferry.worker.fabric.port import Fabric


def layers_read(consumer: EngineDescription, producer: EngineDescription) -> int:
    try:
        return sum(len(plan.routes) for plan in plan_engine(consumer, producer))
    except PlanRefused as refused:
        print(*refused.reasons, sep="\\n")
        return 0


config: FerryConfig = read_config({"kv_lease_duration": 20})
lease_s: float = config.kv_lease_duration
recording: Recording = read_recording(["traces"])
owner: type[Counters] = Counters
fabric: type[Fabric] | None = None
print(engine_of_form(read_short_form("layers=2,heads=2,dim=64"), "a"), lease_s)
"""


@dataclass(frozen=True)
class Checked:
    """An environment with the wheel and the two packages whose types are in kvferry's own: torch would take minutes."""

    folder: Path

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    def by_mypy(self, program: str) -> subprocess.CompletedProcess[str]:
        """mypy's output for a program in an empty folder, with its defaults and `--strict`."""
        (self.folder / "work").mkdir(exist_ok=True)
        (self.folder / "work" / "program.py").write_text(program)
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(self.folder / "bin" / "python")]
        return subprocess.run(
            [*command, "--config-file", "/dev/null", "--cache-dir", str(self.folder / "cache"), "program.py"],
            cwd=self.folder / "work",
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.fixture(scope="module")
def checked(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder = tmp_path_factory.mktemp("typed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    made = Checked(folder)
    Installed.by_pip(distributions.wheel, made.site)
    for name in ("msgspec", "numpy"):
        (made.site / name).symlink_to(Path(sysconfig.get_path("platlib"), name))
    return made


def test_a_program_that_uses_every_package_is_checked_strictly_and_is_right(checked: Checked) -> None:
    for package in PACKAGES:
        assert f"from kvferry.{package}." in PROGRAM, package
    done = checked.by_mypy(PROGRAM)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr
