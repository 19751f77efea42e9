"""Every program that the files of deploy/ start: its command line and its environment."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEPLOY = REPOSITORY / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SYSTEMD = DEPLOY / "systemd"


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
        """The value of an option that is there once."""
        (value,) = self.options(name)
        return value

    def options(self, name: str) -> list[str]:
        """All values of an option, written `--name value` or `--name=value`."""
        found = [word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")]
        return found + [value for word, value in zip(self.words, self.words[1:], strict=False) if word == name]

    @property
    def is_engine(self) -> bool:
        return self.program == "vllm"


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def workloads() -> list[dict[str, Any]]:
    """StatefulSets and Deployments."""
    files = sorted(KUBERNETES.glob("*.yaml"))
    return [found for file in files for found in documents(file) if found["kind"] in ("StatefulSet", "Deployment")]


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {
        entry["name"]: entry["value"] if "value" in entry else entry["valueFrom"]["fieldRef"]["fieldPath"]
        for entry in container.get("env", [])
    }


def kubernetes() -> Iterator[Launch]:
    """Containers of the manifests."""
    for workload in workloads():
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        words = (*container["command"], *container["args"])
        grace_s = pod["terminationGracePeriodSeconds"]
        yield Launch(f"kubernetes {workload['metadata']['name']}", words, _environment(container), grace_s)


def llm_d() -> Iterator[Launch]:
    """Containers as the chart llm-d-modelservice makes them of `modelCommand: vllmServe`."""
    (values,) = documents(DEPLOY / "llm-d" / "values.yaml")
    model = values["modelArtifacts"]["name"]
    ports = {"prefill": values["routing"]["servicePort"], "decode": values["routing"]["proxy"]["targetPort"]}
    for role, port in ports.items():
        (container,) = values[role]["containers"]
        assert container["modelCommand"] == "vllmServe"
        words = ("vllm", "serve", model, "--port", str(port), "--served-model-name", model, *container["args"])
        grace_s = values[role]["extraConfig"]["terminationGracePeriodSeconds"]
        yield Launch(f"llm-d {role}", words, _environment(container), grace_s)


def settings(path: Path) -> dict[str, str]:
    """A file of `NAME=value`."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: shlex.split(value)[0] for name, _, value in (line.partition("=") for line in lines)}


def unit(path: Path) -> dict[str, list[str]]:
    """A unit's settings, whatever their section."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
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
            if word.startswith("$") and not word.startswith("${"):  # systemd splits these at blanks
                words += environment[word[1:]].split()
            else:
                words.append(string.Template(word).substitute(environment))
        own = {n: v for n, v in environment.items() if "{" + n + "}" not in written["ExecStart"][0] and n != "ENGINES"}
        yield Launch(f"systemd {path.name}", tuple(words), own, float(written["TimeoutStopSec"][0]))


LAUNCHES = (*kubernetes(), *llm_d(), *systemd())
"""All but Slurm's, which a test sees when it runs the script."""
