#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, then runs every suite: the plain build, AddressSanitizer + UBSan, ThreadSanitizer (the suites
# whose ranks are threads), clang-format and clang-tidy. The last line is "N passed, N failed[, N skipped]".
#   --changed REV   clang-tidy looks only at files that differ from REV
#   --quick         for work in progress: the plain build and clang-format only. Leaves out both sanitizers, clang-tidy, what
#                   runs under mpirun, the tests that check times or kill ranks (suite timing), and the longest (suite long)
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$source_root"

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$source_root/tools/test.sh" | grep -v '^shellcheck'; }

changed_since=''
quick=no
while (($# > 0)); do
  case $1 in
  --changed)
    changed_since=${2:?--changed needs a revision}
    shift
    ;;
  --quick) quick=yes ;;
  --help)
    usage
    exit
    ;;
  *) die "usage: ${0##*/} [--quick] [--changed REV], or --help" ;;
  esac
  shift
done

# Lanes are functions that run in the background, each in a process group of its own: so they can be ended with all that they
# started. What they find out is in files of this directory, since they are subshells.
results=$(mktemp -d)
lanes=()
end_lanes() {
  local lane
  for lane in "${lanes[@]}"; do
    kill -- "-$lane" 2>/dev/null || true
  done
  rm -rf "$results"
}
trap end_lanes EXIT

start_lane() { # COMMAND...
  set -m
  "$@" </dev/null &
  set +m
  lanes+=("$!")
}

# Waits for all lanes. What becomes of them is in their results.
join_lanes() {
  wait "${lanes[@]}" || true
  lanes=()
}

record() { # NAME=passed|failed
  printf '%s\n' "$1" >>"$results/checks"
}

check() { # NAME COMMAND...
  local name=$1 begin=$SECONDS
  shift
  if "$@"; then
    record "$name=passed"
  else
    record "$name=failed"
    say "FAILED: $name"
  fi
  say "$name: took $((SECONDS - begin)) s"
}

# Builds the targets that TARGETS_FUNCTION prints; all, if it prints none. A build that fails counts as one failed check; its
# tests are not run.
build() { # BUILD_DIR TARGETS_FUNCTION MESON_OPTION...
  local build_dir=$1 targets_function=$2 begin=$SECONDS targets=()
  shift 2
  say "$build_dir: building"
  if configure "$build_dir" -Dtests=enabled -Dtools=enabled -Dmpi=enabled "$@" &&
    mapfile -t targets < <("$targets_function" "$build_dir") &&
    ninja -C "$build_dir" "${targets[@]}" >"$build_dir/build.log"; then
    say "$build_dir: built in $((SECONDS - begin)) s"
    touch "$results/$build_dir.built"
  else
    grep -E '(error|warning|FAILED|undefined)' -A 4 "$build_dir/build.log" 2>/dev/null | head -n 100 || true
    record "$build_dir builds=failed"
    say "FAILED: $build_dir does not build"
  fi
  touch "$results/$build_dir.done"
}

all_targets() { :; }

# The programs of the tests that are ThreadSanitizer's.
threads_targets() { # BUILD_DIR
  meson introspect --tests "$1" | python3 -c '
import json, os, sys
for test in json.load(sys.stdin):
    if "epx:threads" in test["suite"]:
        print(os.path.relpath(test["cmd"][0], sys.argv[1]))' "$source_root/$1" | sort -u
}

was_built() { [[ -e $results/$1.built ]]; } # BUILD_DIR

# Waits until the first lane has built it, or has failed to.
wait_for_build() { # BUILD_DIR
  until [[ -e $results/$1.done ]]; do
    if ! kill -0 "${lanes[0]}" 2>/dev/null && [[ ! -e $results/$1.done ]]; then
      record "$1 builds=failed"
      say "FAILED: $1: its build has ended early"
      return 1
    fi
    sleep 1
  done
  was_built "$1"
}

run_tests() { # BUILD_DIR LOG_NAME TIMEOUT_MULTIPLIER MESON_TEST_ARGS...
  local build_dir=$1 log=$2 multiplier=$3 begin=$SECONDS
  shift 3
  say "$build_dir: testing${*:+ ($*)}"
  rm -f "$build_dir/meson-logs/$log.json"
  printf '%s\n' "$build_dir/meson-logs/$log.json" >>"$results/testlogs"
  # More tests than cores at a time, since half of a test's time is waiting.
  "${unrandomised[@]}" meson test -C "$build_dir" --no-rebuild --print-errorlogs --logbase "$log" \
    --num-processes "$(($(nproc) + 2))" --timeout-multiplier "$multiplier" "$@" </dev/null ||
    true # count_tests.py reads what failed
  say "$build_dir: tested in $((SECONDS - begin)) s"
}

source_files() { # FIND_TEST...
  find include base runtime transport moe python tools tests apps examples -type f \( "$@" \) 2>/dev/null || true # not every folder is there
}

format_is_right() { source_files -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' | xargs -r clang-format-14 --dry-run -Werror; }

check_format() {
  say "clang-format: comparing"
  check clang-format format_is_right
}

# Sources of the libraries that the build compiles, since clang-tidy needs their flags.
tidy_files() {
  source_files -path 'base/*.cc' -o -path 'runtime/*.cc' -o -path 'transport/*.cc' -o -path 'moe/*.cc' | while read -r file; do
    if grep -qF "$file\"" build/compile_commands.json &&
      { [[ -z $changed_since ]] || ! git diff --quiet "$changed_since" -- "$file"; }; then
      printf '%s\n' "$file"
    fi
  done
}

tidy_is_quiet() {
  local files units
  [[ -e build/compile_commands.json ]] || return 1
  mapfile -t files < <(tidy_files)
  if ((${#files[@]} == 0)); then
    [[ -n $changed_since ]] # without --changed, there are always some
    return
  fi
  units=$(python3 tools/tidy_units.py ${changed_since:+--alone} build/compile_commands.json build/tidy "${files[@]}") || return 1
  xargs -n 1 -P "$(nproc)" clang-tidy-14 -p build/tidy --quiet 2>/dev/null <<<"$units"
}

install_missing "${build_packages[@]}" "${test_packages[@]}" "${lint_packages[@]}" "${sanitizer_packages[@]}"
install_cutlass
install_python_test_packages
use_local_mpi

# Sanitizers of older compilers cannot live with the address randomisation of newer kernels.
unrandomised=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  unrandomised=(setarch "$(uname -m)" -R)
fi
# Line numbers without the rest of the debug information, and several files in one translation unit, take less time to compile;
# that each file compiles alone, the plain build shows. Kernels have compute-sanitizer, on machines with GPUs.
sanitizer_options=(--buildtype=plain -Dcuda=disabled -Dunity=on -Dunity_size=12 -Dc_args=-g1 -Dcpp_args=-g1 -Db_lundef=false)
# Without a GPU nothing runs the kernels of tests/gpu, so they are compiled as far as PTX; the emulation runs the same source.
plain_options=(--buildtype=release -Dwerror=true -Dtest_kernels=sass)
nvidia-smi -L >/dev/null 2>&1 || plain_options[2]=-Dtest_kernels=ptx
export UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export ASAN_OPTIONS=abort_on_error=1:detect_stack_use_after_return=1

finish() {
  times >"$results/times"
  say "Everything took $((SECONDS / 60)) min $((SECONDS % 60)) s; user and system time: $(tail -n 1 "$results/times")"
  local checks=() testlogs=()
  [[ ! -e $results/checks ]] || mapfile -t checks <"$results/checks"
  [[ ! -e $results/testlogs ]] || mapfile -t testlogs <"$results/testlogs"
  python3 tools/count_tests.py "${checks[@]/#/--check=}" "${testlogs[@]}"
}

if [[ $quick == yes ]]; then
  build build all_targets "${plain_options[@]}"
  check_format
  if was_built build; then
    run_tests build testlog-quick 1 --no-suite mpi --no-suite timing --no-suite long
  fi
  finish
  exit
fi

# ccache finds what an object depends on in the compiler's own list, instead of preprocessing each file before it compiles it: a tenth of
# the time of a build with nothing cached. After a change of comments alone it would compile again, so --quick does without.
export CCACHE_DEPEND=1

# Everything else runs beside the tests of the plain build, at a lower priority, so that those keep their time limits.
lower_priority() { renice -n "$(($(nice) + 5))" -p "$BASHPID" >/dev/null || true; }

compile_rest() {
  lower_priority
  # By Clang, which takes half the time of GCC to compile with these sanitizers, and without optimization, which halves it
  # again: the loops over rows and the reference are optimized all the same (runtime/meson.build).
  CC='ccache clang-14' CXX='ccache clang++-14' \
    build build-asan all_targets "${sanitizer_options[@]}" -Doptimization=0 -Db_sanitize=address,undefined
  # By GCC, since Clang's runtime admits no other operator new, and tests have one. No threads in what this leaves out.
  build build-tsan threads_targets -Dtools=disabled -Dmpi=disabled "${sanitizer_options[@]}" -Doptimization=1 -Db_sanitize=thread
  check_format
  say "clang-tidy: reading runtime/, transport/ and moe/${changed_since:+ (what differs from $changed_since)}"
  check clang-tidy tidy_is_quiet
}

# In the order in which compile_rest builds.
test_sanitized() {
  lower_priority
  if wait_for_build build-asan; then
    run_tests build-asan testlog 4 --no-suite mpi --no-suite timing
    # Open MPI leaks, from modules that it has unloaded by then.
    ASAN_OPTIONS+=:detect_leaks=0 run_tests build-asan testlog-mpi 4 --suite mpi --no-suite timing
  fi
  if wait_for_build build-tsan; then
    run_tests build-tsan testlog 6 --suite threads --no-suite timing
  fi
}

build build all_targets "${plain_options[@]}"
start_lane compile_rest
start_lane test_sanitized >"$results/sanitized.out" 2>&1
if was_built build; then
  run_tests build testlog 1 --no-suite timing
fi
join_lanes
cat "$results/sanitized.out"

# What checks times or kills ranks is left for the end, when nothing else computes. It sleeps most of the time: the builds' tests can
# run beside each other, and in each build those that wait longest (suite waits) beside the rest, which take as long again.
start_timing_lane() { # NAME BUILD_DIR TIMEOUT_MULTIPLIER MESON_TEST_ARGS...
  local name=$1 build_dir=$2 multiplier=$3
  shift 3
  start_lane run_tests "$build_dir" "testlog-timing-$name" "$multiplier" "$@" >"$results/timing-$build_dir-$name.out" 2>&1
}
if was_built build; then
  start_timing_lane waits build 1 --suite waits --no-suite emulation
  start_timing_lane rest build 1 --suite timing --no-suite waits --no-suite emulation
  if [[ -e build/tests/emulation/control_faults_emulated ]]; then # not in builds without CUDA
    start_timing_lane emulation-waits build 1 --suite waits --no-suite processes
    start_timing_lane emulation build 1 --suite timing --no-suite waits --no-suite unit --no-suite threads --no-suite processes \
      --no-suite python
  fi
fi
if was_built build-asan; then
  start_timing_lane waits build-asan 4 --suite waits
  start_timing_lane rest build-asan 4 --suite timing --no-suite waits
fi
if was_built build-tsan; then
  start_timing_lane rest build-tsan 6 --suite timing --no-suite unit --no-suite processes
fi
join_lanes
cat "$results"/timing-*.out
finish
