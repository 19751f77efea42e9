#!/usr/bin/env bash
# All checks and tests, in parts side by side; ends with one summary of them. With arguments: the checks, and pytest
# with these arguments: scripts/test.sh tests/plan -k runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/test.sh"
"$python" -m scripts.bootstrap cpu dev
export PATH="$PWD/.venv/bin:$PATH"

step() {
    printf '\n== %s\n' "$*"
    "$@"
}
if (($# == 0)); then
    step python -m scripts.test_parts
    exit
fi
step ruff check .
step ruff format --check .
step mypy
step lint-imports
step python -m pytest -q --durations=15 "$@"
