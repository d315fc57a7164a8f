#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a build below a temporary directory and uses it as an installed library: headers alone, then a C11 program that finds
# epx through pkg-config only, run by one process and by two, and a C++20 program.
#   install_test.sh BUILD_DIR PREFIX LIBDIR SANITIZERS    (CC and CXX in the environment)
set -euo pipefail

readonly build_dir=$1 prefix=$2 libdir=$3 sanitizers=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly limit_s=60

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf -- '-- %s\n' "$*"; }

# Both may have several words, as "ccache cc".
read -ra cc <<<"${CC:-cc}"
read -ra cxx <<<"${CXX:-c++}"
strict=(-Wall -Wextra -Werror -pedantic)
# A library that was built with a sanitizer needs a program that was built with it, too.
[[ $sanitizers == none ]] || strict+=("-fsanitize=$sanitizers")
# Clang links the part of UBSan that C++ needs, and that libepx then needs too, into C++ programs only.
cxx_runtime=()
if [[ $sanitizers == *undefined* && $("${cc[@]}" --version) == *clang* ]]; then
  cxx_runtime=(-fsanitize-link-c++-runtime -lstdc++)
fi

step "install to $prefix below a DESTDIR"
root=$work/root
meson install -C "$build_dir" --no-rebuild --destdir "$root" >"$work/install.log" || {
  cat "$work/install.log"
  exit 1
}
installed_lib=$root$prefix/$libdir
export LD_LIBRARY_PATH=$installed_lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# pkg-config sees the installed .pc files only, since a user of libepx needs none of the packages that libepx is built with.
export PKG_CONFIG_LIBDIR=$installed_lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
unset PKG_CONFIG_PATH
step "pkg-config --cflags --libs epx"
read -ra flags <<<"$(pkg-config --cflags --libs epx)"
printf '   %s\n' "${flags[@]}"
read -ra compile_flags <<<"$(pkg-config --cflags epx)" # compilers may warn about libraries where they link nothing
version=$(pkg-config --modversion epx)

step "the pages that headers and errors name"
ls "$root$prefix"/share/doc/epx/{api,scaling,troubleshooting}.md

step "epx.h alone, as C11 and as C++17"
printf '#include <epx/epx.h>\n' | tee "$work/header.c" >"$work/header.cc"
"${cc[@]}" -std=c11 "${strict[@]}" -c "$work/header.c" -o "$work/header_c.o" "${compile_flags[@]}"
"${cxx[@]}" -std=c++17 "${strict[@]}" -c "$work/header.cc" -o "$work/header_cc.o" "${compile_flags[@]}"

step "a C11 program against version $version"
"${cc[@]}" -std=c11 "${strict[@]}" "$here/consumer.c" -o "$work/consumer" "${flags[@]}" "${cxx_runtime[@]}"

step "epx.hpp alone, and a C++20 program"
printf '#include <epx/epx.hpp>\n' >"$work/header.cc"
"${cxx[@]}" -std=c++20 "${strict[@]}" -Wconversion -c "$work/header.cc" -o "$work/header_cc.o" "${compile_flags[@]}"
"${cxx[@]}" -std=c++20 "${strict[@]}" -Wconversion "$here/consumer.cc" -o "$work/consumer_cc" "${flags[@]}"

if [[ -e $root$prefix/include/epx/epx_moe.h ]]; then
  step "epx_moe.h alone, as C11 and as C++17, and a C11 program"
  read -ra moe_flags <<<"$(pkg-config --cflags --libs epx-moe)"
  read -ra moe_compile_flags <<<"$(pkg-config --cflags epx-moe)"
  printf '#include <epx/epx_moe.h>\n' | tee "$work/header.c" >"$work/header.cc"
  "${cc[@]}" -std=c11 "${strict[@]}" -c "$work/header.c" -o "$work/header_c.o" "${moe_compile_flags[@]}"
  "${cxx[@]}" -std=c++17 "${strict[@]}" -c "$work/header.cc" -o "$work/header_cc.o" "${moe_compile_flags[@]}"
  "${cc[@]}" -std=c11 "${strict[@]}" "$here/consumer_moe.c" -o "$work/consumer_moe" "${moe_flags[@]}" "${cxx_runtime[@]}"
  timeout "$limit_s" "$work/consumer_moe"

  step "epx_moe.hpp alone"
  printf '#include <epx/epx_moe.hpp>\n' >"$work/header.cc"
  "${cxx[@]}" -std=c++20 "${strict[@]}" -Wconversion -c "$work/header.cc" -o "$work/header_cc.o" "${moe_compile_flags[@]}"
fi

step "one process"
mkdir "$work/rendezvous"
timeout "$limit_s" "$work/consumer_cc" "$work/rendezvous"
timeout "$limit_s" "$work/consumer" "$work/rendezvous" 0 1 "$version"

step "two processes"
timeout "$limit_s" "$work/consumer" "$work/rendezvous" 0 2 "$version" &
first=$!
status=0
timeout "$limit_s" "$work/consumer" "$work/rendezvous" 1 2 "$version" || status=$?
wait "$first" || status=$?

step "nothing is left behind"
leftover=$(ls -A "$work/rendezvous")
if [[ -n $leftover ]]; then
  printf 'the rendezvous directory still holds: %s\n' "$leftover"
  status=1
fi
exit "$status"
