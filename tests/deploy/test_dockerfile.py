"""The image, as far as it can be checked without a container engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.packaging.outside import PACKAGES, pins

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TEXT = (REPOSITORY / "Dockerfile").read_text()
LISTED = re.findall(
    r"^!(.*)$", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE
)


def stage(name: str) -> str:
    """The steps of a build stage."""
    return TEXT.partition(f" AS {name}\n")[2].partition("\nFROM ")[0]


def test_hadolint_has_no_complaints() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, REPOSITORY / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_versions_are_those_of_the_supported_range_and_of_the_locks() -> None:
    assert "==" not in TEXT
    assert f"ARG VLLM_IMAGE=vllm/vllm-openai:v{pins('cuda')['vllm']}\n" in TEXT
    assert "COPY requirements/router.lock /tmp/requirements/\n" in stage("router")
    assert "--no-deps --require-hashes -r /tmp/requirements/router.lock" in stage(
        "router"
    )


def test_the_image_has_every_package_and_what_a_wheel_is_built_of() -> None:
    """A folder that .dockerignore does not list is not there to be copied."""
    copied = re.findall(r"^COPY (\w+) \1$", stage("wheel"), re.MULTILINE)
    assert sorted(copied) == sorted(PACKAGES)
    assert "COPY pyproject.toml README.md LICENSE ./\n" in stage("wheel")
    assert {*PACKAGES, "pyproject.toml", "README.md", "LICENSE", "requirements"} <= {
        *LISTED
    }
    assert [name for name in LISTED if not (REPOSITORY / name).exists()] == []


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
    ("name", "port", "path"),
    [("engine", "8000", "/health"), ("router", "30000", "/readiness")],
)
def test_a_health_check_asks_for_the_health_of_its_role(
    name: str, port: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"ENV HEALTH_PORT={port}" in stage(name)
    assert f"EXPOSE {port} " in stage(name)
    check = re.search(r"HEALTHCHECK .*\\\n +CMD (.*)", stage(name))
    assert check is not None
    _, *words = json.loads(check[1])
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
