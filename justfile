# Recipes; CI calls .ci/run, which calls what the README names.

set shell := ["bash", "-euo", "pipefail", "-c"]

# the recipes
default:
    @just --list

# ruff, mypy, import-linter: seconds
check:
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/lint-imports

# all checks and tests; arguments go to pytest
test *arguments:
    scripts/test.sh {{ arguments }}

# the main job: two engines behind vllm-router against a single one
accuracy:
    scripts/run_accuracy_test.sh

# all tests, then the main job in every configuration; writes docs/full-matrix.md; words choose: just full bfloat16
full *words:
    scripts/test.sh
    .venv/bin/python -m scripts.full_matrix {{ words }}

# what ruff can mend
fmt:
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

# write the lock files anew from what is installed
lock:
    .venv/bin/python requirements/relock.py
