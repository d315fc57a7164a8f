#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# loss_curve.sh [OPTION...]: draws docs/loss-curve.svg: trains on 1 and on 4 ranks through epx, and without exchange, 200 steps
# each, and plots the three. The options, --device cuda for instance, are given to the trainings through epx.
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/lib.sh"
cd "$source_root"

readonly train=build/apps/train_moe/train_moe limit_s=300

run_training() { # NAME RANKS OPTION...
  say "Training: $1"
  timeout --kill-after=10 "$limit_s" mpirun -n "$2" "$train" --steps 200 --log "$logs/$1.jsonl" "${@:3}"
}

install_missing "${build_packages[@]}" python3-matplotlib
[[ -e build/build.ninja ]] || configure build --buildtype=release
ninja -C build "${train#build/}"
use_local_mpi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run_training one 1 "$@"
run_training four 4 "$@"
run_training replicated 1 --path replicated
/usr/bin/python3 docs/loss_curve/loss_curve.py --output docs/loss-curve.svg \
  "epx, 1 rank${*:+ }$*=$logs/one.jsonl" "epx, 4 ranks${*:+ }$*=$logs/four.jsonl" "without exchange, 1 rank=$logs/replicated.jsonl"
say "docs/loss-curve.svg is drawn"
