"""The GPU check: which parts run where, how each is judged, and what the report has."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from scripts.accuracy.settings import ROOT, read_settings
from scripts.gpu_check.__main__ import markdown_of, report_of
from scripts.gpu_check.gpus import Gpu
from scripts.gpu_check.parts import Planned, parts_for, plan
from scripts.gpu_check.running import Done, environment_of, judge


def gpus(*free_gib: float) -> list[Gpu]:
    return [Gpu(str(index), "H100", free) for index, free in enumerate(free_gib)]


def planned_on(*free_gib: float, quick: bool = False) -> dict[str, Planned]:
    found = plan(parts_for("cuda", quick=quick), gpus(*free_gib), quick=quick)
    return {one.part.name: one for one in found}


def test_every_part_of_the_issue_runs_on_two_gpus_and_what_needs_two_is_named_on_one() -> (
    None
):
    assert not [one for one in planned_on(79, 79).values() if one.skipped]
    skipped = {name: one.skipped for name, one in planned_on(79).items() if one.skipped}
    assert list(skipped) == [
        "dead exporter: two GPUs",
        "accuracy: equal",
        "accuracy: TP 2 → 1",
        "accuracy: TP 1 → 2",
    ]
    assert set(skipped.values()) == {
        f"needs 2 GPUs with {gib} GiB free; of 1 found, 1 have that" for gib in (4, 16)
    }


def test_what_decides_about_cuda_ipc_comes_first_and_runs_on_a_gpu_alone() -> None:
    found = list(planned_on(79, 79, quick=True).values())
    assert [one.part.name for one in found[:2]] == [
        "dead exporter",
        "dead exporter: two GPUs",
    ]
    assert "--kills 100" in found[0].part.command
    log = "NO GO: 3 of 100 contexts lost\n"
    assert judge(found[0].part, 0, log) == ("look", log.strip())
    assert judge(found[0].part, 0, "GO: no context was lost\n")[0] == "ok"
    names = [part.name for part in parts_for("cpu", quick=True)]
    assert not [name for name in names if name.startswith("dead")]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_accuracy_test_knows_the_variables_of_every_part(device: str) -> None:
    runs = [
        part
        for part in parts_for(device, quick=False, models=["some/model"])
        if "scripts.accuracy" in part.command
    ]
    assert len(runs) == (12 if device == "cuda" else 10)
    for part in runs:
        given = [
            word.split("=", 1)
            for word in shlex.split(part.command)
            if re.match("[A-Z_]+=", word)
        ]
        settings = read_settings(
            {**dict(given), "KVFERRY_DEVICE": device}, gpus=part.workers
        )
        assert settings.prefill_workers + settings.decode_workers == part.workers, (
            part.name
        )


def test_a_part_sees_its_gpus_only_and_writes_into_its_own_folder(
    tmp_path: Path,
) -> None:
    one = planned_on(79, 79)["accuracy: equal"]
    environment = environment_of(one, "cuda", tmp_path)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["LOG_DIR"] == environment["PART"] == str(tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(one, "cpu", tmp_path)
    assert {
        environment[name]
        for name in ("KV_CONNECTOR_MODULE", "DTYPE", "MODEL_NAMES", "FORCE_COLOR")
    } == {""}


READS = """\
GPU        1 MiB            1    235     1.2     218     430  right
GPU        4 MiB            1     27    {}    1814    2153  right
GPU        4 MiB          256     13   0.869    4827    5439  right

{} bytes"""
BROKEN = "- {}, 8 at once: 1 of 16 failed: HTTP 500"


LOST = BROKEN.format("kvferry")
JUDGED: list[tuple[str, int | None, str, str, str]] = [
    ("doctor", 0, "ok  ports  free\n\n20 ok\n", "ok", "20 ok"),
    ("doctor", 1, "broken  ports\n\n1 broken\n", "FAILED", "exit status 1: 1 broken"),
    (
        "doctor",
        None,
        "begun\n",
        "FAILED",
        "did not end by its deadline; last line: begun",
    ),
    ("relayout: bytes", 0, "..s\n2 passed, 1 skipped\n", "ok", "2 passed, 1 skipped"),
    ("relayout: bytes", 0, "sss\n3 skipped in 0.12s\n", "FAILED", "3 skipped in 0.12s"),
    ("relayout: bandwidth", 0, "share  0.95  met\nwritten", "ok", "written"),
    (
        "relayout: bandwidth",
        0,
        "share  0.8  MISSED  \nwritten",
        "look",
        "share 0.8 MISSED",
    ),
    ("reads", 0, READS.format("44.9", "right"), "ok", "right bytes"),
    ("reads", 0, READS.format("10", "right"), "ok", "right bytes"),
    (
        "reads",
        0,
        READS.format("9", "right"),
        "look",
        "GPU 4 MiB 1 27 9 1814 2153 right",
    ),
    ("reads", 1, READS.format("44.9", "WRONG"), "FAILED", "exit status 1: WRONG bytes"),
    (
        "cache probe",
        0,
        "X auto moved whole: kv: bf16\n1",
        "look",
        "X auto moved whole: kv: bf16",
    ),
    ("cache probe", 0, "X auto recognised: k, v\n1 recognised", "ok", "1 recognised"),
    ("beside NixlConnector", 0, f"{LOST}\nwritten", "FAILED", LOST),
    (
        "beside NixlConnector",
        0,
        "- the peer ended early: x\nw",
        "look",
        "- the peer ended early: x",
    ),
]


@pytest.mark.parametrize(("name", "status", "log", "mark", "found"), JUDGED)
def test_a_part_is_judged_by_its_exit_status_and_its_log(
    name: str, status: int | None, log: str, mark: str, found: str
) -> None:
    assert judge(planned_on(79, 79)[name].part, status, log) == (mark, found)


def done(mark: str, found: str = "", log: str = "") -> Done:
    memory = ["0: 4 900 4", "process 7 on GPUs 0, 1"]
    return Done(
        f"a {mark} part",
        mark,
        found,
        3.0,
        ("0",),
        "cat $PART",
        memory,
        {"r.json": {"a": 1}},
        log,
    )


def test_the_report_has_all_that_was_found_and_no_names_of_the_machine() -> None:
    log = f"{ROOT}/worker/x.py on\n{socket.gethostname()}\n{Path.home()}/.cache"
    every = [done("ok", "a|b"), done("FAILED", "wrong", log), done("skipped", "needs")]
    report = report_of(every, gpus(79), "cuda", quick=True)
    assert [one["mark"] for one in report["parts"]] == ["ok", "FAILED", "skipped"]
    assert report["parts"][0]["results"] == {"r.json": {"a": 1}}
    text = markdown_of(report)
    assert text.startswith("# GPU check of kvferry: FAILED, quick form\n")
    assert "| a ok part | ok | a\\|b | 0: 4 900 4; process 7 on GPUs 0, 1 | 3 |" in text
    assert "\n- 0: H100" in text
    assert "\n./worker/x.py on\nHOST\n~/.cache\n" in text
    for name in (str(ROOT), socket.gethostname(), str(Path.home()) + "/"):
        assert name not in text + json.dumps(report)
