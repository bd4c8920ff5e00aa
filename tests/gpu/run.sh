#!/usr/bin/env bash
# What `make gpu-check` does: builds with the torch, nvcc and NCCL that are here, downloads nothing, tests, measures, and
# writes one page.
#
#   PYTHON=python3                 an interpreter that has torch (a CUDA build), numpy, pytest, cmake and ninja
#   RINGLET_NCCL_LIBRARY=FILE      an NCCL of 2.30.3 or later, so that ranks may share the one GPU
#   REPORT=FILE                    the page (default: benchmarks/results/DATE-GPU-gpu-check.md)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
: "${RINGLET_NCCL_LIBRARY:?names an NCCL of 2.30.3 or later, so that several ranks may share one GPU}"
RINGLET_NCCL_LIBRARY=$(realpath "$RINGLET_NCCL_LIBRARY")
command -v nvidia-smi > /dev/null || { echo "make gpu-check needs an NVIDIA GPU, and here is no nvidia-smi" >&2; exit 2; }
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
report=${REPORT:-benchmarks/results/$(date +%F)-$(tr 'A-Z ' 'a-z-' <<< "$device")-gpu-check.md}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Ranks share one GPU: few processors for each, and nothing that only several GPUs have.
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=2 NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=32
export CUDA_MODULE_LOADING=EAGER LD_PRELOAD=$RINGLET_NCCL_LIBRARY

LD_PRELOAD='' "$python" setup.py -q build_ext --inplace
folder=build/$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
LD_PRELOAD='' cmake --build "$folder" --target gpu_check
status=0
part() { # part NAME SECONDS COMMAND...: its output, and that it failed if it did
  local name=$1 limit=$2 rc=0
  shift 2
  timeout "$limit" "$@" > "$work/$name" 2>&1 || rc=$?
  if ((rc != 0)); then
    echo "ended with $rc" >> "$work/$name"
    status=1
  fi
  tail -3 "$work/$name"
}
export RINGLET_CUDA_LIBRARY=$PWD/python/ringlet/libringlet_cuda.so PYTHONPATH=$PWD/python
part kernels 60 "$folder/gpu_check"
part tests 200 "$python" -m pytest -q tests/gpu -o "pythonpath=. python tests tests/python"
part speed 100 "$python" -m ringlet bench --sweep gpu
if command -v compute-sanitizer > /dev/null; then
  part sanitizer 60 compute-sanitizer --error-exitcode 9 "$folder/gpu_check" --contract-only
else
  echo "there is no compute-sanitizer here" > "$work/sanitizer"
fi

{
  echo "# GPU check on $device, $(date +%F)"
  echo
  echo 'Written by `make gpu-check`. All ranks share one GPU (loopback): nothing here says anything about links between GPUs.'
  echo
  echo '```'
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
  "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
  git log -1 --format='commit %h' 2> /dev/null || true
  echo '```'
  for name in kernels tests speed sanitizer; do
    printf '\n## %s\n\n```\n' "$name"
    tail -200 "$work/$name"
    echo '```'
  done
} > "$report"
echo "$report"
exit $status
