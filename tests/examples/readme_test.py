#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the C program of README.md as it stands, in a function main that looks at the group which it has created, and runs it
on two ranks."""
import subprocess
import sys
import tempfile

import c_page

PROGRAM = """#include <stdio.h>
#include <stdlib.h>
{includes}
int main(int argc, char** argv) {{
  const int rank = atoi(argv[argc - 1]), num_ranks = 2;
{statements}
  epx_group_info info = {{.struct_size = sizeof(info)}};
  if (epx_group_query(group, &info) != EPX_SUCCESS) return 1;
  printf("%d of %d experts\\n", info.num_local_experts, info.num_experts);
  epx_group_destroy(group);
  epx_bootstrap_free(&bootstrap);
  return 0;
}}
"""


def main():
    arguments = c_page.arguments_of(__doc__)
    lines = c_page.snippets_of(arguments.page)[0]
    with tempfile.TemporaryDirectory(prefix="epx_readme.") as directory:
        # Runs of this test beside each other must not meet.
        statements = [line.replace('"/tmp"', f'"{directory}"') for line in lines if not line.startswith("#include")]
        if statements == [line for line in lines if not line.startswith("#include")]:
            sys.exit("the program's directory is not \"/tmp\" any more: adapt this test")
        includes = "\n".join(line for line in lines if line.startswith("#include"))
        text = PROGRAM.format(includes=includes, statements="\n".join(statements))
        program = c_page.compile_program(text, arguments, directory)
        processes = [subprocess.Popen([program, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        try:
            outputs = [process.communicate(timeout=c_page.LIMIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if outputs != ["16 of 32 experts\n"] * 2:
        sys.exit(f"the ranks have printed {outputs}")


if __name__ == "__main__":
    main()
