#!/usr/bin/env bash
# Installs what is missing, then runs every suite: the plain build, AddressSanitizer + UBSan, ThreadSanitizer (the suites
# whose ranks are threads), clang-format and clang-tidy. The last line is "N passed, N failed[, N skipped]".
#   --changed REV   clang-tidy looks only at files that differ from REV
# shellcheck source=tools/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$source_root"

changed_since=''
case ${1-} in
--changed) changed_since=${2:?--changed needs a revision} ;;
'') ;;
*) die "usage: ${0##*/} [--changed REV]" ;;
esac

checks=()   # NAME=passed|failed of what meson does not count
testlogs=() # what meson counted

check() { # NAME COMMAND...
  local name=$1
  shift
  if "$@"; then
    checks+=("$name=passed")
  else
    checks+=("$name=failed")
    say "FAILED: $name"
  fi
}

# A build that fails counts as one failed check; its tests are not run.
build() { # BUILD_DIR MESON_OPTION...
  local build_dir=$1 begin=$SECONDS
  shift
  say "$build_dir: building"
  if configure "$build_dir" -Dtests=enabled -Dtools=enabled -Dmpi=enabled "$@" &&
    ninja -C "$build_dir" >"$build_dir/build.log"; then
    say "$build_dir: built in $((SECONDS - begin)) s"
    return 0
  fi
  [[ -e $build_dir/build.log ]] && grep -E '(error|warning|FAILED|undefined)' -A 4 "$build_dir/build.log" | head -n 100
  checks+=("$build_dir builds=failed")
  say "FAILED: $build_dir does not build"
  return 1
}

run_tests() { # BUILD_DIR LOG_NAME TIMEOUT_MULTIPLIER MESON_TEST_ARGS...
  local build_dir=$1 log=$2 multiplier=$3 begin=$SECONDS
  shift 3
  say "$build_dir: testing${*:+ ($*)}"
  rm -f "$build_dir/meson-logs/$log.json"
  "${unrandomised[@]}" meson test -C "$build_dir" --no-rebuild --print-errorlogs --logbase "$log" \
    --timeout-multiplier "$multiplier" "$@" </dev/null || true # count_tests.py reads what failed
  testlogs+=("$build_dir/meson-logs/$log.json")
  say "$build_dir: tested in $((SECONDS - begin)) s"
}

source_files() { # FIND_TEST...
  find include runtime transport moe tools tests examples -type f \( "$@" \) 2>/dev/null || true # not every folder is there
}

format_is_right() { source_files -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' | xargs -r clang-format-14 --dry-run -Werror; }

# Sources of the libraries that the build compiles, since clang-tidy needs their flags.
tidy_files() {
  source_files -path 'runtime/*.cc' -o -path 'transport/*.cc' -o -path 'moe/*.cc' | while read -r file; do
    if grep -qF "$file\"" build/compile_commands.json &&
      { [[ -z $changed_since ]] || ! git diff --quiet "$changed_since" -- "$file"; }; then
      printf '%s\n' "$file"
    fi
  done
}

# clang-tidy reads a file once for each command that compiles it.
tidy_is_quiet() {
  [[ -e build/compile_commands.json ]] || return 1
  mkdir -p build/tidy
  python3 tools/distinct_compile_commands.py build/compile_commands.json build/tidy/compile_commands.json || return 1
  tidy_files | xargs -r -n 1 -P "$(nproc)" clang-tidy-14 -p build/tidy --quiet 2>/dev/null
}

install_missing "${build_packages[@]}" "${test_packages[@]}" "${lint_packages[@]}"
use_local_mpi

# Sanitizers of older compilers cannot live with the address randomisation of newer kernels.
unrandomised=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
  unrandomised=(setarch "$(uname -m)" -R)
fi
# Line numbers without the rest of the debug information, and few optimisations: half the time to compile. Kernels have
# compute-sanitizer, on machines with GPUs.
sanitizer_options=(--buildtype=plain -Dcuda=disabled -Doptimization=1 -Dc_args=-g1 -Dcpp_args=-g1 -Db_lundef=false)
export UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

if build build --buildtype=release -Dwerror=true; then
  run_tests build testlog 1
fi
if build build-asan "${sanitizer_options[@]}" -Db_sanitize=address,undefined; then
  export ASAN_OPTIONS=abort_on_error=1:detect_stack_use_after_return=1
  run_tests build-asan testlog 4 --no-suite mpi
  ASAN_OPTIONS+=:detect_leaks=0 # Open MPI leaks, from modules that it has unloaded by then
  run_tests build-asan testlog-mpi 4 --suite mpi
  unset ASAN_OPTIONS
fi
# No threads in what this leaves out.
if build build-tsan -Dtools=disabled -Dmpi=disabled "${sanitizer_options[@]}" -Db_sanitize=thread; then
  run_tests build-tsan testlog 6 --suite threads
fi

say "clang-format: comparing"
check clang-format format_is_right
say "clang-tidy: reading runtime/, transport/ and moe/${changed_since:+ (what differs from $changed_since)}"
check clang-tidy tidy_is_quiet

say "Everything took $((SECONDS / 60)) min $((SECONDS % 60)) s"
python3 tools/count_tests.py "${checks[@]/#/--check=}" "${testlogs[@]}"
