"""Every program that the files of deploy/ start: its command line and its environment."""

from __future__ import annotations

import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEPLOY = REPOSITORY / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SYSTEMD = DEPLOY / "systemd"
OVERLAYS = ("tcp", "rdma")


@dataclass(frozen=True)
class Launch:
    """A program that is started.

    Attributes:
        source: where that is written.
        grace_s: what the platform waits between SIGTERM and SIGKILL.
    """

    source: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    grace_s: float

    @property
    def program(self) -> str:
        return Path(self.words[0]).name

    def option(self, name: str) -> str:
        """The value of an option: the last one, as argparse has it."""
        return self.options(name)[-1]

    def options(self, name: str) -> list[str]:
        """All values of an option in their order, written `--name value` or `--name=value`."""
        pairs = zip(self.words, (*self.words[1:], ""), strict=True)
        return [
            after if word == name else word.partition("=")[2]
            for word, after in pairs
            if word.split("=")[0] == name
        ]

    @property
    def is_engine(self) -> bool:
        return self.program == "vllm"


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kubectl() -> str | None:
    """The program, installed or beside Python; None if it is not here."""
    return shutil.which("kubectl") or shutil.which(
        "kubectl", path=str(Path(sys.executable).parent)
    )


@lru_cache
def built(folder: Path) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k` of a folder would send; none without kubectl.

    Raises:
        AssertionError: kustomize refuses it: a file is missing, or a patch fits nothing.
    """
    program = kubectl()
    if program is None:
        return []
    done = subprocess.run(
        [program, "kustomize", folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@lru_cache
def built_llm_d(*components: str) -> list[dict[str, Any]]:
    """The Deployments of llm-d's guide with kvferry in them; a stand-in for the guide, which a test cannot fetch.

    Args:
        components: further ones than the overlay has.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "llm-d")
        shutil.copytree(DEPLOY / "llm-d", folder)
        shutil.copy(Path(__file__).parent / "llm_d_guide.yaml", folder)
        overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert len(overlay["resources"]) == 1
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    **overlay,
                    "resources": ["llm_d_guide.yaml"],
                    "components": [*overlay["components"], *components],
                }
            )
        )
        return built(folder)


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Variables with a value, or with a field of the pod in its place."""
    plain = {
        entry["name"]: entry["value"]
        for entry in container.get("env", [])
        if "value" in entry
    }
    fields = [
        entry
        for entry in container.get("env", [])
        if "fieldRef" in entry.get("valueFrom", {})
    ]
    return {
        **plain,
        **{
            entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
            for entry in fields
        },
    }


def launches_of(objects: list[dict[str, Any]], platform: str) -> Iterator[Launch]:
    """Containers of StatefulSets and Deployments."""
    for workload in objects:
        if workload["kind"] in ("StatefulSet", "Deployment"):
            pod = workload["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            words = (*container["command"], *container["args"])
            grace_s = pod["terminationGracePeriodSeconds"]
            yield Launch(
                f"{platform} {workload['metadata']['name']}",
                words,
                _environment(container),
                grace_s,
            )


def kubernetes() -> Iterator[Launch]:
    """Containers of both overlays."""
    for overlay in OVERLAYS:
        yield from launches_of(built(KUBERNETES / "overlays" / overlay), overlay)


def settings(path: Path) -> dict[str, str]:
    """A file of `NAME=value`."""
    lines = [
        line
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {
        name: shlex.split(value)[0]
        for name, _, value in (line.partition("=") for line in lines)
    }


def unit(path: Path) -> dict[str, list[str]]:
    """A unit's settings, whatever their section."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace(
        "\\\n", " "
    )
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found.setdefault(name, []).append(value)
    return found


def systemd() -> Iterator[Launch]:
    """The units' programs, with the example settings."""
    for path in sorted(SYSTEMD.glob("*.service")):
        written = unit(path)
        environment = settings(SYSTEMD / Path(written["EnvironmentFile"][0]).name)
        words: list[str] = []
        for word in shlex.split(written["ExecStart"][0]):
            if word.startswith("$") and not word.startswith(
                "${"
            ):  # systemd splits these at blanks
                words += environment[word[1:]].split()
            else:
                words.append(string.Template(word).substitute(environment))
        own = {
            n: v
            for n, v in environment.items()
            if "{" + n + "}" not in written["ExecStart"][0] and n != "ENGINES"
        }
        yield Launch(
            f"systemd {path.name}",
            tuple(words),
            own,
            float(written["TimeoutStopSec"][0]),
        )


LAUNCHES = (
    *kubernetes(),
    *launches_of(built_llm_d(), "llm-d"),
    *launches_of(built_llm_d("prefixes"), "llm-d prefixes"),
    *launches_of(built_llm_d("both-legs"), "llm-d both-legs"),
    *systemd(),
)
"""All but Slurm's, which a test sees when it runs the script."""
