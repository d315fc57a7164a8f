#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs epx on a bare Debian 12 machine: installs what is missing, builds, checks dispatch and
# combine, forward and backward, on four ranks, on uniform routing and on the words of a real text, and trains a small
# Mixture-of-Experts model on that text. Run it as often as you like.
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$source_root"

readonly ranks=4 limit_s=300
readonly bench=build/tools/ep_bench/ep_bench train=build/apps/train_moe/train_moe

run_bench() { # NAME ROUTING
  local json=build/quickstart-$1.json
  say "Running ep_bench --verify on $ranks ranks, routing $2"
  timeout --kill-after=10 "$limit_s" mpirun -n "$ranks" --oversubscribe "$bench" \
    --transport host --tokens 512 --hidden 1024 --experts 32 --top-k 4 --dtype bf16 --routing "$2" --seed 1 \
    --iters 20 --verify --json "$json" || die "ep_bench failed (exit status $?) on routing $2"
  say "Right; the figures are in $json"
}

run_training() { # STEPS TEXT
  local log=build/quickstart-training.jsonl
  say "Training a language model with MoE layers on $2 for $1 steps, on $ranks ranks"
  timeout --kill-after=10 "$limit_s" mpirun -n "$ranks" --oversubscribe "$train" --text "$2" --steps "$1" --log "$log" ||
    die "train_moe failed (exit status $?)"
  say "The loss of every step is in $log; it is the same on any number of ranks"
}

install_missing "${build_packages[@]}"
install_cutlass

if [[ -e build/build.ninja ]]; then
  say "Build: build/ is set up"
else
  say "Build: setting build/ up (release)"
  configure build --buildtype=release
fi
say "Build: compiling ep_bench and train_moe (log: build/quickstart.log)"
ninja -C build "${bench#build/}" "${train#build/}" >build/quickstart.log || {
  cat build/quickstart.log >&2
  die "the build failed"
}

text=/usr/share/common-licenses/GPL-3
if [[ ! -r $text ]]; then
  say "$text is not here: reading LICENSE instead"
  text=LICENSE
fi

use_local_mpi
run_bench uniform uniform
run_bench text "text:$text"
run_training 50 "$text"
say "Done. Next: ./tools/test.sh runs every test; $bench --help and $train --help explain the options"
