#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The layer that the native baselines compute: its shape, its data, and the answer in float64.

The data are a function of (seed, tensor, part, index) in 32-bit integers, the same as in tools/ep_bench/block/numbers.h and
shape.cc, so that ep_bench --block and the programs here compute the same layer and share no files. Only numpy is needed.
"""
import argparse
import dataclasses
import math

import numpy

TOKENS, LOGITS, GRAD_OUT, GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS, POPULARITY, SAMPLE = range(1, 10)
BIAS_SCALE = 0.125
MASK = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens per rank, hidden size H, inner size F, E experts, K experts a token."""
    ranks: int
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    biases: bool = False
    zipf: float = 0.0  # exponent; 0: uniform
    seed: int = 1
    bf16: bool = True  # False: float32, on the host

    def owned(self, rank):
        """Returns the first expert of a rank and how many it has, as epx divides them."""
        first = [r * (self.experts // self.ranks) + min(r, self.experts % self.ranks) for r in (rank, rank + 1)]
        return first[0], first[1] - first[0]

    def forward_flops(self):
        """Returns the operations of a rank's experts forward, 2 for each multiply and add; backward has twice as many."""
        return 6 * self.tokens * self.top_k * self.hidden * self.ffn


def add_shape_options(parser):
    for name, default, text in (("tokens", 4096, "tokens per rank, T"), ("hidden", 7168, "elements of a token, H"),
                                ("ffn", 2048, "inner size of an expert, F"), ("experts", 256, "experts of all ranks, E"),
                                ("top-k", 8, "experts of a token, K"), ("seed", 1, "seed of all data")):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--biases", action="store_true", help="the experts' projections have biases")
    parser.add_argument("--routing", default="uniform", help="uniform or zipf:S")


def shape_of(arguments, ranks):
    if arguments.routing != "uniform" and not arguments.routing.startswith("zipf:"):
        raise SystemExit(f"--routing is '{arguments.routing}'; it must be uniform or zipf:S")
    zipf = 0.0 if arguments.routing == "uniform" else float(arguments.routing.removeprefix("zipf:"))
    return Shape(ranks, arguments.tokens, arguments.hidden, arguments.ffn, arguments.experts, arguments.top_k, arguments.biases,
                 zipf, arguments.seed)


def mix32(x):
    """A bijection of 32-bit words; x is an int, or an array of uint32, whose products wrap."""
    if isinstance(x, int):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        return x ^ (x >> 16)
    x = (x ^ (x >> 16)) * numpy.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * numpy.uint32(0x846CA68B)
    return x ^ (x >> 16)


def stream_keys(seed, tensor, part):
    """Returns the two keys of a stream: a rank's part of what is per token, or one expert's of a parameter."""
    key = mix32(((seed & MASK) + 0x9E3779B9) & MASK)
    key = mix32(key ^ (seed >> 32))
    key = mix32((key + tensor) & MASK)
    first = mix32((key + part) & MASK)
    return first, mix32((first + 0x68BC21EB) & MASK)


def words(seed, tensor, part, count):
    first, second = stream_keys(seed, tensor, part)
    return mix32(mix32(numpy.arange(count, dtype=numpy.uint32) + numpy.uint32(first)) ^ numpy.uint32(second))


def sample_rows(seed, rows, count):
    """Returns `count` of the rows of a tensor, which stand for all where programs' outputs are compared; None: all of them."""
    return words(seed, SAMPLE, 0, count).astype(numpy.int64) % rows if 0 < count < rows else None


def symmetric(seed, tensor, part, count):
    """Returns float32 numbers spaced evenly in [-1, 1)."""
    integers = (words(seed, tensor, part, count) >> 8).astype(numpy.int32) - (1 << 23)
    return integers.astype(numpy.float32) * numpy.float32(2**-23)


def round_to_bf16(values):
    """Rounds float32 to the nearest bfloat16, ties to even, and returns it as float32."""
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + numpy.uint32(0x7FFF) + ((bits >> 16) & numpy.uint32(1))) & numpy.uint32(0xFFFF0000)).view(numpy.float32)


def weight_scale(fan_in):
    """Returns the power of two nearest to sqrt(3 / fan_in), which keeps the variance of a product; of two the larger."""
    return 2.0 ** math.floor(0.5 * math.log2(3 / fan_in) + 0.5)


def rounded(shape, values):
    return round_to_bf16(values) if shape.bf16 else values


def token_data(shape, tensor, rank):
    return rounded(shape, symmetric(shape.seed, tensor, rank, shape.tokens * shape.hidden)).reshape(shape.tokens, shape.hidden)


def logits(shape, rank):
    """Returns [T, E] float32: Gumbel noise minus zipf * log(1 + place), so that the K largest are draws without replacement by
    weight 1 / n^zipf; rounded down to a multiple of a power of two, to which the expert's number adds less than one step, so
    that no two are equal."""
    order = numpy.argsort(words(shape.seed, POPULARITY, 0, shape.experts), kind="stable")
    places = numpy.empty(shape.experts, dtype=numpy.int64)
    places[order] = numpy.arange(shape.experts)
    expert_step = 2.0**-19
    step = expert_step * (1 << (shape.experts - 1).bit_length())
    uniform = ((words(shape.seed, LOGITS, rank, shape.tokens * shape.experts) >> 8).astype(numpy.float64) + 0.5) * 2.0**-24
    noise = -numpy.log(-numpy.log(uniform)).reshape(shape.tokens, shape.experts) - shape.zipf * numpy.log(1.0 + places)
    return (numpy.floor(noise / step) * step + numpy.arange(shape.experts) * expert_step).astype(numpy.float32)


def topk(rank_logits, top_k):
    """Returns the experts of each token, best first, [T, K]."""
    return numpy.argsort(-rank_logits, axis=1, kind="stable")[:, :top_k]


def expert_params(shape, expert):
    """Returns an expert's gate_up [2F, H], down [H, F], and their biases or None, as float32 of which each is a bfloat16."""
    def tensor(name, sizes, scale):
        return rounded(shape, symmetric(shape.seed, name, expert, math.prod(sizes)) * numpy.float32(scale)).reshape(sizes)

    hidden, ffn = shape.hidden, shape.ffn
    biases = (None, None)
    if shape.biases:
        biases = tensor(GATE_UP_BIAS, (2 * ffn,), BIAS_SCALE), tensor(DOWN_BIAS, (hidden,), BIAS_SCALE)
    return (tensor(GATE_UP, (2 * ffn, hidden), weight_scale(hidden)), tensor(DOWN, (hidden, ffn), weight_scale(ffn)), *biases)


def reference(shape):
    """Returns the layer's outputs and gradients in float64: a list by rank of dicts by name. For small shapes."""
    ranks = range(shape.ranks)
    tokens = numpy.concatenate([token_data(shape, TOKENS, rank) for rank in ranks]).astype(numpy.float64)
    grad_out = numpy.concatenate([token_data(shape, GRAD_OUT, rank) for rank in ranks]).astype(numpy.float64)
    all_logits = numpy.concatenate([logits(shape, rank) for rank in ranks]).astype(numpy.float64)
    topk_idx = topk(all_logits, shape.top_k)
    selected = numpy.take_along_axis(all_logits, topk_idx, axis=1)
    weights = numpy.exp(selected - selected.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)

    out, grad_tokens, grad_weights = numpy.zeros_like(tokens), numpy.zeros_like(tokens), numpy.zeros_like(weights)
    params = []
    for expert in range(shape.experts):
        gate_up, down, gate_up_bias, down_bias = (None if param is None else param.astype(numpy.float64)
                                                  for param in expert_params(shape, expert))
        token, k = numpy.nonzero(topk_idx == expert)
        rows, weight = tokens[token], weights[token, k][:, None]
        pre_act = rows @ gate_up.T + (0 if gate_up_bias is None else gate_up_bias)
        gate, up = pre_act[:, : shape.ffn], pre_act[:, shape.ffn :]
        sigmoid = 1 / (1 + numpy.exp(-gate))
        inner = gate * sigmoid * up
        result = inner @ down.T + (0 if down_bias is None else down_bias)
        out[token] += weight * result  # an expert has a token once

        grad_weights[token, k] = (grad_out[token] * result).sum(axis=1)
        grad_result = weight * grad_out[token]
        grad_inner = grad_result @ down
        grad_pre_act = numpy.concatenate(
            [grad_inner * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_inner * gate * sigmoid], axis=1)
        grad_tokens[token] += grad_pre_act @ gate_up
        grads = {"grad_gate_up": grad_pre_act.T @ rows, "grad_down": grad_result.T @ inner}
        if shape.biases:
            grads |= {"grad_gate_up_bias": grad_pre_act.sum(axis=0), "grad_down_bias": grad_result.sum(axis=0)}
        params.append(grads)

    grad_selected = weights * (grad_weights - (weights * grad_weights).sum(axis=1, keepdims=True))
    grad_logits = numpy.zeros_like(all_logits)
    numpy.put_along_axis(grad_logits, topk_idx, grad_selected, axis=1)
    results = []
    for rank in ranks:
        mine = slice(rank * shape.tokens, (rank + 1) * shape.tokens)
        first, count = shape.owned(rank)
        results.append({"out": out[mine], "grad_tokens": grad_tokens[mine], "grad_logits": grad_logits[mine]}
                       | {name: numpy.stack([params[first + e][name] for e in range(count)]) for name in params[0]})
    return results


def dump(directory, layer, rank, outputs):
    """Writes a rank's outputs, as ep_bench --dump does."""
    for name, values in outputs.items():
        numpy.save(f"{directory}/{layer}.{name}.{rank}.npy", numpy.ascontiguousarray(values, dtype=numpy.float32))


def main():
    parser = argparse.ArgumentParser(description="Writes the answer in float64 for all ranks, as LAYER 'reference'.")
    add_shape_options(parser)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--dump", required=True, metavar="DIR")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the data")
    arguments = parser.parse_args()
    shape = dataclasses.replace(shape_of(arguments, arguments.ranks), bf16=arguments.dtype == "bf16")
    for rank, outputs in enumerate(reference(shape)):
        dump(arguments.dump, "reference", rank, outputs)


if __name__ == "__main__":
    main()
