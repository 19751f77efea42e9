#!/usr/bin/env bash
# On the machine with the GPU. Takes in the folders that were delivered beside this file; when all are there, unpacks them once and
# runs the GPU check with what they hold and the PyTorch that is here. docs/gpu-check.md, "Without a package index".
#
#   run.sh [options of scripts/run_gpu_check.sh, such as --quick, --only PART, --list]
#   run.sh --unpack-only
#
# PYTHON               a Python with PyTorch for CUDA (default python3)
# KVFERRY_BUNDLE_HOME  where all of it stays between calls (default /tmp/kvferry-gpu, 3 GB)
# LIMIT_S              seconds of this call (default 570): parts that do not fit are ended or skipped, and the report says so
# OUT                  a folder to which the report and the logs are copied at the end
# Exit status: the check's (0 passed, 1 FAILED), 2 cannot be used here, 3 folders are missing, 124 it did not end in time.
set -uo pipefail
began_s="$SECONDS"
bundle="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
home="${KVFERRY_BUNDLE_HOME:-/tmp/kvferry-gpu}"
limit_s="${LIMIT_S:-570}"
case "$limit_s" in
    '' | *[!0-9]*) echo "LIMIT_S=$limit_s: expected seconds, a whole number" >&2; exit 2 ;;
esac
if ! command -v "$python" > /dev/null; then
    echo "there is no $python; set PYTHON to a Python that has PyTorch for CUDA" >&2
    exit 2
fi
mkdir -p "$home" || exit 2
home="$(cd "$home" && pwd)"

"$python" "$bundle/unpack.py" "$bundle" "$home" || exit $?
[ "${1:-}" != --unpack-only ] || exit 0

export PATH="$home/env/bin:$PATH"
export LOG_DIR="$home/logs"
export KVFERRY_CACHE_DIR="$home/cache/kvferry"
export VLLM_CACHE_ROOT="$home/cache/vllm" TRITON_CACHE_DIR="$home/cache/triton" TORCHINDUCTOR_CACHE_DIR="$home/cache/inductor"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# vLLM takes flashinfer for granted on Hopper, and it is not carried: a gigabyte.
export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER-0}"
# The check's engines run eagerly; small helpers of vLLM are compiled all the same, by a PyTorch that they were not written for.
export TORCH_COMPILE_DISABLE="${TORCH_COMPILE_DISABLE-1}"

cd "$home/bundle/kvferry" || exit 2
export KVFERRY_COMMAND="$bundle/run.sh"
# The check ends in time by itself, with a report; timeout is for the case that it hangs.
left_s=$((limit_s - SECONDS + began_s))
check_s=$((left_s - 30))
options=()
[ "$(cat WEIGHTS)" = yes ] || options+=(--random-models)
timeout -k 10 "$left_s" python -m scripts.gpu_check --limit-s "$check_s" "${options[@]}" "$@"
status=$?

if [ -n "${OUT:-}" ] && [ -d "$LOG_DIR/gpu-check" ]; then
    newest="$(find "$LOG_DIR/gpu-check" -mindepth 1 -maxdepth 1 -type d | sort | tail -n 1)"
    mkdir -p "$OUT"
    cp "$newest"/report.* "$OUT/"
    tar -C "$newest" -czf "$OUT/logs.tar.gz" .
    # What benchmarks have measured since the bundle was made.
    find bench/results -name '*.json' -newer COMMIT -exec cp {} "$OUT/" \;
    echo "copied to $OUT: report.md, report.json, logs.tar.gz, results of benchmarks"
fi
exit "$status"
