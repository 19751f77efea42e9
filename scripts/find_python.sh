#!/usr/bin/env bash
# Prints a Python that can make .venv: $PYTHON when set, else the first of 3.11 … 3.13 that runs, else python3.
# The lock files were made with 3.11, so it comes first.
set -euo pipefail

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if [[ -n "${PYTHON:-}" ]]; then
    fits "$PYTHON" && { echo "$PYTHON"; exit 0; }
    echo "PYTHON=$PYTHON: not a Python 3.11 or newer with the modules venv and ensurepip" >&2
    exit 2
fi
for candidate in python3.11 python3.12 python3.13 python3; do
    fits "$candidate" && { echo "$candidate"; exit 0; }
done
echo "No Python 3.11 or newer with the modules venv and ensurepip was found." >&2
echo "Install one (Debian and Ubuntu: apt-get install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python3" >&2
exit 2
