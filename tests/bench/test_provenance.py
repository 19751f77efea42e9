"""A result is published only if its commit is a clean one in the history of HEAD."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bench.figures import Results
from bench.provenance import begin, checkout, seal
from bench.report import Measured, NotPublishable, require_commits


def git(root: Path, *arguments: str) -> str:
    """The output of one command, which must succeed."""
    who = (
        "-c",
        "user.name=K",
        "-c",
        "user.email=k@localhost",
        "-c",
        "commit.gpgsign=false",
    )
    done = subprocess.run(
        ["git", *who, "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(root: Path, text: str) -> str:
    """Commit a change of the measured code; returns the commit's id of 12 digits."""
    (root / "bench" / "step.py").write_text(text)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", text)
    return git(root, "rev-parse", "--short=12", "HEAD")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit."""
    made = tmp_path / "kvferry"
    (made / "bench" / "results").mkdir(parents=True)
    git(made, "init", "--quiet")
    (made / ".gitignore").write_text("/bench/results/quick/\n")
    commit(made, "first")
    return made


def result(commit: str, name: str = "step") -> Measured:
    """A result that says so of itself."""
    return Measured(
        name,
        Results(command=f"python -m bench.{name}", what="A sample."),
        "2026-11-22",
        commit,
        {},
        {},
    )


def test_a_commit_that_is_nowhere_or_on_another_branch_or_has_changes_is_refused_by_file_commit_and_command(
    root: Path,
) -> None:
    git(root, "checkout", "--quiet", "-b", "other")
    elsewhere = commit(root, "other")
    git(root, "checkout", "--quiet", "-")
    first = git(root, "rev-parse", "--short=12", "HEAD")
    wrong = {
        "step": "36830c01adc8",
        "scale": elsewhere,
        "plan": f"{first} and changes",
        "relayout": "HEAD",
        "soak": "",
    }
    with pytest.raises(NotPublishable) as refused:
        require_commits(
            [result(of, name) for name, of in wrong.items()] + [result(first, "serve")],
            root,
        )
    lines = str(refused.value).splitlines()
    assert len(lines) == len(wrong)
    for line, (name, of) in zip(lines, wrong.items(), strict=True):
        assert line.startswith(f"{name}.json is of commit {of!r}, ")
        assert f"run `python -m bench.{name}`" in line


def test_where_the_history_is_cut_or_git_has_none_the_results_that_cannot_be_checked_are_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = git(root, "rev-parse", "--short=12", "HEAD")
    second = commit(root, "second")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", root.as_uri(), str(shallow))
    found = [result(first, "step"), result(second, "plan")]
    assert require_commits(found, shallow) == ["step"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert require_commits(found, root) == ["step", "plan"]


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("bench/step.py", True),
        ("worker/kvferry/worker/new.py", True),
        ("tests/rig/engine.py", True),
        ("requirements/cpu.lock", True),
        ("bench/results/step.json", False),
        ("docs/performance.md", False),
    ],
)
def test_changed_and_new_files_count_where_figures_depend_on_them_and_a_run_says_so_at_its_start(
    path: str, counts: bool, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = begin(root)
    assert (clean.changes, capsys.readouterr().err) == ((), "")
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text("changed")
    found = begin(root)
    assert (found != clean) == counts
    assert (str(found) == f"{clean} and changes") == counts
    said = capsys.readouterr().err
    assert (path in said) == counts
    assert ("cannot be published" in said) == counts


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Files of a commit without their repository, as the GPU check's bundle carries them."""
    made = tmp_path / "packed"
    (made / "bench" / "results").mkdir(parents=True)
    (made / "bench" / "step.py").write_text("first")
    (made / "pyproject.toml").write_text("")
    seal(made, "36830c01adc8" + 28 * "0")
    return made


def test_files_as_they_were_packed_are_of_their_commit_whatever_python_and_benchmarks_add(
    packed: Path,
) -> None:
    (packed / "bench" / "__pycache__").mkdir()
    (packed / "bench" / "__pycache__" / "step.pyc").write_text("compiled")
    (packed / "bench" / "results" / "step.json").write_text("{}")
    found = checkout(packed)
    assert (found.commit, found.problem) == ("36830c01adc8", None)


@pytest.mark.parametrize("change", ["changed", "added", "removed", "renamed"])
def test_packed_files_that_are_not_as_they_were_cannot_be_published(
    packed: Path, change: str
) -> None:
    file = packed / "bench" / "step.py"
    if change == "changed":
        file.write_text("other")
    elif change == "added":
        (packed / "bench" / "more.py").write_text("")
    elif change == "removed":
        file.unlink()
    else:
        file.rename(packed / "bench" / "steps.py")
    problem = checkout(packed).problem
    assert problem is not None
    assert "not as they were packed" in problem


@pytest.mark.parametrize("text", ["", "36830c01adc8\n", "HEAD " + 64 * "0" + "\n"])
def test_a_seal_that_cannot_be_read_names_no_commit(packed: Path, text: str) -> None:
    (packed / "COMMIT").write_text(text)
    assert checkout(packed).problem == (
        "neither git nor a seal says which commit this is"
    )
