#!/usr/bin/env bash
# The main job: two real vLLM engines hand KV caches over through kvferry, with the tokens of a single engine.
# Needs Python 3.11 and git; makes .venv on the first run. `--help` lists the environment variables.
export KVFERRY_COMMAND="scripts/run_accuracy_test.sh"
exec "$(dirname "$0")/launch.sh" scripts.accuracy "" "$@"
