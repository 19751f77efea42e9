"""The image, as far as it can be checked without a container engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.deploy.dockerfile import Context, Stage, read_dockerfile
from tests.packaging.outside import PACKAGES, pins

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
        [PROGRAMS / "hadolint", REPOSITORY / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_versions_are_those_of_the_supported_range_and_of_the_locks() -> None:
    assert "==" not in (REPOSITORY / "Dockerfile").read_text()
    repository, _, tag = ARGUMENTS["VLLM_IMAGE"].partition(":")
    assert (repository, tag) == ("vllm/vllm-openai", f"v{pins('cuda')['vllm']}")
    (install,) = STAGE["router"].all("RUN")
    assert "--no-deps --require-hashes -r /tmp/requirements/router.lock && pip check" in install
    assert STAGE["router"].copies() == [(["requirements/router.lock"], "/tmp/requirements/")]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of its stage, without the isolation of `pip wheel`, which would need a package registry."""
    folder = tmp_path_factory.mktemp("image")
    source = copied(STAGE["wheel"], folder / "src")
    assert STAGE["wheel"].all("RUN")[0].endswith("--wheel-dir /wheels .")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run(
        [*command, "--wheel-dir", folder / "wheels", "."], cwd=source, check=True, timeout=120
    )
    return folder / "wheels"


def test_what_the_image_copies_builds_a_wheel_with_every_package(wheels: Path) -> None:
    (wheel,) = wheels.glob("kvferry-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[1] for name in names if name.startswith("kvferry/")} >= set(PACKAGES)


class _Answering(BaseHTTPRequestHandler):
    """Answers the one path that is healthy; every other path of vllm-router may fail while this one does not."""

    healthy: ClassVar[str] = ""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == self.healthy else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Silent."""


@pytest.mark.parametrize(
    ("stage", "port", "path"), [("engine", "8000", "/health"), ("router", "30000", "/readiness")]
)
def test_a_health_check_asks_for_the_health_of_its_role(
    stage: str, port: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"HEALTH_PORT={port}" in " ".join(STAGE[stage].all("ENV")).split()
    assert port in STAGE[stage].all("EXPOSE")[0].split()
    _, *words = STAGE[stage].exec_form("HEALTHCHECK")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"HEALTH_PORT": str(server.server_address[1])}

    def answered() -> int:
        return subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, check=False
        ).returncode

    monkeypatch.setattr(_Answering, "healthy", path)
    assert answered() == 0
    monkeypatch.setattr(_Answering, "healthy", "/other")
    assert answered() == 1
    server.shutdown()
    server.server_close()
    assert answered() == 1
