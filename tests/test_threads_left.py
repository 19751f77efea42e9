"""The check that no thread of kvferry outlives its test: `tests/conftest.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LEAVES = """
import threading
import pytest
from tests import waiting

waiting.LONGEST_S = 0.1  # it never ends: no need to wait for it

def begin(name):
    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()

@pytest.fixture(scope="module")
def _of_module():
    begin("kvferry-listener")

@pytest.fixture(scope="module")
def ends():
    threads = []
    yield threads
    for thread, over in threads:
        over.set()
        thread.join()

def test_that_starts_one_of_its_modules_that_ends(ends):
    over = threading.Event()
    ends.append((threading.Thread(target=over.wait, name="kvferry-renewer"), over))
    ends[0][0].start()

def test_with_a_module_that_leaves_one(_of_module): pass

def test_that_leaves_one(): begin("kvferry-transfer")

def test_that_leaves_another_ones_thread(): begin("another")
"""


def test_a_test_that_leaves_a_thread_behind_is_named(tmp_path: Path) -> None:
    file = tmp_path / "test_left.py"
    file.write_text(LEAVES)
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", "/dev/null", f"--rootdir={tmp_path}")
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert "4 passed, 1 error" in done.stdout, done.stdout + done.stderr
    (reported,) = (line for line in done.stdout.splitlines() if line.startswith("E ") and "threads are left" in line)
    first, second = reported.partition("threads are left: ")[2].split(", ")
    assert first == "kvferry-listener since test_left.py::test_with_a_module_that_leaves_one"
    assert second == "kvferry-transfer since test_left.py::test_that_leaves_one"
