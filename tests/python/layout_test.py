# SPDX-License-Identifier: Apache-2.0
"""The ctypes definitions against the C headers, by a C compiler: sizes, offsets, values of enumerations, prototypes.

layout_test.py INCLUDE_DIRECTORY COMPILER...
"""

import ctypes
import subprocess
import sys

import ranks

ranks.require("numpy")
from epx import _moe_structs, _structs


def assertions():
    for struct in _structs.STRUCTS + _moe_structs.STRUCTS:
        name = struct._c_name_
        yield f"sizeof({name}) == {ctypes.sizeof(struct)}", f"sizeof({name})"
        for field, *_ in struct._fields_:
            descriptor = getattr(struct, field)
            yield f"offsetof({name}, {field}) == {descriptor.offset}", f"{name}.{field}"
            yield f"sizeof((({name}*)0)->{field}) == {descriptor.size}", f"the size of {name}.{field}"
    for prefix, enum in _structs.ENUMS + _moe_structs.ENUMS:
        for member in enum:
            yield f"{prefix}{member.name} == {member.value}", f"{prefix}{member.name}"
    for status in _structs.Status:
        name = "EPX_SUCCESS" if status == 0 else f"EPX_ERROR_{status.name}"
        yield f"{name} == {status.value}", name
    for name, code in _structs.DTYPES.items():
        c_name = f"EPX_{name.removesuffix('fn').removesuffix('fnu').upper()}"
        yield f"{c_name} == {code}", c_name
    for name in ("MAX_EVENT_KINDS", "MAX_REPORTED_RANKS", "MAX_MESSAGE_BYTES", "MAX_SLICES"):
        yield f"EPX_{name} == {getattr(_structs, name)}", f"EPX_{name}"


def check(text):
    include, *compiler = sys.argv[1:]
    return subprocess.run(
        [*compiler, "-std=c11", "-I", include, "-x", "c", "-fsyntax-only", "-"], input=text, text=True, capture_output=True
    ).stderr


def main():
    lines = ["#include <stddef.h>", "#include <epx/epx.h>", "#include <epx/epx_moe.h>"]
    wanted = list(assertions())
    lines += [f'_Static_assert({condition}, "{what}");' for condition, what in wanted]
    problems = check("\n".join(lines))
    print(f"{len(wanted)} assertions\n{problems}")
    # The assertions can fail.
    assert "seven" in check("\n".join(lines + ['_Static_assert(sizeof(epx_layer) == 7, "seven");']))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
