#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Edits 0.1's epx.h in ways that the rules of growth allow or forbid, and looks whether compare_abi.py tells them apart. A library
whose functions do nothing stands in for libepx, since only symbols and types are compared. Exits with 77 where libabigail's
tools are not installed."""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

from compare_abi import differences, require_tools


def swap(one, other):
    return [(one, "SWAPPED"), (other, one), ("SWAPPED", other)]


LATER_PREPARE = [("} epx_prepare_args;", "int64_t later; } epx_prepare_args;")]
LATER_REPORT = [("} epx_group_report;", "int64_t later; } epx_group_report;")]
VERSION = "EPX_API int32_t epx_version(void);"

# The edits, as (text, what it becomes)...; a text occurs once.
ALLOWED = {
    "nothing": [],
    "args get a field at the end": LATER_PREPARE,
    "args get two fields at the end": [("} epx_combine_args;", "int32_t later; int32_t reserved0; } epx_combine_args;")],
    "a plan gets a field at the end": [("} epx_memory_plan;", "int64_t later; } epx_memory_plan;")],
    "the report gets a field at the end": LATER_REPORT,
    "a config gets a field out of reserved": [("int64_t reserved[6];", "int64_t later; int64_t reserved[5];")],
    "a bootstrap gets a field out of reserved": [("void* reserved[3];", "void* later; void* reserved[2];")],
    "there is a new function": [(VERSION, VERSION + "\nEPX_API int32_t epx_later(void);")],
    "there is a new enumerator": [("EPX_OP_MEM_FREE = 7", "EPX_OP_MEM_FREE = 7, EPX_OP_LATER = 8")],
}
FORBIDDEN = {
    "two fields of args change places": swap("const epx_tensor* counts;", "const epx_tensor* offsets;"),
    "two fields of args change places, and there is one more":
        swap("const epx_tensor* counts;", "const epx_tensor* offsets;") + LATER_PREPARE,
    "args get a field in the middle": [("const epx_tensor* counts;", "int64_t later; const epx_tensor* counts;")],
    "args lose a field": [("const epx_tensor* global_counts;", "")],
    "a field of args moves to the end": [("const epx_tensor* global_counts;", ""),
                                         ("} epx_prepare_args;", "const epx_tensor* global_counts; } epx_prepare_args;")],
    "a field of args has another type": [("const epx_tensor* grad_topk_weights;", "int64_t grad_topk_weights;")],
    "two fields of an output change places": swap("int32_t max_top_k;\n", "int32_t max_alignment;\n"),
    "a field of an output has another type": [("int64_t scratch_bytes;", "double scratch_bytes;")],
    "an output has another type, and one more field":
        [("uint64_t first_event_sequence;", "int64_t first_event_sequence;")] + LATER_REPORT,
    "the report has room for more ranks": [("EPX_MAX_REPORTED_RANKS = 64", "EPX_MAX_REPORTED_RANKS = 128")],
    "the report has room for a longer message": [("EPX_MAX_MESSAGE_BYTES = 1024", "EPX_MAX_MESSAGE_BYTES = 2048")],
    "a layer grows": [("} epx_layer;", "int64_t later; } epx_layer;")],
    "a tensor grows": [("} epx_tensor;", "int64_t later; } epx_tensor;")],
    "a config grows": [("} epx_group_config;", "int64_t later; } epx_group_config;")],
    "a bootstrap grows": [("} epx_bootstrap;", "void* later; } epx_bootstrap;")],
    "a field of a config that is not reserved is used again": [("int32_t color;", "float color;")],
    "an enumerator has another value": [("EPX_OP_COMBINE = 3", "EPX_OP_COMBINE = 13")],
    "an enumerator is gone": [("EPX_PHASE_ARRIVE = 1,", "")],
    "a function is gone": [(VERSION, "")],
    "a function has one more parameter": [("epx_mem_free(epx_group group, void* ptr)",
                                           "epx_mem_free(epx_group group, void* ptr, int32_t later)")],
    "a callback has one more parameter": [("(*release)(void* context)", "(*release)(void* context, int32_t later)")],
}


def edited(header, edits):
    for text, becomes in edits:
        if header.count(text) != 1:
            sys.exit(f"'{text}' occurs {header.count(text)} times in the header")
        header = header.replace(text, becomes)
    return header


def compile_stub(header, folder, arguments):
    """A library with every function that the header declares."""
    headers = folder / "include"
    (headers / "epx").mkdir(parents=True)
    (headers / "epx" / "epx.h").write_text(header, encoding="utf-8")
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    definitions = [f"{each} {{ __builtin_trap(); }}\n" for each in re.findall(r"^EPX_API ([^;]+);", code, flags=re.MULTILINE)]
    source = folder / "stub.cc"
    source.write_text('#include "epx/epx.h"\n' + "".join(definitions), encoding="utf-8")
    library = folder / "libstub.so"
    subprocess.run([*arguments.compiler, "-g", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{arguments.soname}",
                    f"-Wl,--version-script={arguments.version_script}", "-o", library, source], check=True, timeout=60)
    return library, headers


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("dump", "header", "suppressions", "version-script"):
        parser.add_argument("--" + name, required=True, type=pathlib.Path)
    parser.add_argument("--soname", required=True)
    parser.add_argument("--compiler", required=True, nargs="+")
    arguments = parser.parse_args()
    require_tools()
    header = arguments.header.read_text(encoding="utf-8")

    wrong = 0
    for is_allowed, table in ((True, ALLOWED), (False, FORBIDDEN)):
        for name, edits in table.items():
            with tempfile.TemporaryDirectory() as name_of_folder:
                folder = pathlib.Path(name_of_folder)
                library, headers = compile_stub(edited(header, edits), folder, arguments)
                found = differences(arguments.dump, library, headers, arguments.suppressions, folder)
            print(f"{'differs' if found else 'fits   '}  {name}")
            if is_allowed == bool(found):
                wrong += 1
                print(f"It has to {'fit' if is_allowed else 'differ'}. {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
