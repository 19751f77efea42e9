"""What Prometheus is given: scrape configuration, PodMonitors and a PrometheusRule for the operator's users."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.dashboard.promql import tool
from tests.deploy.launches import DEPLOY, KUBERNETES, LAUNCHES, built, kubectl

MONITORING = KUBERNETES / "monitoring"
PROMETHEUS = DEPLOY / "prometheus"
WITH_KUBECTL = pytest.mark.skipif(
    kubectl() is None, reason="NOT TESTED: kubectl is not here (requirements/dev.lock)"
)
FIELDS: dict[str, set[str]] = {
    "PodMonitor": {"jobLabel", "selector", "podMetricsEndpoints"},
    "podMetricsEndpoints": {"port", "path", "interval", "relabelings"},
    "relabelings": {"sourceLabels", "targetLabel"},
    "PrometheusRule": {"groups"},
    "groups": {"name", "rules"},
    "rules": {"alert", "expr", "for", "labels", "annotations"},
}
"""The fields of the operator's definitions that are used. Those were compared once by hand with its own schemas."""


def unknown_fields(kind: str, value: dict[str, Any]) -> list[str]:
    found = [f"{kind}.{field}" for field in value if field not in FIELDS[kind]]
    for field, entries in value.items():
        if field in FIELDS:
            found += [
                wrong for entry in entries for wrong in unknown_fields(field, entry)
            ]
    return found


@WITH_KUBECTL
def test_monitors_and_rules_have_the_fields_that_the_operator_knows() -> None:
    found = {manifest["metadata"]["name"]: manifest for manifest in built(MONITORING)}
    assert set(found) == {"kvferry-engines", "kvferry-router", "kvferry"}
    for manifest in found.values():
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        assert unknown_fields(manifest["kind"], manifest["spec"]) == []


def fits(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(
        labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", ())
    )


@WITH_KUBECTL
def test_every_pod_is_scraped_by_one_monitor_at_a_port_that_it_has() -> None:
    monitors = [
        manifest["spec"]
        for manifest in built(MONITORING)
        if manifest["kind"] == "PodMonitor"
    ]
    jobs = []
    for workload in built(KUBERNETES / "overlays" / "tcp"):
        if workload["kind"] in ("StatefulSet", "Deployment"):
            pod = workload["spec"]["template"]
            labels = pod["metadata"]["labels"]
            (monitor,) = (spec for spec in monitors if fits(spec["selector"], labels))
            (endpoint,) = monitor["podMetricsEndpoints"]
            ports = {
                port["name"]: port["containerPort"]
                for port in pod["spec"]["containers"][0]["ports"]
            }
            jobs.append(
                (labels[monitor["jobLabel"]], ports[endpoint["port"]], endpoint["path"])
            )
    assert sorted(jobs) == [
        ("decode", 8000, "/metrics"),
        ("prefill", 8000, "/metrics"),
        ("router", 29000, "/metrics"),
    ]


def test_the_scrape_configuration_has_the_ports_of_the_units() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    scraped = {
        job["job_name"]: job["static_configs"][0]["targets"][0].split(":")[1]
        for job in config["scrape_configs"]
    }
    units = {
        launch.source.removeprefix("systemd kvferry-"): launch for launch in LAUNCHES
    }
    assert scraped == {
        "prefill": units["prefill.service"].option("--port"),
        "decode": units["decode.service"].option("--port"),
        "router": units["router.service"].option("--prometheus-port"),
    }


def test_prometheus_can_read_the_configuration_and_the_rules() -> None:
    command = [tool("promtool"), "check", "config", str(PROMETHEUS / "prometheus.yml")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout
