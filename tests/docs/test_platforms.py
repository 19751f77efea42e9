"""Commands of docs/deployment.md for platforms that the tests have not: compared with the files that they name."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import yaml

from kvferry.protocol.side_channel.secrets import read_secrets
from scripts.accuracy.settings import VARIABLES
from tests.deploy.dockerfile import read_dockerfile
from tests.deploy.launches import DEPLOY, KUBERNETES, documents
from tests.docs.commands import ROOT, typed

_SECRET = "umask 077; openssl rand -hex 32 > "


def test_images_are_run_by_the_tags_that_they_are_built_with_and_take_their_variables() -> None:
    arguments, stages = read_dockerfile((ROOT / "Dockerfile").read_text())
    known = set(arguments) | {text.partition("=")[0] for stage in stages for text in stage.all("ARG")}
    builds, runs = ([each for each in typed("docker") if each.words[1] == word] for word in ("build", "run"))
    tags = {build.value_of("--tag") for build in builds}
    for build in builds:
        assert build.words[-1] == "."
        assert {b.partition("=")[0] for a, b in pairwise(build.words) if a == "--build-arg"} <= known
    assert len(runs) == 4
    assert all(len(tags & set(run.words)) == 1 for run in runs)
    for run in (run for run in runs if "kvferry-cpu" in run.words):
        names = {b.partition("=")[0] for a, b in pairwise(run.words) if a == "--env"}
        assert names <= {variable.name for variable in VARIABLES.values()}


def test_kubectl_names_what_the_manifests_have() -> None:
    found = [each for file in sorted(KUBERNETES.glob("*.yaml")) for each in documents(file) if "metadata" in each]
    objects = {f"{each['kind'].lower()}/{each['metadata']['name']}": each for each in found}
    create, apply, rollout, execute = typed("kubectl")
    volumes = [
        volume["secret"]
        for each in objects.values()
        if each["kind"] == "StatefulSet"
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert {volume["secretName"] for volume in volumes} == {create.words[4]}
    key = create.value_of("--from-literal").partition("=")[0]
    assert key in str([volume.get("items", "secrets") for volume in volumes])
    folder = ROOT / apply.value_of("-k")
    assert all(
        (folder / name).is_file() for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    )
    assert set(rollout.words[3:]) <= set(objects)
    assert f"statefulset/{execute.words[2].removesuffix('-0')}" in objects


def test_helm_and_slurm_get_files_that_take_what_they_are_given() -> None:
    (helm,), (sbatch,) = typed("helm"), typed("sbatch")
    assert {"prefill", "decode"} <= set(yaml.safe_load((ROOT / helm.value_of("--values")).read_text()))
    script = (ROOT / sbatch.words[-1]).read_text()
    assert "\n#SBATCH --nodes=2" in script
    names = [entry.partition("=")[0] for entry in sbatch.value_of("--export").split(",")]
    assert [name for name in names[1:] if not re.search(rf"\${{?{name}\b", script)] == []


def test_systemd_gets_its_units_and_every_environment_file() -> None:
    settings, units = typed("install")
    assert units.words[-1] == "deploy/systemd/*.service"
    folder = settings.value_of("--target-directory")
    there = {f"{folder}/{Path(word).name}" for word in settings.words if (ROOT / word).is_file()}
    services = list((DEPLOY / "systemd").glob("*.service"))
    for path in services:
        (environment,) = re.findall(r"^EnvironmentFile=(.*)$", path.read_text(), re.MULTILINE)
        assert environment in there
    enabled = {each.words[-1] for each in typed("systemctl") if "enable" in each.words}
    assert enabled
    assert enabled <= {path.stem for path in services}


def test_the_command_for_a_secret_makes_one_that_kvferry_takes(tmp_path: Path) -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if _SECRET in page.read_text()]
    assert {"deployment.md", "operations.md"} <= {page.name for page in pages}
    subprocess.run(["bash", "-c", f"{_SECRET} {tmp_path}/secrets"], check=True, timeout=20)
    assert len(read_secrets(str(tmp_path / "secrets"))) == 1
