#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a small Meson project that has epx as its subproject, without epx's tools and tests, and runs its program.
#   subproject_test.sh EPX_SOURCE_DIR WORK_DIR    (always the same WORK_DIR lets ccache help)
set -euo pipefail

readonly source_dir=$1 work=$2
rm -rf "$work"
mkdir -p "$work/parent/subprojects"
ln -s "$source_dir" "$work/parent/subprojects/epx"
cat >"$work/parent/meson.build" <<'MESON'
project('parent', 'c', default_options: ['c_std=c11', 'warning_level=3', 'werror=true'])
epx_dep = dependency('epx', fallback: 'epx', default_options: ['tools=disabled', 'tests=disabled', 'mpi=disabled',
  'moe=disabled', 'cuda=disabled'])
test('parent', executable('parent', 'parent.c', dependencies: epx_dep))
MESON
cat >"$work/parent/parent.c" <<'C'
#include <epx/epx.h>

int main(void) {
  return epx_version() == EPX_VERSION_MAJOR * 10000 + EPX_VERSION_MINOR * 100 + EPX_VERSION_PATCH ? 0 : 1;
}
C

# An epx that is installed on this machine must not stand in for the subproject. Several sources are one translation unit, since
# that each compiles alone, the build that this is a test of has shown.
meson setup --buildtype=plain --unity=on --unity-size=6 --wrap-mode=forcefallback "$work/build" "$work/parent" >"$work/setup.log" || {
  cat "$work/setup.log"
  exit 1
}
ninja -C "$work/build" >"$work/build.log" || {
  cat "$work/build.log"
  exit 1
}
if compgen -G "$work/build/subprojects/epx/tests/*" >/dev/null || compgen -G "$work/build/subprojects/epx/tools/*" >/dev/null; then
  echo 'tests or tools were built although they are disabled'
  exit 1
fi
meson test -C "$work/build" --no-rebuild --print-errorlogs
