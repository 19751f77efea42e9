"""The GPU check: which parts run where, how each is judged, and what the report has."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from bench import provenance

from scripts.accuracy import devices
from scripts.accuracy.settings import ROOT, read_settings
from scripts.gpu_check import __main__ as check
from scripts.gpu_check import gpus as gpus_module
from scripts.gpu_check.__main__ import main, markdown_of, report_of
from scripts.gpu_check.gpus import Gpu, MemorySeen, find_gpus
from scripts.gpu_check.parts import Planned, parts_for, plan
from scripts.gpu_check.pins import not_as_pinned
from scripts.gpu_check.running import Done, environment_of, judge

SMI = {
    "gpu": [
        "index",
        "name",
        "memory.total",
        "memory.free",
        "driver_version",
        "compute_cap",
        "uuid",
        "memory.used",
    ],
    "0": ["0", "H100", "81559", "81000", "570.1", "9.0", "GPU-a", "4"],
    "1": ["1", "H100", "81559", "20000", "570.1", "9.0", "GPU-b", "[N/A]"],
}


def gpus(*free_gib: float) -> list[Gpu]:
    return [Gpu(str(index), "H100", free) for index, free in enumerate(free_gib)]


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


def test_the_quick_form_says_what_it_leaves_out_and_parts_are_chosen_by_how_they_begin() -> None:
    quick = planned_on(79, 79, quick=True)
    assert [name for name, one in quick.items() if not one.skipped][-2:] == [
        "accuracy: one GPU",
        "accuracy: equal",
    ]
    assert quick["beside NixlConnector"].skipped == "not in the quick form"
    wanted = plan(parts_for("cuda", quick=False), gpus(79), quick=False, only=["relayout", "reads"])
    assert [one.part.name for one in wanted] == ["relayout: bytes", "relayout: bandwidth", "reads"]


def test_without_the_default_models_weights_the_accuracy_test_has_random_ones() -> None:
    parts = parts_for("cuda", quick=False, random_models=True)
    runs = [part for part in parts if "scripts.accuracy" in part.command]
    models = [re.findall(r"MODEL_NAMES=(\S+)", part.command) for part in runs]
    assert {name for (name,) in models} == {
        "tiny-llama",
        "small-mla",
        "small-mamba2-hybrid",
        "small-gdn-hybrid",
    }


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
            word.split("=", 1) for word in shlex.split(part.command) if re.match("[A-Z_]+=", word)
        ]
        settings = read_settings({**dict(given), "KVFERRY_DEVICE": device}, gpus=part.workers)
        assert settings.prefill_workers + settings.decode_workers == part.workers, part.name


def test_a_part_sees_its_gpus_only_and_writes_into_its_own_folder(tmp_path: Path) -> None:
    one = planned_on(79, 79)["accuracy: equal"]
    environment = environment_of(one, "cuda", tmp_path)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["LOG_DIR"] == environment["PART"] == str(tmp_path)
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(one, "cpu", tmp_path)
    assert {
        environment[name] for name in ("KV_CONNECTOR_MODULE", "DTYPE", "MODEL_NAMES", "FORCE_COLOR")
    } == {""}


def test_a_look_at_gpus_that_do_not_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"gpu": [["0", "uuid", "5"]], "compute-apps": []}
    monkeypatch.setattr("scripts.gpu_check.gpus._query", lambda what, _: rows[what])
    seen = MemorySeen()
    seen.look("cuda")
    rows["gpu"] = []
    seen.look("cuda")
    assert seen.lines() == ["0: 5 5 5"]


def answer_as_nvidia_smi(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    what, columns = re.fullmatch(r"--query-([a-z-]+)=(.*)", command[1]).groups()  # type: ignore[union-attr]
    if what == "compute-apps":
        text = "GPU-a, 7\nGPU-b, 7\nGPU-b, 8\n"
    else:
        at = [SMI["gpu"].index(column) for column in columns.split(",")]
        text = "".join(", ".join(SMI[gpu][index] for index in at) + "\n" for gpu in "01")
    return subprocess.CompletedProcess(command, 0, text)


def test_nvidia_smi_says_which_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module.subprocess, "run", answer_as_nvidia_smi)  # type: ignore[attr-defined]
    assert [(gpu.name, gpu.about, round(gpu.free_gib)) for gpu in find_gpus("cuda", {})] == [
        ("0", "H100, 81559 MiB, 9.0, driver 570.1", 79),
        ("1", "H100, 81559 MiB, 9.0, driver 570.1", 20),
    ]
    assert [gpu.name for gpu in find_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "1"})] == ["1"]
    assert [gpu.name for gpu in find_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a"})] == ["0"]


def test_the_memory_of_each_gpu_before_most_and_after_and_who_is_on_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus_module.subprocess, "run", answer_as_nvidia_smi)  # type: ignore[attr-defined]
    memory = MemorySeen()
    for used in ("4", "900", "5"):
        monkeypatch.setitem(SMI, "0", [*SMI["0"][:-1], used])
        memory.look("cuda")
    assert memory.lines() == ["0: 4 900 5", "1: 0 0 0", "process 7 on GPUs 0, 1"]


READS = """\
GPU        1 MiB            1    235     1.2     218     430  right
GPU        4 MiB            1     27    {}    1814    2153  right
GPU        4 MiB          256     13   0.869    4827    5439  right

{} bytes"""
BROKEN = "- {}, 8 at once: 1 of 16 failed: HTTP 500"


@pytest.mark.parametrize(
    ("name", "status", "log", "mark", "found"),
    [
        ("doctor", 0, "ok  ports  free\n\n20 ok\n", "ok", "20 ok"),
        (
            "doctor",
            1,
            "broken  ports\n\n20 ok, 1 broken\n",
            "FAILED",
            "exit status 1: 20 ok, 1 broken",
        ),
        ("doctor", None, "begun\n", "FAILED", "did not end by its deadline; last line: begun"),
        (
            "relayout: bytes",
            0,
            "..s\n2 passed, 1 skipped in 0.12s\n",
            "ok",
            "2 passed, 1 skipped in 0.12s",
        ),
        ("relayout: bytes", 0, "sss\n3 skipped in 0.12s\n", "FAILED", "3 skipped in 0.12s"),
        (
            "relayout: bandwidth",
            0,
            "share  0.95  met\nwritten to r.json",
            "ok",
            "written to r.json",
        ),
        (
            "relayout: bandwidth",
            0,
            "share  0.8  MISSED  \nwritten to r.json",
            "look",
            "share 0.8 MISSED",
        ),
        ("reads", 0, READS.format("44.9", "right"), "ok", "right bytes"),
        ("reads", 0, READS.format("10", "right"), "ok", "right bytes"),
        ("reads", 0, READS.format("2.31", "right"), "look", "GPU 4 MiB 1 27 2.31 1814 2153 right"),
        ("reads", 0, READS.format("0.8", "right"), "look", "GPU 4 MiB 1 27 0.8 1814 2153 right"),
        ("reads", 0, READS.format("9", "right"), "look", "GPU 4 MiB 1 27 9 1814 2153 right"),
        ("reads", 1, READS.format("44.9", "WRONG"), "FAILED", "exit status 1: WRONG bytes"),
        (
            "cache probe",
            0,
            "X auto moved whole: kv: bf16\n1 moved whole",
            "look",
            "X auto moved whole: kv: bf16",
        ),
        ("cache probe", 0, "X auto recognised: k, v\n1 recognised", "ok", "1 recognised"),
        (
            "beside NixlConnector",
            0,
            f"{BROKEN.format('kvferry')}\nwritten",
            "FAILED",
            BROKEN.format("kvferry"),
        ),
        (
            "beside NixlConnector",
            0,
            "- the peer ended early: x\nwritten",
            "look",
            "- the peer ended early: x",
        ),
    ],
)
def test_a_part_is_judged_by_its_exit_status_and_its_log(
    name: str, status: int | None, log: str, mark: str, found: str
) -> None:
    assert judge(planned_on(79, 79)[name].part, status, log) == (mark, found)


def done(mark: str, found: str = "", log: str = "") -> Done:
    memory = ["0: 4 900 4", "process 7 on GPUs 0, 1"]
    return Done(
        f"a {mark} part", mark, found, 3.0, ("0",), "cat $PART", memory, {"r.json": {"a": 1}}, log
    )


@pytest.mark.parametrize(
    ("marks", "passed"),
    [
        (["ok", "look", "skipped"], True),
        (["ok", "FAILED"], False),
        (["skipped"], False),
        ([], False),
    ],
)
def test_only_a_part_that_failed_fails_the_check_and_nothing_run_is_no_success(
    marks: list[str], passed: bool
) -> None:
    assert report_of([done(mark) for mark in marks], [], "cuda", quick=False)["passed"] is passed


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


def test_the_report_names_what_is_not_as_vllm_pins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.11.0+cu130", "numpy": "2.3.5", "six": "1.0"}
    required = [
        "torch==2.13.0",
        "numpy>=2",
        "tilelang==0.1.12",
        'six>=1.16; python_version < "3"',
        'six>=9; extra == "audio"',
    ]

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "requires", lambda _name: required)
    monkeypatch.setattr(metadata, "version", version)
    lines = ["tilelang ==0.1.12: not installed", "torch ==2.13.0: 2.11.0+cu130"]
    assert not_as_pinned("vllm") == lines
    report = report_of([done("ok")], [], "cuda", quick=True)
    assert report["not_as_pinned"] == lines
    assert "\n- not as vLLM pins it: torch ==2.13.0: 2.11.0+cu130\n" in markdown_of(report)


def test_a_check_out_of_a_bundle_says_the_commit_that_it_was_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "COMMIT").write_text("0123456789ab\n")
    monkeypatch.setattr(provenance, "checkout", lambda: provenance.Checkout(""))
    assert report_of([done("ok")], [], "cpu", quick=True)["commit"] == "unknown"
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert report_of([done("ok")], [], "cpu", quick=True)["commit"] == "0123456789ab"


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "said"),
    [
        (["--check"], {"KVFERRY_DEVICE": "cpu"}, 0, "cpu\n"),
        (["--check"], {"GPUS": "1"}, 0, "cuda\n"),
        (
            ["--list", "--quick", "--only", "accuracy: MLA"],
            {"KVFERRY_DEVICE": "cpu"},
            0,
            "not in the quick form\n",
        ),
        (["--list"], {"KVFERRY_DEVICE": "auto"}, 2, "no GPU was found by nvidia-smi"),
        (["--only", "nothing"], {"KVFERRY_DEVICE": "cpu"}, 2, "there are doctor; relayout: bytes"),
        (["--limit-s", "0"], {"KVFERRY_DEVICE": "cpu"}, 2, "--limit-s 0: expected more than 0"),
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
