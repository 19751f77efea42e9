"""Published benchmark files: targets met or missed, circumstances, and marks on quick runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import figures
from bench.figures import Chart, Results, Series, Table, Target, publish
from bench.provenance import Checkout


def test_a_target_is_met_at_its_limit_and_missed_beyond_it_or_without_a_number() -> (
    None
):
    at_most = [
        Target.at_most("p99", measured, 200, "µs").met
        for measured in (199.0, 200.0, 200.1, float("nan"))
    ]
    at_least = [
        Target.at_least("share", measured, 0.95, "").met
        for measured in (0.96, 0.95, 0.94, float("nan"))
    ]
    assert at_most == at_least == [True, True, False, False]


def test_a_published_run_has_the_common_keys_with_circumstances_in_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    results = Results(
        command="python -m bench.sample --quick",
        what="A sample.",
        tables=(
            Table(
                "Per [step]",
                ("leases", "p99, µs"),
                ((1, 31.04567), ("many", float("inf"))),
            ),
        ),
        charts=(
            Chart(
                "Growth",
                "leases",
                "µs",
                (Series("p99", (1, 10), (31.0, 33.0), low=(30.0, None)),),
                x_log=True,
            ),
        ),
        targets=(Target.at_most("p99", 31.04567, 20, "µs", "tried: less"),),
        notes=("load was high",),
        quick=True,
    )
    path = publish("sample", results, Checkout("0123456789ab"))
    assert path == tmp_path / "quick" / "sample.json", (
        "a quick run does not overwrite a careful one"
    )
    found = json.loads(path.read_text())
    assert list(found)[:4] == ["date", "commit", "machine", "versions"]
    assert {"python", "nixl", "torch", "pyzmq"} <= set(found["versions"])
    assert found["tables"] == [
        {
            "title": "Per [step]",
            "columns": ["leases", "p99, µs"],
            "rows": [[1, 31.05], ["many", None]],
        }
    ]
    assert found["charts"][0]["series"][0]["low"] == [30.0, None]
    assert (
        found["targets"][0] | {"met": False, "kind": "at most", "measured": 31.05}
        == found["targets"][0]
    )
    assert found["quick"] is True
    printed = capsys.readouterr().out
    assert all(
        text in printed
        for text in (
            "Per [step]",
            "31.05",
            "–",
            "MISSED",
            "tried: less",
            "not to be published",
        )
    )


CLEAN, LATER = Checkout("0123456789ab"), Checkout("ba9876543210")
DIRTY = Checkout(
    "0123456789ab", (" M worker/kvferry/worker/read.py", "?? bench/new.py")
)


@pytest.mark.parametrize(
    ("started", "ended", "folder", "commit", "why"),
    [
        (CLEAN, CLEAN, "", "0123456789ab", None),
        (
            DIRTY,
            DIRTY,
            "quick",
            "0123456789ab and changes",
            "M worker/kvferry/worker/read.py, ?? bench/new.py",
        ),
        (
            CLEAN,
            DIRTY,
            "quick",
            "0123456789ab, at the end 0123456789ab and changes",
            "at the end",
        ),
        (
            CLEAN,
            LATER,
            "quick",
            "0123456789ab, at the end ba9876543210",
            "at the end ba9876543210",
        ),
        (Checkout(""), Checkout(""), "quick", "unknown", "which commit this is"),
    ],
    ids=["clean", "dirty", "changed meanwhile", "committed meanwhile", "no git"],
)
def test_only_a_run_on_one_clean_commit_is_written_where_the_report_reads(
    started: Checkout,
    ended: Checkout,
    folder: str,
    commit: str,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "checkout", lambda: ended)
    path = publish(
        "sample", Results(command="python -m bench.sample", what="A sample."), started
    )
    assert path == tmp_path / folder / "sample.json"
    assert json.loads(path.read_text())["commit"] == commit
    printed = capsys.readouterr().out
    assert (why or "sample.json") in printed
    assert ("Not to be published" in printed) == (why is not None)
