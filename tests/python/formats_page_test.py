# SPDX-License-Identifier: Apache-2.0
"""The Python snippets of docs/row-formats.md run as they stand, and give the rows of the definitions. formats_page_test.py PAGE
numpy"""

import re
import sys

import ranks

ranks.require("numpy")
import numpy

CONFIG = dict(num_experts=4, max_tokens_per_rank=4, hidden_dim=256, max_top_k=1, max_token_dtype="float32")


def run_numpy(program):
    ranks.require("ml_dtypes")
    import format_model
    import ml_dtypes

    import epx

    tokens = numpy.random.default_rng(1).standard_normal((4, 256)).astype(numpy.float32)
    with epx.Group(epx.bootstrap.local(), transport="host", **CONFIG) as group:
        plan = group.prepare(numpy.arange(4)[:, None])
        codes, scales = format_model.parts_of(epx.RowFormat("block128"), tokens)
        names = dict(epx=epx, group=group, plan=plan, tokens=tokens, topk_weights=numpy.ones((4, 1), numpy.float32))
        names.update(tokens_fp8=codes.view(ml_dtypes.float8_e4m3fn), token_scales=scales)
        exec(program, names)
        for received in ((names["rows"], names["scales"]), names["again"]):
            numpy.testing.assert_array_equal(received[0].view(numpy.uint8), codes)
            numpy.testing.assert_array_equal(received[1], scales)
        numpy.testing.assert_array_equal(names["wide"], format_model.round_trip(names["on_wire"], tokens))
        group.check()


with open(sys.argv[1], encoding="utf-8") as page:
    programs = re.findall(r"```python\n(.*?)```", page.read(), flags=re.DOTALL)
run_numpy(programs[0])
