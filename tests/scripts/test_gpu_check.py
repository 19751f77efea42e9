"""The GPU check: which parts run where, how each is judged, and what the report has."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.accuracy import devices
from scripts.accuracy.settings import ROOT, read_settings
from scripts.gpu_check import judging, machine
from scripts.gpu_check.__main__ import main
from scripts.gpu_check.judging import Judge, Mark, Verdict, judge
from scripts.gpu_check.machine import Gpu, Memory, find_gpus, look_at_memory
from scripts.gpu_check.parts import Part, Planned, parts_for, plan
from scripts.gpu_check.report import markdown, report_of, verdict
from scripts.gpu_check.running import Done, MemorySeen, environment_of

SMI = {
    "gpu": ["index", "name", "memory.total", "memory.free", "driver_version", "compute_cap", "uuid", "memory.used"],
    "0": ["0", "H100", "81559", "81000", "570.1", "9.0", "GPU-a", "4"],
    "1": ["1", "H100", "81559", "20000", "570.1", "9.0", "GPU-b", "[N/A]"],
}


def gpus(*free_gib: float) -> list[Gpu]:
    return [Gpu(str(index), "H100", 80.0, free) for index, free in enumerate(free_gib)]


def planned_on(*free_gib: float, quick: bool = False) -> dict[str, Planned]:
    found = plan(parts_for("cuda", quick=quick), gpus(*free_gib), quick=quick)
    return {one.part.name: one for one in found}


def test_every_part_of_the_issue_runs_on_two_gpus_and_what_needs_two_is_named_on_one() -> None:
    assert not [one for one in planned_on(79, 79).values() if one.skipped]
    skipped = {name: one.skipped for name, one in planned_on(79).items() if one.skipped}
    assert list(skipped) == ["accuracy: equal", "accuracy: TP 2 → 1", "accuracy: TP 1 → 2"]
    assert set(skipped.values()) == {"needs 2 GPUs with 16 GiB free; of 1 found, 1 have that"}


def test_workers_take_the_gpus_that_have_room_and_share_them_where_there_are_too_few() -> None:
    alone, several = planned_on(79), planned_on(1, 79, 79)
    assert alone["accuracy: one GPU"].gpus == ("0", "0")
    assert several["accuracy: equal"].gpus == ("1", "2")
    assert several["accuracy: TP 2 → 1"].gpus == ("1", "2", "1")
    assert several["doctor"].gpus == ("1",)
    small = planned_on(24)
    assert small["handover"].skipped == "needs a GPU with 48 GiB free; of 1 found, 0 have that"


def test_the_quick_form_and_the_cpu_say_what_they_leave_out() -> None:
    quick = planned_on(79, 79, quick=True)
    assert [name for name, one in quick.items() if not one.skipped][-2:] == ["accuracy: one GPU", "accuracy: equal"]
    assert quick["beside NixlConnector"].skipped == "not in the quick form"
    on_cpu = plan(parts_for("cpu", quick=False), find_gpus("cpu", {}), quick=False)
    needs = [one.skipped for one in on_cpu if "→" in one.part.name and "NHD" in one.part.name]
    assert needs == ["needs a GPU: vLLM's CPU attention has one layout"] * 2
    wanted = plan(parts_for("cuda", quick=False), gpus(79), quick=False, only=["relayout", "reads"])
    assert [one.part.name for one in wanted] == ["relayout: bytes", "relayout: bandwidth", "reads"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_accuracy_test_knows_the_variables_of_every_part(device: str) -> None:
    for part in parts_for(device, quick=False, models=["some/model"]):
        if part.judge is judging.accuracy and not part.missing:
            settings = read_settings(part.environment, gpus=part.workers)
            needed = settings.prefill_workers + settings.decode_workers
            assert (settings.device, needed) == (device, part.workers), part.name


def test_two_engines_may_share_a_gpu_that_is_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_listed_gpus", lambda: 1)
    assert [devices.count_gpus({"CUDA_VISIBLE_DEVICES": names}) for names in ("0,0", "0", "", "0,1", "-1")] == [
        2,
        1,
        0,
        1,
        0,
    ]
    assert devices.hand_out_gpus([1, 1], {"CUDA_VISIBLE_DEVICES": "0,0"}) == [("0",), ("0",)]


def test_a_part_sees_its_gpus_only_and_writes_into_its_own_folder(tmp_path: Path) -> None:
    one = planned_on(79, 79)["accuracy: equal"]
    environment = environment_of(one, "cuda", tmp_path)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["LOG_DIR"] == environment["PART"] == str(tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(one, "cpu", tmp_path)


def answer_as_nvidia_smi(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    what, columns = re.fullmatch(r"--query-([a-z-]+)=(.*)", command[1]).groups()  # type: ignore[union-attr]
    if what == "compute-apps":
        text = "GPU-a, 7\nGPU-b, 7\nGPU-b, 8\n"
    else:
        at = [SMI["gpu"].index(column) for column in columns.split(",")]
        text = "".join(", ".join(SMI[gpu][index] for index in at) + "\n" for gpu in "01")
    return subprocess.CompletedProcess(command, 0, text)


def test_nvidia_smi_says_which_gpus_there_are_and_which_process_is_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.subprocess, "run", answer_as_nvidia_smi)  # type: ignore[attr-defined]
    assert [(gpu.name, round(gpu.free_gib), gpu.capability) for gpu in find_gpus("cuda", {})] == [
        ("0", 79, "9.0"),
        ("1", 20, "9.0"),
    ]
    assert [gpu.name for gpu in find_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "1"})] == ["1"]
    assert [gpu.name for gpu in find_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a"})] == ["0"]
    assert look_at_memory("cuda") == Memory({"0": 4, "1": 0}, {7: ("0", "1")})


TARGET = {"name": "share", "measured": 0.8, "kind": "at least", "limit": 0.9, "unit": "", "met": False}
RESULT = {
    "notes": [],
    "targets": [TARGET],
    "tables": [{"columns": ["setup", "a", "b", "c"], "rows": [["equal", 1, 2, 3]]}],
}
READS = {"right": True, "transports": "cuda_ipc(cuda)", "reads": [{"gb_s": 150.0}, {"gb_s": 2.0}]}
FINDING = {"check": "ports", "mark": "ok", "found": "free", "do": ""}
CHECK = {"name": "same tokens", "passed": True, "detail": "0 of 63 differ"}
ROW = {"backend": "FLASH_ATTN", "cache": "auto", "kinds": ["k", "v"], "found": "k, v", "stopped_by": ""}
WHOLE, STOPPED = {**ROW, "kinds": ["kv"]}, {**ROW, "kinds": [], "stopped_by": "kvferry", "found": "KeyError"}
CASES: list[tuple[Judge, str, Any, Mark, str]] = [
    (judging.doctor, "doctor.json", {"findings": [FINDING]}, Mark.OK, "1 ok"),
    (judging.doctor, "doctor.json", {"findings": [{**FINDING, "mark": "broken"}]}, Mark.FAILED, "ports: free"),
    (judging.tests, "tests.xml", '<a><testcase name="x"/></a>', Mark.OK, "1 passed"),
    (judging.tests, "tests.xml", '<a><testcase name="x"><skipped/></testcase></a>', Mark.FAILED, "0 passed"),
    (judging.tests, "tests.xml", '<a><testcase/><testcase name="x"><error/></testcase></a>', Mark.FAILED, "; x"),
    (judging.benchmark, "quick/relayout.json", RESULT, Mark.LOOK, "0 of 1 targets are met; share 0.8"),
    (judging.benchmark, "r.json", {**RESULT, "targets": []}, Mark.OK, "equal: a 1; b 2; c 3"),
    (judging.benchmark, "r.json", {**RESULT, "notes": ["kvferry, 8 at once: 1 of 16 failed: x"]}, Mark.FAILED, "1 of"),
    (judging.benchmark, "r.json", {**RESULT, "notes": ["the peer ended early: x"]}, Mark.LOOK, "ended early"),
    (judging.reads, "reads.json", READS, Mark.OK, "150 GB/s at most, over cuda_ipc"),
    (judging.reads, "reads.json", {**READS, "transports": "tcp"}, Mark.LOOK, "not over cuda_ipc"),
    (judging.reads, "reads.json", {**READS, "right": False}, Mark.FAILED, "wrong bytes"),
    (judging.accuracy, "1/report.json", [{"passed": True, "checks": [CHECK]}], Mark.OK, "1 checks; 0 of 63"),
    (
        judging.accuracy,
        "1/report.json",
        [{"passed": False, "checks": [CHECK, {**CHECK, "name": "bytes", "passed": False}]}],
        Mark.FAILED,
        "bytes: 0 of 63",
    ),
    (judging.backends, "backends.json", [ROW, {**STOPPED, "stopped_by": "vLLM"}], Mark.OK, "1 not started by vLLM"),
    (judging.backends, "backends.json", [ROW, WHOLE], Mark.LOOK, "FLASH_ATTN auto"),
    (judging.backends, "backends.json", [ROW, STOPPED], Mark.FAILED, "KeyError"),
    (judging.backends, "backends.json", [], Mark.FAILED, "0 recognised"),
]


@pytest.mark.parametrize(("by", "name", "left", "mark", "found"), CASES)
def test_a_part_is_judged_by_what_it_left(
    by: Judge, name: str, left: Any, mark: Mark, found: str, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(left if isinstance(left, str) else json.dumps(left))
    given = judge(by, tmp_path, "cuda", 0, "last")
    assert (given.mark, found in given.found) == (mark, True), given
    assert judge(by, tmp_path, "cuda", 3, "last").mark is Mark.FAILED


@pytest.mark.parametrize(("status", "found"), [(None, "deadline; last line: x"), (1, "exit status 1 without a result")])
@pytest.mark.parametrize("by", dict.fromkeys(case[0] for case in CASES), ids=lambda by: by.__name__)
def test_a_part_that_left_nothing_has_failed(by: Judge, status: int | None, found: str, tmp_path: Path) -> None:
    given = judge(by, tmp_path, "cuda", status, "x")
    assert (given.mark, found in given.found) == (Mark.FAILED, True)


def done(mark: Mark, found: str = "", results: Mapping[str, Any] = {}, log: str = "") -> Done:
    part = Part(name=f"a {mark.value} part", shows="", command="cat $PART", judge=judging.doctor)
    memory = MemorySeen({"0": 4}, {"0": 900}, {"0": 4}, {7: ("0", "1")})
    return Done(Planned(part, ("0",)), Verdict(mark, found), 3.0, memory, results, log)


def test_only_a_part_that_failed_makes_the_exit_status_1_and_nothing_run_is_no_success() -> None:
    assert verdict([done(Mark.OK), done(Mark.LOOK), done(Mark.SKIPPED)]) == 0
    assert verdict([done(Mark.OK), done(Mark.FAILED)]) == verdict([done(Mark.SKIPPED)]) == verdict([]) == 1


def test_the_report_has_all_that_was_found_and_no_names_of_the_machine() -> None:
    log = f"{ROOT}/worker/x.py on\n{socket.gethostname()}\n{Path.home()}/.cache"
    every = [done(Mark.OK, "a|b", {"r.json": RESULT}), done(Mark.FAILED, "wrong", log=log), done(Mark.SKIPPED, "needs")]
    report = report_of(every, gpus(79), "cuda", quick=True)
    assert (report["passed"], [one["mark"] for one in report["parts"]]) == (False, ["ok", "FAILED", "skipped"])
    assert report["parts"][0]["results"] == {"r.json": RESULT}
    text = markdown(report)
    assert text.startswith("# GPU check of kvferry: FAILED, quick form\n")
    assert "| a ok part | ok | a∣b | 0: 4 900 4; process 7 on GPUs 0, 1 | 3 |" in text
    assert "\n- 0: H100, 80 GiB" in text
    assert "\n./worker/x.py on\nHOST\n~/.cache\n" in text
    for name in (str(ROOT), socket.gethostname(), str(Path.home()) + "/"):
        assert name not in text + json.dumps(report)


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "said"),
    [
        (["--check"], {"KVFERRY_DEVICE": "cpu"}, 0, "cpu\n"),
        (["--check"], {"GPUS": "1"}, 0, "cuda\n"),
        (["--list", "--only", "accuracy: HND"], {"KVFERRY_DEVICE": "cpu"}, 0, "one layout\n"),
        (["--list"], {"KVFERRY_DEVICE": "auto"}, 2, "no GPU was found by nvidia-smi"),
        (["--only", "nothing"], {"KVFERRY_DEVICE": "cpu"}, 2, "there are doctor; relayout: bytes"),
        ([], {"KVFERRY_DEVICE": "tpu"}, 2, "KVFERRY_DEVICE='tpu'"),
    ],
)
def test_options_are_checked_before_anything_is_installed_or_run(
    arguments: list[str],
    environment: Mapping[str, str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    monkeypatch.setattr(devices, "_listed_gpus", lambda: int(environment.get("GPUS", "0")))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        ended = main(arguments)
    except SystemExit as exited:
        ended = int(exited.code or 0)
    assert ended == status
    said_here = capsys.readouterr()
    assert said in said_here.out + said_here.err
