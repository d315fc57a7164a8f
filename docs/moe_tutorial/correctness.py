# SPDX-License-Identifier: Apache-2.0
"""Compares the outputs and gradients that the programs have dumped with the answer in float64, and with each other."""
import pathlib
import sys

import numpy

from programs import NATIVE

sys.path.insert(0, str(NATIVE))
import moe_data  # noqa: E402  (found by the line before)


def read(directory, layer, tensor, ranks):
    files = [pathlib.Path(directory) / f"{layer}.{tensor}.{rank}.npy" for rank in range(ranks)]
    return [numpy.load(file).astype(numpy.float64) for file in files] if all(map(pathlib.Path.exists, files)) else None


def distance(values, others):
    """Returns the largest difference of any element of any rank."""
    return max(float(numpy.abs(a - b).max()) if a.shape == b.shape else float("inf") for a, b in zip(values, others))


def compare(case, ranks, directory, layers, bf16):
    """Returns by tensor its largest element, and by layer the distances from the answer and from the block."""
    shape = moe_data.Shape(ranks, case.tokens, case.hidden, case.ffn, case.experts, case.top_k, case.biases,
                           0.0 if case.routing == "uniform" else float(case.routing.removeprefix("zipf:")), bf16=bf16)
    answer = moe_data.reference(shape)
    tensors = {}
    for tensor in answer[0]:
        expected = [of_rank[tensor] for of_rank in answer]
        block = read(directory, "block", tensor, ranks)
        entry = {"largest": max(float(numpy.abs(x).max()) for x in expected), "layers": {}}
        for layer in layers:
            values = read(directory, layer, tensor, ranks)
            if values is None:
                continue
            entry["layers"][layer] = {"from_reference": distance(values, expected),
                                      "from_block": None if block is None else distance(values, block)}
        tensors[tensor] = entry
    return tensors


def differences(ranks, directory):
    """Returns {layer: {tensor: its largest difference from the block's, divided by the block's largest element}}."""
    names = sorted({tuple(file.name.split(".")[:2]) for file in pathlib.Path(directory).glob("*.0.npy")})
    found = {}
    for layer, tensor in names:
        block, values = read(directory, "block", tensor, ranks), read(directory, layer, tensor, ranks)
        if layer == "block" or block is None or values is None:
            continue
        largest = max(float(numpy.abs(part).max()) for part in block)
        found.setdefault(layer, {})[tensor] = distance(values, block) / largest if largest > 0 else float("inf")
    return found
