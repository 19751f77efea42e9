"""Commands of docs/deployment.md for platforms that the tests have not: what they say is compared with what they name.

Container engines and clusters have stand-ins that write down their arguments. The commands for systemd are run, in a
folder in place of `/`.
"""

from __future__ import annotations

import re
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_router.launch_router import parse_router_args

from kvferry.protocol.side_channel.secrets import read_secrets
from scripts.accuracy.variables import VARIABLES
from scripts.doc_commands import checked_by
from tests.deploy.dockerfile import read_dockerfile
from tests.deploy.judging import documented_variables, judge_transfer_config
from tests.deploy.launches import DEPLOY, KUBERNETES, documents
from tests.docs.shell import ROOT, Shell, succeeded, value_of

_OF_DOCKER = {"--network", "--shm-size", "--ulimit", "--gpus", "--env", "--entrypoint"}


def typed(name: str) -> list[str]:
    found = [command.text for command in checked_by(f"tests/docs/test_platforms.py::{name}")]
    assert found
    return found


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """In a folder that has what a checkout has."""
    made = Shell.within(tmp_path)
    for name in ("deploy", "Dockerfile"):
        (made.folder / name).symlink_to(ROOT / name)
    return made


def image_of(words: list[str]) -> int:
    """Where `docker run`'s options end: the index of the image."""
    index = 2
    while words[index].startswith("-"):
        index += 2 if words[index] in _OF_DOCKER else 1
    return index


def test_docker(shell: Shell) -> None:
    shell.stand_in("docker")
    for text in typed("test_docker"):
        succeeded(shell.run(text))
    arguments, stages = read_dockerfile((ROOT / "Dockerfile").read_text())
    known = set(arguments) | {step.text.partition("=")[0] for stage in stages for step in stage.all("ARG")}
    started = shell.started()
    builds, runs = ([words for words in started if words[1] == word] for word in ("build", "run"))
    tags = {value_of(words, "--tag") for words in builds}
    assert [words[-1] for words in builds] == ["."] * len(builds)
    for words in builds:
        given = {value.partition("=")[0] for option, value in pairwise(words) if option == "--build-arg"}
        assert given <= known
    assert len(runs) == 4
    for words in runs:
        at = image_of(words)
        options, image, rest = words[2:at], words[at], words[at + 1 :]
        assert image in tags
        names = {value.partition("=")[0] for option, value in pairwise(options) if option == "--env"}
        if image == "kvferry-cpu":
            assert names <= {variable.name for variable in VARIABLES}
            assert rest == []
        elif "--entrypoint" in options:
            assert value_of(options, "--entrypoint") == "vllm-router"
            assert parse_router_args(rest).vllm_pd_disaggregation
        else:
            assert names <= documented_variables()
            assert judge_transfer_config(value_of(rest, "--kv-transfer-config"))[0] == "kv_producer"


def manifests() -> dict[str, dict[str, Any]]:
    """Kind and name of everything in the manifests → the object."""
    found = (each for file in sorted(KUBERNETES.glob("*.yaml")) for each in documents(file) if "metadata" in each)
    return {f"{each['kind'].lower()}/{each['metadata']['name']}": each for each in found}


def test_kubectl(shell: Shell) -> None:
    shell.stand_in("kubectl")
    for text in typed("test_kubectl"):
        succeeded(shell.run(text))
    create, apply, rollout, exec_ = (words[1:] for words in shell.started())
    objects = manifests()
    assert create[:3] == ["create", "secret", "generic"]
    key, _, secret = value_of(create, "--from-literal").partition("=")
    assert len(bytes.fromhex(secret)) == 32
    volumes = [
        volume["secret"]
        for each in objects.values()
        if each["kind"] == "StatefulSet"
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert {volume["secretName"] for volume in volumes} == {create[3]}
    assert key in str([volume.get("items", "secrets") for volume in volumes])
    assert apply[:2] == ["apply", "-k"]
    kustomization = yaml.safe_load((shell.folder / apply[2] / "kustomization.yaml").read_text())
    assert all((shell.folder / apply[2] / name).is_file() for name in kustomization["resources"])
    assert rollout[:2] == ["rollout", "status"]
    assert set(rollout[2:]) <= set(objects)
    assert exec_[0] == "exec"
    assert f"statefulset/{exec_[1].removesuffix('-0')}" in objects
    assert exec_[2:] == ["--", "kvferry", "doctor"]


def test_helm(shell: Shell) -> None:
    shell.stand_in("helm")
    for text in typed("test_helm"):
        succeeded(shell.run(text))
    ((_, *words),) = shell.started()
    assert words[:3] == ["install", "kvferry", "llm-d-modelservice/llm-d-modelservice"]
    values = shell.folder / value_of(words, "--values")
    assert values.resolve() == DEPLOY / "llm-d" / "values.yaml"
    assert {"prefill", "decode"} <= set(yaml.safe_load(values.read_text()))


def test_sbatch(shell: Shell) -> None:
    shell.stand_in("sbatch")
    for text in typed("test_sbatch"):
        succeeded(shell.run(text))
    ((_, *words),) = shell.started()
    script = (shell.folder / words[-1]).read_text()
    assert script.startswith("#!/")
    assert "\n#SBATCH --nodes=2" in script
    names = [entry.partition("=")[0] for entry in value_of(words, "--export").split(",")]
    assert names == ["ALL", "MODEL", "VENV"]
    assert [name for name in names[1:] if not re.search(rf"\${{?{name}\b", script)] == []


def test_systemd(shell: Shell, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc" / "kvferry").mkdir(parents=True)
    (root / "etc" / "systemd" / "system").mkdir(parents=True)
    shell.stand_in("systemctl", "chown")
    texts = typed("test_systemd")
    for text in texts:
        succeeded(shell.run(text.replace("/etc/", f"{root}/etc/")))
    assert len(read_secrets(str(root / "etc" / "kvferry" / "secrets"))) == 1
    installed = root / "etc" / "systemd" / "system"
    units = {path.name for path in installed.iterdir()}
    assert units == {path.name for path in (DEPLOY / "systemd").glob("*.service")}
    for path in installed.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        (environment,) = re.findall(r"^EnvironmentFile=/(.*)$", path.read_text(), re.MULTILINE)
        assert (root / environment).is_file()
    enabled = [words for words in shell.started() if words[:2] == ["systemctl", "enable"]]
    assert all(f"{words[-1]}.service" in units for words in enabled)
    assert enabled
