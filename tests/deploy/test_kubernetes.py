"""deploy/kubernetes and deploy/llm-d, as kustomize makes them: valid by Kubernetes' own schemas, and of one piece."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tomllib
import yaml

from kvferry.link.secrets import read_secrets
from tests.deploy.judging import programs
from tests.deploy.launches import (
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    REPOSITORY,
    built,
    built_llm_d,
    kubectl,
    launches_of,
)

if kubectl() is None:
    pytest.skip(
        "NOT TESTED: kubectl is not here (requirements/dev.lock has it)",
        allow_module_level=True,
    )

VERSION = "1.33"
MANIFESTS = built(KUBERNETES / "overlays" / "rdma")
BUILT = {
    **{overlay: built(KUBERNETES / "overlays" / overlay) for overlay in OVERLAYS},
    "llm-d": built_llm_d(),
    "llm-d prefixes": built_llm_d("prefixes"),
    "llm-d both-legs": built_llm_d("both-legs"),
}
EVERY = [
    (overlay, manifest) for overlay, objects in BUILT.items() for manifest in objects
]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [found for found in MANIFESTS if found["kind"] == kind]


def workloads() -> list[dict[str, Any]]:
    return [*of_kind("Deployment"), *of_kind("StatefulSet")]


def labels(workload: dict[str, Any]) -> dict[str, str]:
    found = workload["spec"]["template"]["metadata"]["labels"]
    assert isinstance(found, dict)
    return found


ENGINES = {
    f"{overlay} {manifest['metadata']['name']}": manifest["spec"]["template"]["spec"]
    for overlay, manifest in EVERY
    if manifest["kind"] in ("StatefulSet", "Deployment")
    and "router" not in manifest["metadata"]["name"]
}
an_engine = pytest.mark.parametrize("pod", ENGINES.values(), ids=ENGINES.keys())


@pytest.mark.parametrize(
    "manifest",
    [m for _, m in EVERY],
    ids=[f"{o} {m['metadata']['name']}" for o, m in EVERY],
)
def test_a_manifest_is_valid_by_the_schema_of_kubernetes(
    manifest: dict[str, Any],
) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_yamllint_has_no_complaints() -> None:
    command = [
        str(programs() / "yamllint"),
        "--strict",
        "--config-file",
        str(DEPLOY / "yamllint.yaml"),
    ]
    done = subprocess.run(
        [*command, str(DEPLOY)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_images_have_the_version_of_the_package() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "version"
    ]
    (values,) = yaml.safe_load_all(
        (KUBERNETES / "base" / "kustomization.yaml").read_text()
    )
    assert {image["name"]: image["newTag"] for image in values["images"]} == {
        "kvferry": version,
        "kvferry-router": version,
    }
    for name, pod in ENGINES.items():
        assert pod["containers"][0]["image"] == f"registry.example/kvferry:{version}", (
            name
        )


def test_probes_ask_each_role_for_what_it_can_say() -> None:
    """Engines for /health; a router is ready if each of its pools is, and lives even when they do not."""
    found = {}
    for workload in workloads():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [
            container[kind]["httpGet"]
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        ]
        found[labels(workload)["app.kubernetes.io/component"]] = [
            (p["path"], ports[p["port"]]) for p in probes
        ]
    engine = [("/health", 8000)] * 3
    router = [("/readiness", 30000), ("/readiness", 30000), ("/liveness", 30000)]
    assert found == {"prefill": engine, "decode": engine, "router": router}


def test_only_producers_have_the_side_channels_port() -> None:
    ports = {
        name: {
            port["name"] for port in ENGINES[f"rdma {name}"]["containers"][0]["ports"]
        }
        for name in ("kvferry-prefill", "kvferry-decode")
    }
    assert ports == {
        "kvferry-prefill": {"http", "side-channel"},
        "kvferry-decode": {"http"},
    }


def test_the_router_lists_every_replica_by_the_name_that_it_has() -> None:
    (router,) = (
        launch for launch in launches_of(MANIFESTS, "rdma") if not launch.is_engine
    )
    services = {service["metadata"]["name"]: service for service in of_kind("Service")}
    for option, workload in zip(
        ("--decode", "--prefill"), of_kind("StatefulSet"), strict=True
    ):
        name, service = workload["metadata"]["name"], workload["spec"]["serviceName"]
        assert option[2:] in name
        assert services[service]["spec"]["clusterIP"] == "None"
        replicas = workload["spec"]["replicas"]
        port = services[service]["spec"]["ports"][0]["port"]
        assert router.options(option) == [
            f"http://{name}-{i}.{service}:{port}" for i in range(replicas)
        ]


def test_selectors_find_the_pods_that_they_are_for() -> None:
    pods = {workload["metadata"]["name"]: labels(workload) for workload in workloads()}
    for workload in workloads():
        assert workload["spec"]["selector"]["matchLabels"] == labels(workload)
    for service in of_kind("Service"):
        assert service["spec"]["selector"] == pods[service["metadata"]["name"]]
    for budget in of_kind("PodDisruptionBudget"):
        assert (
            budget["spec"]["selector"]["matchLabels"]
            == pods[budget["metadata"]["name"]]
        )
        assert budget["spec"]["maxUnavailable"] == 1


@an_engine
def test_kvferry_accepts_the_secret_as_it_is_mounted(
    pod: dict[str, Any], tmp_path: Path
) -> None:
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    (mount,) = (
        mount for mount in container["volumeMounts"] if mount["name"] == "secret"
    )
    assert environment["KVFERRY_SECRET_FILE"] == f"{mount['mountPath']}/secrets"
    (volume,) = (
        volume["secret"] for volume in pod["volumes"] if volume["name"] == "secret"
    )
    assert volume["secretName"] == "kvferry-side-channel"
    mode = volume["defaultMode"]
    assert mode & 0o040, (
        "the files are root's: the engine reads them as a member of fsGroup"
    )
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    file = tmp_path / "secrets"
    file.write_text(secrets.token_hex(32))
    os.chmod(file, mode)
    assert len(read_secrets(str(file))) == 1


def llm_ds_proxy(component: str) -> tuple[str, list[str]]:
    """The port of both engines' side channels, and the options of the proxy beside the decode engine."""
    engines = {
        name: pod
        for name, pod in ENGINES.items()
        if name.startswith(f"llm-d {component}")
    }
    ports = set()
    options: list[str] = []
    for pod in engines.values():
        (container,) = pod["containers"]
        ports |= {
            entry["value"]
            for entry in container["env"]
            if entry["name"] == "VLLM_NIXL_SIDE_CHANNEL_PORT"
        }
        for proxy in pod.get("initContainers", []):
            options += proxy["args"]
    assert len(engines) == 2
    (port,) = ports
    return port, options


def test_the_proxy_names_sources_by_the_port_of_their_side_channels() -> None:
    """llm-d's proxy takes the host from the router's header, and the port from its own option."""
    port, options = llm_ds_proxy("prefixes")
    assert "--kv-connector=nixlv2" in options, "the only one with --enable-p2p-pull"
    assert options[-2:] == ["--enable-p2p-pull", f"--p2p-connector-port={port}"]


def test_the_proxy_of_both_legs_names_producers_by_that_port_too() -> None:
    port, options = llm_ds_proxy("both-legs")
    assert options[-2:] == ["--kv-connector=offloading", f"--p2p-connector-port={port}"]
    assert "--enable-p2p-pull" not in options, "it does not start with both"


def allowed(policy: dict[str, Any], peer: dict[str, str], port: int) -> bool:
    """Whether a policy lets a pod with these labels, of the same namespace, reach a port."""

    def fits(selector: dict[str, Any]) -> bool:
        exact = all(
            peer.get(key) == value
            for key, value in selector.get("matchLabels", {}).items()
        )
        return exact and all(
            peer.get(rule["key"]) in rule["values"]
            for rule in selector.get("matchExpressions", [])
        )

    for rule in policy["spec"]["ingress"]:
        from_it = "from" not in rule or any(
            "podSelector" in who and fits(who["podSelector"]) for who in rule["from"]
        )
        if from_it and (
            "ports" not in rule or any(entry["port"] == port for entry in rule["ports"])
        ):
            return True
    return False


def test_only_engines_reach_the_side_channel() -> None:
    (policy,) = (
        found
        for found in of_kind("NetworkPolicy")
        if found["metadata"]["name"] == "kvferry-engines"
    )
    who = {
        workload["metadata"]["name"].removeprefix("kvferry-"): labels(workload)
        for workload in workloads()
    }
    assert allowed(policy, who["decode"], 5600)
    assert allowed(policy, who["router"], 8000)
    assert not allowed(policy, who["router"], 5600)
    assert not allowed(policy, {"app": "another"}, 5600)
    assert not allowed(policy, {"app": "another"}, 8000)
