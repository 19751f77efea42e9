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

# one package's tests but the slow modules (CONTRIBUTING.md): just quick tests/plan
quick *arguments:
    .venv/bin/python -m pytest -q -m "not slow" {{ arguments }}

# two engines of vLLM's CUDA wheel on an emulated GPU (tests/gpu_emulation/README.md), all cases; arguments go to pytest
gpu-emulation *arguments:
    .venv/bin/python -m tests.gpu_emulation.run {{ arguments }}

# the tests that use vLLM under its next release (docs/testing.md); arguments go to pytest, `--publish` writes the result
next-vllm *arguments:
    .venv/bin/python -m tests.next_vllm.run {{ arguments }}

# a bundle of the GPU check (scripts/gpu_bundle.sh), unpacked and run on the emulated GPU: just gpu-bundle-rehearsal DEST --quick
gpu-bundle-rehearsal destination *options:
    .venv/bin/python -m tests.gpu_emulation.build
    .venv/bin/python -m tests.gpu_emulation.bundle {{ destination }} {{ options }}

# the main job: two engines behind vllm-router against a single one
accuracy:
    scripts/run_accuracy_test.sh

# what every push's run has less of (docs/testing.md#every-night)
full-numbers:
    scripts/run_demo.sh --once
    KVFERRY_DRAWS=1 scripts/test.sh
    KVFERRY_FAULT_SOAK_REQUESTS=10000 .venv/bin/python -m pytest -q tests/faults/test_soak.py

# the full numbers, then the main job with other types, blocks, numbers of engines and ranks
full: full-numbers
    scripts/run_accuracy_test.sh
    DTYPE=bfloat16 scripts/run_accuracy_test.sh
    PREFILL_BLOCK_SIZE=32 DECODE_BLOCK_SIZE=64 scripts/run_accuracy_test.sh
    NUM_PREFILL_INSTANCES=2 NUM_DECODE_INSTANCES=2 scripts/run_accuracy_test.sh
    MODEL_NAMES=tiny-llama DECODER_TP_SIZE=2 {{ patient }} scripts/run_accuracy_test.sh
    MODEL_NAMES=tiny-llama PREFILLER_PP_SIZE=2 {{ patient }} scripts/run_accuracy_test.sh

# three workers on two cores wait for each other
patient := "KV_CONNECTOR_EXTRA_CONFIG='{\"kv_lease_duration\": 120, \"handshake_timeout_s\": 60}'"

# one fuzz target of tests/fuzz/targets.py under atheris: just fuzz planning -max_total_time=300
fuzz target *options:
    .venv/bin/python -m tests.fuzz.run_atheris {{ target }} {{ options }}

# requests with 5% faults of all kinds, 30 a second on two cores; writes bench/results/soak.json: just soak --requests 50000
soak *options:
    .venv/bin/python -m bench.soak {{ options }}

# all benchmarks but the soak, then docs/performance.md: an hour on two cores, with nothing else running
bench:
    for name in plan step scale link connections relayout transfer handover stream engine_contact prefix prefix_step serve; do .venv/bin/python -m bench.$name; done
    .venv/bin/python -m bench.report

# the same in small, for orientation: 10 minutes; writes bench/results/quick, publishes nothing
bench-quick:
    for name in plan step scale link connections relayout transfer handover stream engine_contact prefix prefix_step serve; do .venv/bin/python -m bench.$name --quick; done

# docs/performance.md and its charts anew from bench/results
report:
    .venv/bin/python -m bench.report

# what is generated in docs/, then the site of it in site/; needs no network
docs:
    .venv/bin/python -m scripts.generate_docs
    .venv/bin/mkdocs build --quiet

# the site at http://127.0.0.1:8000, made anew when a page is saved
docs-serve:
    .venv/bin/mkdocs serve --dev-addr 127.0.0.1:8000

# what ruff can mend
fmt:
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

# write requirements/*.lock anew; versions that still fit are kept without --upgrade; needs uv: just lock --upgrade
lock *options:
    cd requirements; {{ compile }} {{ options }} --override overrides.txt cpu.txt -o cpu.lock
    cd requirements; {{ compile }} {{ options }} dev.txt -o dev.lock
    cd requirements; {{ compile }} {{ options }} router.txt -o router.lock
    cd requirements; {{ compile }} {{ options }} cuda.txt ../pyproject.toml --extra vllm -o cuda.lock

compile := "uv pip compile --no-config --universal --python-version 3.11 --generate-hashes --no-annotate --quiet"
export UV_CUSTOM_COMPILE_COMMAND := "just lock"
