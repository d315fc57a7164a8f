# SPDX-License-Identifier: Apache-2.0
# What quickstart.sh and test.sh share: say, install, configure, launch. Sourced, not run.
# shellcheck shell=bash

set -euo pipefail

source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# What building needs, as package or package:command; a tool that is there by other means than apt will do.
# shellcheck disable=SC2034  # used by the scripts that source this file
build_packages=(g++:g++ meson:meson ninja-build:ninja pkg-config:pkg-config ccache:ccache
  libopenmpi-dev openmpi-bin:mpirun libspdlog-dev libfmt-dev doctest-dev libcli11-dev nlohmann-json3-dev libeigen3-dev
  libboost-context-dev)
# What tests use besides; without it they skip.
# shellcheck disable=SC2034
test_packages=(abigail-tools:abidiff doxygen:doxygen python3-numpy python3-venv)
# For AddressSanitizer and UBSan.
# shellcheck disable=SC2034
sanitizer_packages=(clang-14:clang-14 libclang-rt-14-dev)
# One version everywhere: formatting differs from version to version.
# shellcheck disable=SC2034
lint_packages=(clang-format-14:clang-format-14 clang-tidy-14:clang-tidy-14)

say() { printf '==> %s\n' "$*"; }

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

is_installed() {
  local package=${1%%:*} command=''
  [[ $1 == *:* ]] && command=${1#*:}
  if [[ -n $command ]] && command -v "$command" >/dev/null; then return 0; fi
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]]
}

# install_missing PACKAGE[:COMMAND]...
install_missing() {
  local entry missing=() as_root=()
  if ! command -v dpkg-query >/dev/null; then
    say "Not a Debian or Ubuntu machine: install the equivalents of ${*%%:*} if the build asks for them"
    return
  fi
  for entry in "$@"; do
    is_installed "$entry" || missing+=("${entry%%:*}")
  done
  if ((${#missing[@]} == 0)); then
    say "Packages: all $# are installed"
    return
  fi
  if ((EUID != 0)); then
    as_root=(sudo)
    if ! command -v sudo >/dev/null || { [[ ! -t 0 ]] && ! sudo -n true 2>/dev/null; }; then
      die "missing packages, and neither root nor sudo to install them; ask for: apt-get install ${missing[*]}"
    fi
  fi
  say "Packages: installing ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null
}

# Puts the headers of CUTLASS where Meson looks for them, from the Python package that has them. Only nvcc needs them, and without
# them it compiles everything but the FFN on tensor cores.
# It is a subshell, so that its trap removes the download however it ends.
install_cutlass() (
  version=4.2.0 sha256=f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6
  deps=$source_root/.deps
  wheel=nvidia_cutlass-$version.0-py3-none-any.whl
  command -v nvcc >/dev/null || exit 0
  if [[ -e $deps/cutlass-$version ]]; then
    say "CUTLASS: $version is installed"
    exit 0
  fi
  mkdir -p "$deps"
  download=$(mktemp -d "$deps/download.XXXXXX")
  trap 'rm -rf "$download"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  say "CUTLASS: installing $version"
  if ! python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" "nvidia-cutlass==$version.0"; then
    say "CUTLASS: pip cannot download it; the FFN will compute without tensor cores"
    exit 0
  fi
  sha256sum --check --quiet <<<"$sha256  $download/$wheel" || die "CUTLASS: $download/$wheel is not the file that it should be"
  python3 - "$download" "$wheel" <<'END'
import sys, zipfile
download, wheel = sys.argv[1:]
with zipfile.ZipFile(f"{download}/{wheel}") as files:
    files.extractall(download, [name for name in files.namelist() if name.startswith("cutlass_library/source/include/")])
END
  # A second installer may have been quicker: -T then fails, where mv would put this one inside the other.
  mv -T "$download/cutlass_library/source" "$deps/cutlass-$version" || [[ -e $deps/cutlass-$version/include/cutlass/cutlass.h ]]
)

# Makes the virtual environment that suite python runs in, anew when its requirements have changed. Without it the suite skips.
install_python_test_packages() {
  local venv=$source_root/.deps/python requirements=$source_root/tests/python/requirements.txt
  if cmp -s "$requirements" "$venv/requirements.txt"; then
    say "Python packages of the tests: installed"
    return
  fi
  say "Python packages of the tests: installing"
  rm -rf "$venv"
  if python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"; then
    cp "$requirements" "$venv"
  else
    say "Python packages of the tests: pip cannot install them; suite python will skip"
    rm -rf "$venv"
  fi
}

# Makes the virtual environment that libepx_torch is built with and its tests run in. It takes 4.7 GB, so nothing calls this by
# itself. Without it libepx_torch is not built, and its tests skip.
install_torch_test_packages() {
  local venv=$source_root/.deps/python-torch
  python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check \
    --requirement "$source_root/tests/python/requirements-torch.txt"
}

# configure BUILD_DIR MESON_OPTION...   Sets the build directory up, or changes the options of one that is there.
configure() {
  local build_dir=$1
  shift
  local again=()
  [[ -e $build_dir/build.ninja ]] && again=(--reconfigure)
  meson setup "${again[@]}" "$build_dir" "$source_root" "$@" >"$build_dir.setup.log" 2>&1 || {
    cat "$build_dir.setup.log" >&2
    return 1
  }
  mv "$build_dir.setup.log" "$build_dir/setup.log"
}

# Lets Open MPI run more ranks than there are cores, and in a container, as whoever calls.
use_local_mpi() {
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  export OMPI_MCA_rmaps_base_oversubscribe=1   # more ranks than cores
  export OMPI_MCA_hwloc_base_binding_policy=none
  export OMPI_MCA_btl_vader_single_copy_mechanism=none # containers forbid process_vm_readv
  export OMPI_MCA_btl=self,vader
  export OMPI_MCA_mpi_yield_when_idle=1 # there are more ranks than cores, and a rank that waits polls
}
