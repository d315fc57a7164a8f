#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# token_sweep.sh DIRECTORY LAUNCH... -- [EP_BENCH_OPTION...]: runs ep_bench with 1 to 8192 tokens per rank in both layouts, and
# writes DIRECTORY/LAYOUT-TOKENS.json for token_sweep.py. LAUNCH is the launcher and the program, for instance
#   token_sweep.sh sweep mpirun -n 4 build/tools/ep_bench/ep_bench -- --hidden 7168 --experts 256 --top-k 8
set -euo pipefail

readonly limit_s=60 directory=$1
shift
launch=()
while [[ $# -gt 0 && $1 != -- ]]; do
  launch+=("$1")
  shift
done
[[ $# -gt 0 ]] || {
  echo "token_sweep.sh: '--' is missing after the launcher and the program" >&2
  exit 2
}
shift
mkdir -p "$directory"
for tokens in 1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192; do
  for layout in expert-major rank-major; do
    timeout --kill-after=10 "$limit_s" "${launch[@]}" --transport nccl --graph --floor --layout "$layout" --tokens "$tokens" \
      --json "$directory/$layout-$tokens.json" "$@"
  done
done
