"""Parts that run side by side, and one summary of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts import test_parts
from scripts.second_chance import MOST
from scripts.test_parts import Part, counted, folders, read_totals

PASSES = "def test_fine(): pass\n"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-c", "/dev/null")
FAILS = "def test_broken(): assert False\ndef test_fine(): pass\n"
FAILS_AT_FIRST = """
import pathlib
def test_unsteady():
    been = pathlib.Path(__file__).with_suffix(".been")
    assert been.exists() or been.touch(), "not the first time"
"""
BREAKS = "raise ValueError('not even collected')\n"


def pytest_on(folder: Path, name: str, text: str) -> Part:
    file = folder / f"test_{name}.py"
    file.write_text(text)
    return Part(name, ((*PYTEST, f"--rootdir={folder}", str(file)),))


def meets(name: str, folder: Path, other: str) -> Part:
    """A command that ends when that of another part has begun."""
    code = (
        "import pathlib, sys, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        f"(folder / {name!r}).touch()\n"
        f"while not (folder / {other!r}).exists(): time.sleep(0.01)\n"
    )
    return Part(name, ((sys.executable, "-c", code),))


def run_parts(monkeypatch: pytest.MonkeyPatch, *lanes: tuple[Part, ...], any_lane: tuple[Part, ...] = ()) -> int:
    monkeypatch.setattr(test_parts, "LANES", lanes)
    monkeypatch.setattr(test_parts, "ANY_LANE", any_lane)
    return test_parts.main()


def test_what_passed_in_all_parts_is_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = pytest_on(tmp_path, "one", PASSES), pytest_on(tmp_path, "two", PASSES)
    assert run_parts(monkeypatch, (one,), (two,)) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[-1].startswith("2 passed in ")
    assert "1 passed in" in said, "what each part printed is there"


@pytest.mark.parametrize("one_lane", [True, False])
def test_a_test_that_failed_in_any_part_is_named_at_the_end_and_fails_all(
    one_lane: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = pytest_on(tmp_path, "bad", FAILS), pytest_on(tmp_path, "good", PASSES)
    assert run_parts(monkeypatch, *([parts] if one_lane else [(part,) for part in parts])) == 1
    end = capfd.readouterr().out.partition("===== all parts")[2]
    (failed,) = (line for line in end.splitlines() if line.startswith("FAILED "))
    assert "test_bad.py::test_broken" in failed, "with or without its reason: pytest tells it where CI is set"
    assert end.splitlines()[-1].startswith("1 failed, 2 passed in ")


def test_a_test_that_fails_beside_others_and_passes_alone_is_named_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test_parts, "ROOT", tmp_path)
    monkeypatch.setattr(test_parts, "_PYTEST", (*PYTEST, f"--rootdir={tmp_path}"))
    parts = pytest_on(tmp_path, "odd", FAILS_AT_FIRST), pytest_on(tmp_path, "good", PASSES)
    assert run_parts(monkeypatch, parts) == 0
    end = capfd.readouterr().out.partition("===== all parts")[2].splitlines()
    (unsteady,) = (line for line in end if line.startswith("UNSTEADY "))
    assert "test_odd.py::test_unsteady" in unsteady
    assert not any(line.startswith("FAILED ") for line in end)
    assert end[-1].startswith("1 passed, 1 passed alone in ")


@pytest.mark.parametrize("for_ever", [False, True])
def test_a_part_that_hangs_is_begun_anew_once(
    for_ever: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test_parts, "HUNG_S", 1.0)
    code = (
        "import pathlib, sys, time\n"
        f"been = pathlib.Path({str(tmp_path / 'been')!r})\n"
        f"if {for_ever} or not been.exists(): been.touch(); time.sleep(60)\n"
        "print('3 passed in 1.00s')\n"
    )
    status = run_parts(monkeypatch, (Part("hangs", ((sys.executable, "-c", code),)),))
    said = capfd.readouterr().out
    assert status == int(for_ever)
    assert said.count("hangs has said nothing for 1 s: killed, and begun anew") == 1
    end = said.partition("===== all parts")[2]
    assert "begun anew after it hung" in end
    assert ("3 passed; begun anew" in end) is not for_ever
    assert ("exit status -9" in end) is for_ever


def test_a_machine_that_stood_still_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test_parts, "_STOOD_STILL_S", 0.0)
    assert run_parts(monkeypatch, (Part("slow", (("sleep", "0.3"),)),)) == 0
    assert "s] the machine stood still, or let nobody run, for 0.2 s" in capfd.readouterr().out


@pytest.mark.parametrize("what", ["many", "another command", "a module"])
def test_there_is_no_second_run_where_it_would_hide_something(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = [pytest_on(tmp_path, f"odd{number}", FAILS_AT_FIRST) for number in range(MOST + 1 if what == "many" else 2)]
    other = {"another command": (Part("types", (("false",),)),), "a module": (pytest_on(tmp_path, "bad", BREAKS),)}
    assert run_parts(monkeypatch, (*odd, *other.get(what, ()))) == 1
    said = capfd.readouterr().out
    assert "===== alone" not in said
    assert said.count("FAILED ") >= 2


def test_a_part_that_could_not_be_collected_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_parts(monkeypatch, (pytest_on(tmp_path, "broken", BREAKS), pytest_on(tmp_path, "good", PASSES))) == 1
    assert capfd.readouterr().out.splitlines()[-1].startswith("1 error, 1 passed in ")


def test_a_command_that_fails_without_a_word_is_an_error_and_those_after_it_still_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = Part("silent", (("false",), ("echo", "still here")))
    assert run_parts(monkeypatch, (silent,), (Part("fine", (("true",),)),)) == 1
    said = capfd.readouterr().out
    assert "still here" in said
    assert "failed; exit status 1" in said
    assert said.splitlines()[-1].startswith("1 error in ")


def test_lanes_run_side_by_side_and_the_output_of_a_part_stays_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lanes = [
        (meets("here", tmp_path, "there"), Part("after", (("echo", "later"),))),
        (meets("there", tmp_path, "here"),),
    ]
    assert run_parts(monkeypatch, *lanes) == 0
    said = capfd.readouterr().out
    assert said.count("part 3 of 3") == 1
    assert said.index("===== here") < said.index("===== after")


def test_a_lane_that_is_done_takes_of_what_any_lane_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first lane's part ends only when the last of the shared ones has begun, so the other lane must run them."""
    long, short = meets("long", tmp_path, "second"), Part("short", (("true",),))
    shared = meets("first", tmp_path, "long"), meets("second", tmp_path, "first")
    assert run_parts(monkeypatch, (long,), (short,), any_lane=shared) == 0
    said = capfd.readouterr().out
    assert said.index("===== short") < said.index("===== first") < said.index("===== second")
    assert said.count("part 4 of 4") == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1 failed, 7 deselected in 62.07s (0:01:02)", {"failed": 1, "deselected": 7}),
        (
            "====== 2 failed, 1471 passed, 115 skipped, 1 error in 772.65s (0:12:52) ======",
            {"passed": 1471, "error": 1},
        ),
        ("3 passed, 2 errors in 0.10s", {"passed": 3, "error": 2}),
    ],
)
def test_pytests_last_line_is_understood(line: str, expected: dict[str, int]) -> None:
    counts, failures = read_totals(
        f"...F [100%]\n1 passed in the year 2000\nERROR    kvferry: said so\nFAILED a.py::b - why\n{line}\n"
    )
    assert expected.items() <= counts.items()
    assert failures == ["FAILED a.py::b - why"]


def test_bad_news_come_first() -> None:
    assert counted(Counter(passed=3, warning=1, failed=2)) == "2 failed, 3 passed, 1 warning"


def test_every_test_is_in_one_part() -> None:
    """What the others name is what the rest leaves out."""
    others = [
        folder for part in (test_parts.ENGINES, test_parts.FAULTS, test_parts.WORKERS) for folder in folders(part)
    ]
    assert len(set(others)) == len(others) > 3
    assert all((test_parts.ROOT / folder).is_dir() for folder in others)
    (rest,) = test_parts.REST.commands
    assert rest[rest.index("tests") :] == ("tests", *(f"--ignore={folder}" for folder in others))
    assert {*(part for lane in test_parts.LANES for part in lane), *test_parts.ANY_LANE} == {
        test_parts.CHECKS,
        test_parts.ENGINES,
        test_parts.FAULTS,
        test_parts.WORKERS,
        test_parts.REST,
    }
