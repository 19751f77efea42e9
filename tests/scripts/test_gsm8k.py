"""gsm8k: when it can be asked, and how lm-eval's result is read. lm-eval itself is replaced by a small program."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.accuracy import gsm8k
from scripts.accuracy.checks import gsm8k_not_run, judge_gsm8k
from scripts.accuracy.gsm8k import Gsm8kFailed
from scripts.accuracy.settings import Settings, read_settings

_FAKE = """
import json, pathlib, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert arguments["--tasks"] == "gsm8k" and arguments["--limit"] == "200"
assert "base_url=http://d/v1/completions" in arguments["--model_args"]
folder = pathlib.Path(arguments["--output_path"]) / "model"
folder.mkdir(parents=True)
scores = {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
(folder / "results_1.json").write_text(json.dumps({"results": {"gsm8k": scores}}))
"""


@pytest.fixture
def settings() -> Settings:
    return read_settings({}, gpus=0)


def fake_lm_eval(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "lm_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_score_is_that_of_the_strict_match(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_lm_eval(_FAKE, tmp_path, monkeypatch)
    assert gsm8k.score("http://d", "model", "m", settings, tmp_path, "router") == 0.25


def test_when_lm_eval_fails_its_log_is_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_lm_eval("raise SystemExit(4)", tmp_path, monkeypatch)
    with pytest.raises(Gsm8kFailed, match=r"exit status 4: .*gsm8k-router\.log"):
        gsm8k.score("http://d", "model", "m", settings, tmp_path, "router")


def test_without_lm_eval_the_table_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = gsm8k.availability(settings)
    assert not found.can_run
    assert "lm-eval is not installed" in found.reason
    assert gsm8k_not_run(found.reason, demanded=False).passed is None
    assert gsm8k_not_run(found.reason, demanded=True).passed is False
    assert gsm8k.availability(replace(settings, gsm8k="off")).reason == "GSM8K=off"


def test_scores_may_differ_by_three_points() -> None:
    assert judge_gsm8k(0.40, 0.42).passed
    assert not judge_gsm8k(0.40, 0.36).passed
