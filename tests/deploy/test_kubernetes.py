"""deploy/kubernetes and deploy/llm-d: valid by Kubernetes' own schemas, and of one piece."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from kvferry.protocol.side_channel.secrets import read_secrets
from tests.deploy.judging import programs
from tests.deploy.launches import DEPLOY, KUBERNETES, documents, kubernetes, workloads

VERSION = "1.33"
OBJECTS = [found for file in sorted(KUBERNETES.glob("*.yaml")) for found in documents(file)]
MANIFESTS = [found for found in OBJECTS if found["kind"] != "Kustomization"]
(VALUES,) = documents(DEPLOY / "llm-d" / "values.yaml")
BY_CHART = ("modelCommand", "mountModelVolume", "extraConfig")


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [found for found in MANIFESTS if found["kind"] == kind]


def labels(workload: dict[str, Any]) -> dict[str, str]:
    found = workload["spec"]["template"]["metadata"]["labels"]
    assert isinstance(found, dict)
    return found


def llm_d_pod(role: str) -> dict[str, Any]:
    """The pod that the chart would make, its own additions apart."""
    section = VALUES[role]
    (container,) = section["containers"]
    plain = {key: value for key, value in container.items() if key not in BY_CHART}
    return {
        **section["extraConfig"],
        "volumes": section["volumes"],
        "containers": [{**plain, **container["extraConfig"]}],
    }


PODS = {
    **{found["metadata"]["name"]: found["spec"]["template"]["spec"] for found in of_kind("StatefulSet")},
    **{f"llm-d {role}": llm_d_pod(role) for role in ("prefill", "decode")},
}
a_pod = pytest.mark.parametrize("pod", PODS.values(), ids=PODS.keys())


@pytest.mark.parametrize("manifest", MANIFESTS, ids=[f"{m['kind']} {m['metadata']['name']}" for m in MANIFESTS])
def test_a_manifest_is_valid_by_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_of_llm_d_are_valid_by_the_schema_of_kubernetes(role: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}, "spec": llm_d_pod(role)}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def test_yamllint_has_no_complaints() -> None:
    command = [str(programs() / "yamllint"), "--strict", "--config-file", str(DEPLOY / "yamllint.yaml")]
    folders = [str(KUBERNETES), str(DEPLOY / "llm-d")]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_router_lists_every_replica_by_the_name_that_it_has() -> None:
    (router,) = (launch for launch in kubernetes() if not launch.is_engine)
    services = {service["metadata"]["name"]: service for service in of_kind("Service")}
    for option, workload in zip(("--decode", "--prefill"), of_kind("StatefulSet"), strict=True):
        name, service = workload["metadata"]["name"], workload["spec"]["serviceName"]
        assert option[2:] in name
        assert services[service]["spec"]["clusterIP"] == "None"
        replicas = workload["spec"]["replicas"]
        port = services[service]["spec"]["ports"][0]["port"]
        assert router.options(option) == [f"http://{name}-{i}.{service}:{port}" for i in range(replicas)]


def test_selectors_find_the_pods_that_they_are_for() -> None:
    pods = {workload["metadata"]["name"]: labels(workload) for workload in workloads()}
    for workload in workloads():
        assert workload["spec"]["selector"]["matchLabels"] == labels(workload)
    for service in of_kind("Service"):
        assert service["spec"]["selector"] == pods[service["metadata"]["name"]]
    for budget in of_kind("PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"] == pods[budget["metadata"]["name"]]
        assert budget["spec"]["maxUnavailable"] == 1


@a_pod
def test_kvferry_accepts_the_secret_as_it_is_mounted(pod: dict[str, Any], tmp_path: Path) -> None:
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "secret")
    assert environment["KVFERRY_SECRET_FILE"] == f"{mount['mountPath']}/secrets"
    (volume,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "secret")
    assert volume["secretName"] == "kvferry-side-channel"
    mode = volume["defaultMode"]
    assert mode & 0o040, "the files are root's: the engine reads them as a member of fsGroup"
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    file = tmp_path / "secrets"
    file.write_text(secrets.token_hex(32))
    os.chmod(file, mode)
    assert len(read_secrets(str(file))) == 1


def allowed(policy: dict[str, Any], peer: dict[str, str], port: int) -> bool:
    """Whether a policy lets a pod with these labels, of the same namespace, reach a port."""

    def fits(selector: dict[str, Any]) -> bool:
        exact = all(peer.get(key) == value for key, value in selector.get("matchLabels", {}).items())
        return exact and all(peer.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))

    for rule in policy["spec"]["ingress"]:
        from_it = "from" not in rule or any("podSelector" in who and fits(who["podSelector"]) for who in rule["from"])
        if from_it and ("ports" not in rule or any(entry["port"] == port for entry in rule["ports"])):
            return True
    return False


def test_only_engines_reach_the_side_channel() -> None:
    (policy,) = (found for found in of_kind("NetworkPolicy") if found["metadata"]["name"] == "kvferry-engines")
    who = {workload["metadata"]["name"].removeprefix("kvferry-"): labels(workload) for workload in workloads()}
    assert allowed(policy, who["decode"], 5600)
    assert allowed(policy, who["router"], 8000)
    assert not allowed(policy, who["router"], 5600)
    assert not allowed(policy, {"app": "another"}, 5600)
    assert not allowed(policy, {"app": "another"}, 8000)
