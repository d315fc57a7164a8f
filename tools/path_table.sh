#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# path_table.sh [OPTION...]: trains one model by train_moe on 4 ranks, on every path and some meshes, 20 steps each, and prints a
# Markdown table: the loss of the last step and its perplexity, which all rows must have alike, and speed and memory. The
# options, --device cuda for instance, are given to all trainings.
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$source_root"

readonly train=build/apps/train_moe/train_moe ranks=4 limit_s=300
rows=("--path dispatch" "--path ring" "--path ragged")
[[ $* == *cuda* ]] || rows+=("--path native" "--path dense")
rows+=("--path dispatch --ep 2 --fsdp 2" "--path ring --ep 2 --fsdp 2" "--path dispatch --ep 1 --fsdp 4")

say "Building ${train#build/}" >&2
[[ -e build/build.ninja ]] || configure build --buildtype=release >&2
ninja -C build "${train#build/}" >&2
use_local_mpi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for i in "${!rows[@]}"; do
  say "Training: ${rows[i]}" >&2
  read -ra row <<<"${rows[i]}"
  timeout --kill-after=10 "$limit_s" mpirun -n "$ranks" "$train" --steps 20 --aux-loss 0 --progress off \
    --log "$logs/$i.jsonl" "${row[@]}" "$@" 2>"$logs/errors" || die "${rows[i]}: $(<"$logs/errors")"
done
python3 - "$logs" "${rows[@]}" <<'END'
import json
import pathlib
import sys

LIMIT = 1e-5  # relative: sums have another order
logs, rows = pathlib.Path(sys.argv[1]), sys.argv[2:]
finals = [json.loads((logs / f"{i}.jsonl").read_text().splitlines()[-1]) for i in range(len(rows))]
print("| path | EP | FSDP | loss | perplexity | tokens/s per rank | peak memory of a rank, MiB |")
print("|---|---|---|---|---|---|---|")
for row, final in zip(rows, finals):
    print(f"| {row.split()[1]} | {final['ep']} | {final['fsdp']} | {final['last_loss']:.6f} | {final['perplexity']:.4f} "
          f"| {final['tokens_per_second_per_rank']:,.0f} | {final['peak_memory_bytes'] / 2**20:.1f} |")
losses = [final["last_loss"] for final in finals]
deviation = max(losses) / min(losses) - 1
print(f"path_table.sh: losses differ by at most {deviation:.1e} of them", file=sys.stderr)
if deviation > LIMIT:
    sys.exit(f"path_table.sh: that is more than {LIMIT:.0e}")
END
