# SPDX-License-Identifier: Apache-2.0
"""The C snippets of a page, and how a test makes a program of them."""
import argparse
import pathlib
import re
import subprocess

LIMIT_S = 60


def arguments_of(description):
    """The command line of such a test: the page, the library, the folder of headers, the compiler."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("--page", "--library", "--include"):
        parser.add_argument(name, required=True)
    parser.add_argument("--cc", nargs="+", required=True)
    return parser.parse_args()


def snippets_of(page):
    """Returns the lines of each."""
    text = pathlib.Path(page).read_text(encoding="utf-8")
    return [found.splitlines() for found in re.findall(r"^```c\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)]


def compile_program(text, arguments, directory):
    """Returns the path of the program, which is warned about nothing."""
    source = pathlib.Path(directory) / "program.c"
    source.write_text(text, encoding="utf-8")
    program = str(source.with_suffix(""))
    folder = str(pathlib.Path(arguments.library).resolve().parent)
    subprocess.run([*arguments.cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", arguments.include, str(source), "-o", program,
                    arguments.library, f"-Wl,-rpath,{folder}"], check=True, timeout=LIMIT_S)
    return program
