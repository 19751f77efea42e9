"""Every alert asks for what there is, leads to a page, fires for what it is for, and for nothing else."""

from __future__ import annotations

import json
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.deploy.dashboard.promql import asked, samples, tool
from tests.deploy.dashboard.runbook import dead_links

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
FILE = REPOSITORY / "deploy" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = msgspec.yaml.decode(FILE.read_text())["groups"][0][
    "rules"
]
NAMES = [rule["alert"] for rule in RULES]

MINUTES = 120
WHEN = "1h59m"
LOADED = {
    "vllm:kvferry_loads_total": "0+60x120",
    "vllm:request_success_total": "0+60x120",
    "vllm:kvferry_leases_opened_total": "10+60x120",
    'vllm:kvferry_leases_released_total{how="done"}': "0+60x120",
    "vllm:kvferry_handover_seconds_count": "0+60x120",
    'vllm:kvferry_handover_seconds_bucket{le="0.1"}': "0+60x120",
    'vllm:kvferry_handover_seconds_bucket{le="10.0"}': "0+60x120",
    'vllm:kvferry_handover_seconds_bucket{le="+Inf"}': "0+60x120",
    'vllm:kvferry_run_bytes_bucket{le="1024.0"}': "0x120",
    'vllm:kvferry_run_bytes_bucket{le="4096.0"}': "0x120",
    'vllm:kvferry_run_bytes_bucket{le="65536.0"}': "0+60x120",
    'vllm:kvferry_run_bytes_bucket{le="+Inf"}': "0+60x120",
    "vllm:kv_cache_usage_perc": "0.5x120",
    "vllm:kvferry_leases_held_now": "10x120",
    "vllm:kvferry_leased_fraction_now": "0.3x120",
    "vllm:kvferry_staging_pool_bytes": "1000x120",
    "vllm:kvferry_staging_used_bytes": "250x120",
    'vllm:kvferry_peer_loads_total{peer="p1:5600"}': "0+60x120",
    'vllm:kvferry_peer_failed_loads_total{peer="p1:5600"}': "0x120",
    "vllm:kvferry_lease_seconds_left_count": "0+60x120",
    'vllm:kvferry_lease_seconds_left_bucket{le="1.0"}': "0x120",
    'vllm:kvferry_lease_seconds_left_bucket{le="25.0"}': "0+6x120",
    'vllm:kvferry_lease_seconds_left_bucket{le="30.0"}': "0+60x120",
    'vllm:kvferry_lease_seconds_left_bucket{le="+Inf"}': "0+60x120",
    'vllm:kvferry_handshake_seconds_bucket{le="1.0"}': "0+1x120",
    'vllm:kvferry_handshake_seconds_bucket{le="5.0"}': "0+1x120",
    'vllm:kvferry_handshake_seconds_bucket{le="+Inf"}': "0+1x120",
}
"""A healthy engine: a load a second, all of them good."""

SICK: dict[str, dict[str, str]] = {
    "KvferryLostOrders": {"vllm:kvferry_lost_orders_total": "0x115 1x5"},
    "KvferryRequestsFail": {"vllm:kvferry_failed_requests_total": "0x117 1x3"},
    "KvferryLoadsFail": {
        'vllm:kvferry_local_recomputes_total{reason="load_failed"}': "0+4x120"
    },
    "KvferryPairRefused": {
        'vllm:kvferry_failed_loads_total{reason="plan"}': "0x110 1x10"
    },
    "KvferryParamsMacWrong": {
        'vllm:kvferry_failed_loads_total{reason="mac"}': "0x110 1x10"
    },
    "KvferryProducersUnreachable": {
        'vllm:kvferry_failed_loads_total{reason="handshake"}': "0x100 1+1x20"
    },
    "KvferryLeasesEndBeforeTheyAreRead": {
        'vllm:kvferry_failed_loads_total{reason="fence"}': "0+1x120"
    },
    "KvferryTransfersFail": {
        'vllm:kvferry_failed_loads_total{reason="deadline"}': "0x100 1+1x20"
    },
    "KvferryPromptsComputedTwice": {  # each of the two alone would not do
        'vllm:kvferry_local_recomputes_total{reason="foreign_params"}': "0+4x120",
        'vllm:kvferry_local_recomputes_total{reason="wrong_role"}': "0+4x120",
    },
    "KvferryNoLoads": {"vllm:kvferry_loads_total": "0+60x90 5400x30"},
    "KvferryLeasesRunOut": {
        'vllm:kvferry_leases_released_total{how="expired"}': "0+4x120"
    },
    "KvferryLeasesEvicted": {
        'vllm:kvferry_leases_released_total{how="evicted"}': "0+4x120"
    },
    "KvferryNoSlots": {"vllm:kvferry_leases_refused_total": "0x110 1+1x10"},
    "KvferryCacheFullOfLeases": {"vllm:kv_cache_usage_perc": "0.5x100 0.97x20"},
    "KvferryQuarantineStuck": {
        "vllm:kvferry_oldest_quarantine_seconds": "0x110 0+60x10"
    },
    "KvferryLeasesReadLate": {
        'vllm:kvferry_lease_seconds_left_bucket{le="1.0"}': "0+7x120"
    },
    "KvferrySlowFirstContacts": {
        'vllm:kvferry_handshake_seconds_bucket{le="1.0"}': "0x120"
    },
    "KvferryProducerFails": {
        'vllm:kvferry_peer_failed_loads_total{peer="p1:5600"}': "0+4x120",
        'vllm:kvferry_peer_loads_total{peer="p1:5600"}': "0+3x120",
    },
    "KvferryStagingFull": {"vllm:kvferry_staging_used_bytes": "900x120"},
    "KvferrySlowHandovers": {
        'vllm:kvferry_handover_seconds_bucket{le="0.1"}': "0+57x120"
    },
    "KvferryShortRuns": {'vllm:kvferry_run_bytes_bucket{le="4096.0"}': "0+60x120"},
    "KvferrySecretsDiffer": {
        'vllm:kvferry_side_channel_refusals_total{reason="one_sided"}': "0+1x120"
    },
    "KvferrySideChannelFlooded": {"vllm:kvferry_dropped_messages_total": "0+1x120"},
    "KvferryRenewalsNotSent": {"vllm:kvferry_side_channel_errors_total": "0+1x120"},
    "KvferryInvalidMessages": {"vllm:kvferry_bad_frames_total": "0+1x120"},
}
"""By alert, what differs from a healthy engine."""

FINE: dict[str, dict[str, str]] = {
    "nothing at all": dict.fromkeys(LOADED, "0x120"),
    "a producer was restarted": {
        'vllm:kvferry_failed_loads_total{reason="refused"}': "0x116 2x4"
    },
    "a producer was killed": {
        'vllm:kvferry_failed_loads_total{reason="transfer"}': "0x116 3x4"
    },
    "a port scan": {"vllm:kvferry_bad_frames_total": "0x112 40x8"},
    "a prompt in a hundred is another one": {
        'vllm:kvferry_local_recomputes_total{reason="other_prompt"}': "0+1x120",
    },
    "prompts that the cache has": {
        'vllm:kvferry_local_recomputes_total{reason="below_threshold"}': "0+50x120"
    },
    "a failed read's grace": {
        "vllm:kvferry_oldest_quarantine_seconds": "0x117 30 60 0"
    },
    "a cache full of running requests": {
        "vllm:kv_cache_usage_perc": "0.99x120",
        "vllm:kvferry_leased_fraction_now": "0.05x120",
    },
    "a pool that is full at times": {
        "vllm:kvferry_staging_used_bytes": "100x112 1000x4 0x4"
    },
    "an engine without a pool": {
        "vllm:kvferry_staging_pool_bytes": "0x120",
        "vllm:kvferry_staging_used_bytes": "0x120",
    },
    "a few bad loads from a good producer": {
        'vllm:kvferry_peer_failed_loads_total{peer="p1:5600"}': "0+2x120",
    },
    "a slow start": {
        'vllm:kvferry_handshake_seconds_bucket{le="1.0"}': "0x120",
        'vllm:kvferry_handshake_seconds_bucket{le="5.0"}': "0x112 8x8",
        'vllm:kvferry_handshake_seconds_bucket{le="+Inf"}': "0x112 8x8",
    },
    "a producer": {
        "vllm:kvferry_loads_total": "0x120",
        "vllm:kvferry_handover_seconds_count": "0x120",
    },
}


def test_every_alert_says_how_bad_it_is_what_it_means_and_where_to_read_on() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert "#" in rule["annotations"]["runbook_url"], rule["alert"]
    assert dead_links([rule["annotations"]["runbook_url"] for rule in RULES]) == []


@lru_cache(1)
def every_series() -> dict[str, str]:
    """All counters and gauges that rules ask for at 0, by series."""
    found, wanted = {}, {one.name for rule in RULES for one in asked(rule["expr"])}
    for name, sample in samples().items():
        if name in wanted and sample.kind in ("counter", "gauge"):
            ((label, values),) = sample.labels.items() or (("", ("",)),)
            found.update(
                {
                    f'{name}{{{label}="{value}"}}' if label else name: f"0x{MINUTES}"
                    for value in values
                }
            )
    return found


def case(name: str, changed: dict[str, str], fires: list[str]) -> dict[str, Any]:
    """One of promtool's tests: at its end exactly these alerts are firing."""
    series = {**every_series(), **LOADED, **changed}
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": placed(one), "values": values} for one, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, severity) (ALERTS{alertstate="firing"})',
                "eval_time": WHEN,
                "exp_samples": [
                    {
                        "labels": f'{{alertname="{alert}", severity="{severities[alert]}"}}',
                        "value": 1,
                    }
                    for alert in fires
                ],
            }
        ],
    }


def placed(series: str) -> str:
    """A series of one engine, as Prometheus has scraped it."""
    name, _, own = series.partition("{")
    return f'{name}{{job="vllm", instance="d1", engine="0"{", " + own.rstrip("}") if own else ""}}}'


def judged(
    cases: list[dict[str, Any]], folder: Path
) -> subprocess.CompletedProcess[str]:
    file = folder / "alerts_test.json"  # which is YAML
    file.write_text(
        json.dumps(
            {"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": cases}
        )
    )
    return subprocess.run(
        [tool("promtool"), "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_alert_fires_for_what_it_is_for_and_alone(tmp_path: Path) -> None:
    reported = judged(
        [case(name, changed, [name]) for name, changed in SICK.items()], tmp_path
    )
    assert reported.returncode == 0, reported.stdout + reported.stderr


def test_nothing_fires_for_what_passes_by_itself(tmp_path: Path) -> None:
    reported = judged(
        [
            case("healthy", {}, []),
            *(case(name, changed, []) for name, changed in FINE.items()),
        ],
        tmp_path,
    )
    assert reported.returncode == 0, reported.stdout + reported.stderr
