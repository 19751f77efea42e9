"""The image, as far as it can be checked without a container engine."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.deploy.dockerfile import Context, Stage, read_dockerfile
from tests.packaging.outside import PACKAGES

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ARGUMENTS, STAGES = read_dockerfile((REPOSITORY / "Dockerfile").read_text())
STAGE = {stage.name: stage for stage in STAGES}
PROGRAMS = Path(sys.executable).parent


def copied(stage: Stage, to: Path) -> Path:
    context = Context(REPOSITORY)
    for paths, target in stage.copies():
        context.copy(paths, to / target.rstrip("/").removeprefix("./"))
    return to


def test_hadolint_has_no_complaints() -> None:
    done = subprocess.run(
        [PROGRAMS / "hadolint", REPOSITORY / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_versions_are_pinned_in_the_locks_and_nowhere_else() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    assert "==" not in text
    installs = [text for text in STAGE["image-cuda"].all("RUN") if "pip install" in text]
    assert "--no-deps --require-hashes -r /tmp/requirements/cuda.lock" in installs[0]
    assert "--no-deps /tmp/wheels/*.whl && pip check" in installs[1], "the lock must have all that kvferry needs"
    assert STAGE["image-cuda"].copies() == [(["requirements/cuda.lock"], "/tmp/requirements/")]


def test_what_the_image_copies_builds_a_wheel_with_every_package(tmp_path: Path) -> None:
    """Without the isolation of the image's `pip wheel`, which would need a package registry."""
    source, wheels = copied(STAGE["wheel"], tmp_path / "src"), tmp_path / "wheels"
    assert STAGE["wheel"].all("RUN")[0].endswith("--wheel-dir /wheels .")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", wheels, "."], cwd=source, check=True, timeout=120)
    (wheel,) = wheels.glob("kvferry-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[1] for name in names if name.startswith("kvferry/")} == set(PACKAGES)


def test_the_main_job_finds_all_its_own_files_in_the_image(tmp_path: Path) -> None:
    """Its entry point up to the settings: what it starts then is not in the checkout but in `.venv`."""
    checkout = copied(STAGE["image-cpu"], tmp_path)
    script = checkout / STAGE["image-cpu"].exec_form("ENTRYPOINT")[0]
    assert script.stat().st_mode & 0o111
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, timeout=60, cwd="/")
    assert "NUM_PREFILL_INSTANCES" in done.stdout
    for words in (["scripts.bootstrap", "--help"], ["scripts.accuracy", "--check"]):
        subprocess.run([sys.executable, "-m", *words], check=True, timeout=60, cwd=checkout, capture_output=True)
    (install,) = (text for text in STAGE["image-cpu"].all("RUN") if "bootstrap" in text)
    assert install.endswith("python -m scripts.bootstrap cpu")
