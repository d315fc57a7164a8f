#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An MoE layer on PyTorch's collectives: all_to_all_single with uneven splits, and torch._grouped_mm for the experts.

Three variants are measured. `torch-usual` permutes rows by indexing, as is usual; autograd makes a sorted scatter-add of its
backward. `torch-best` permutes by index_select, whose backward it writes as index_select by the inverse permutation, counts
without bincount, which waits for the device, has torch.compile fuse SwiGLU, and sums the gradients of biases by a product.
`torch-fp8` has experts in FP8, without biases, and dispatches FP8 rows: moe_torch_fp8.py. On GPUs it needs torchao.

One process for each GPU: mpirun -n 2 python3 moe_torch.py --json out.json; without GPUs (--device cpu) it runs on gloo, for
correctness only. Rank 0 writes the times. See docs/moe.md for what is timed.
"""
import argparse
import dataclasses
import datetime
import functools
import os
import pathlib
import tempfile
import time

import moe_data
import moe_measure
import moe_torch_fp8
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single


def int32_words(seed, tensor, part, count, device):
    """moe_data.words() in torch, which has no arithmetic in uint32: 64-bit products are masked."""
    def mix32(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & moe_data.MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & moe_data.MASK
        return x ^ (x >> 16)

    first, second = moe_data.stream_keys(seed, tensor, part)
    return mix32(mix32((torch.arange(count, dtype=torch.int64, device=device) + first) & moe_data.MASK) ^ second)


def parameter(shape, tensor, experts, sizes, scale, device):
    """Returns the tensor of this rank's experts, [E_l, *sizes], in bfloat16."""
    values = torch.empty((len(experts), *sizes), dtype=torch.bfloat16, device=device)
    for local, expert in enumerate(experts):
        words = int32_words(shape.seed, tensor, expert, values[local].numel(), device)
        values[local] = (((words >> 8) - (1 << 23)).to(torch.float32) * (2.0**-23 * scale)).view(sizes)
    return values.requires_grad_()


class Permute(torch.autograd.Function):
    """rows[index], where index is a permutation."""

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.inverse = inverse
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.inverse), None, None


class Expand(torch.autograd.Function):
    """tokens[by_expert // K], where by_expert is a permutation of all T * K routes."""

    @staticmethod
    def forward(ctx, tokens, by_expert, inverse, top_k):
        ctx.inverse, ctx.sizes = inverse, (tokens.shape[0], top_k, tokens.shape[1])
        return tokens.index_select(0, by_expert // top_k)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.inverse).view(ctx.sizes).sum(1), None, None, None


class AddBias(torch.autograd.Function):
    """rows + bias[expert]; the gradient of the bias is a product with a matrix of zeros and ones."""

    @staticmethod
    def forward(ctx, rows, bias, expert):
        ctx.expert, ctx.num_experts = expert, bias.shape[0]
        return rows + bias.index_select(0, expert)

    @staticmethod
    def backward(ctx, grad):
        one_hot = torch.nn.functional.one_hot(ctx.expert, ctx.num_experts).to(grad.dtype)
        return grad, one_hot.t() @ grad, None


def add_bias(rows, bias, expert):
    return rows + torch.nn.functional.embedding(expert, bias)


def inverse_of(permutation):
    return torch.empty_like(permutation).scatter_(0, permutation, torch.arange(permutation.numel(), device=permutation.device))


def swiglu(pre_act):
    gate, up = pre_act.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@dataclasses.dataclass
class Routing:
    """What the logits select. A row is sent for each of the T * K routes, in the order of experts. Rows arrive in the order
    of source ranks, then of experts."""
    weights: torch.Tensor  # [T, K]
    by_expert: torch.Tensor  # [T * K], the route of each row that is sent
    by_route: torch.Tensor  # [T * K], the row of each route; None for `usual`
    counts: torch.Tensor  # [P, E_l], rows from each rank for each expert of this one
    counts_on_host: torch.Tensor
    sends: list  # rows to each rank
    receives: list  # rows from each rank


class Layer:
    """The parameters of this rank's experts, and the layer."""

    def __init__(self, shape, rank, device, compiles):
        self.fused_swiglu = torch.compile(swiglu, dynamic=False) if compiles else swiglu
        self.shape, self.rank, self.device = shape, rank, device
        first, self.num_local = shape.owned(rank)
        experts = range(first, first + self.num_local)
        hidden, ffn = shape.hidden, shape.ffn
        self.gate_up = parameter(shape, moe_data.GATE_UP, experts, (2 * ffn, hidden), moe_data.weight_scale(hidden), device)
        self.down = parameter(shape, moe_data.DOWN, experts, (hidden, ffn), moe_data.weight_scale(ffn), device)
        self.parameters = {"gate_up": self.gate_up, "down": self.down}
        if shape.biases:
            self.gate_up_bias = parameter(shape, moe_data.GATE_UP_BIAS, experts, (2 * ffn,), moe_data.BIAS_SCALE, device)
            self.down_bias = parameter(shape, moe_data.DOWN_BIAS, experts, (hidden,), moe_data.BIAS_SCALE, device)
            self.parameters |= {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        owned = [shape.owned(r) for r in range(shape.ranks)]
        self.rank_of_expert = torch.tensor([r for r, (_, count) in enumerate(owned) for _ in range(count)], device=device)
        self.all_counts = torch.empty((shape.ranks, shape.experts), dtype=torch.int64, device=device)

    def grouped(self, rows, weights, counts, offsets):
        """rows @ weights[e].T for the rows of each expert e."""
        if rows.is_cuda:
            return torch._grouped_mm(rows, weights.transpose(1, 2), offs=offsets)
        return torch.cat([part @ weight.T for part, weight in zip(rows.split(counts.tolist()), weights)])

    def experts(self, rows, counts, is_best):
        biased = AddBias.apply if is_best else add_bias
        offsets = counts.cumsum(0).to(torch.int32)
        pre_act = self.grouped(rows, self.gate_up, counts, offsets)
        if self.shape.biases:
            expert = torch.repeat_interleave(torch.arange(self.num_local, device=self.device), counts,
                                             output_size=rows.shape[0])
            pre_act = biased(pre_act, self.gate_up_bias, expert)
        result = self.grouped((self.fused_swiglu if is_best else swiglu)(pre_act), self.down, counts, offsets)
        return biased(result, self.down_bias, expert) if self.shape.biases else result

    def route(self, logits, is_best):
        """Returns the Routing; the host waits for the counts of all ranks."""
        shape = self.shape
        selected, topk_idx = torch.topk(logits, shape.top_k, dim=-1)
        weights = torch.softmax(selected, dim=-1)

        routes = topk_idx.view(-1)
        by_expert = torch.argsort(routes, stable=True)
        if is_best:
            counts = torch.zeros(shape.experts, dtype=torch.int64, device=self.device)
            counts.scatter_add_(0, routes, torch.ones_like(routes))
        else:
            counts = torch.bincount(routes, minlength=shape.experts)  # the host waits for the largest index
        dist.all_gather_into_tensor(self.all_counts.view(-1), counts)
        all_counts = self.all_counts.cpu()  # the host waits: splits are a list of the host's
        first = shape.owned(self.rank)[0]
        arriving = all_counts[:, first:first + self.num_local]
        sends = torch.zeros(shape.ranks, dtype=torch.int64)
        sends.index_add_(0, self.rank_of_expert_on_host, all_counts[self.rank])
        return Routing(weights, by_expert, inverse_of(by_expert) if is_best else None,
                       self.all_counts[:, first:first + self.num_local], arriving, sends.tolist(), arriving.sum(1).tolist())

    def forward(self, tokens, logits, is_best):
        shape, routing = self.shape, self.route(logits, is_best)
        by_expert, by_route, sends, receives = routing.by_expert, routing.by_route, routing.sends, routing.receives
        num_rows = sum(receives)

        rows = Expand.apply(tokens, by_expert, by_route, shape.top_k) if is_best else tokens[by_expert // shape.top_k]
        received = all_to_all_single(rows.new_empty((num_rows, shape.hidden)), rows, receives, sends)
        local_expert = torch.repeat_interleave(
            torch.arange(self.num_local, device=self.device).repeat(shape.ranks), routing.counts.reshape(-1),
            output_size=num_rows)
        by_local_expert = torch.argsort(local_expert, stable=True)
        counts = routing.counts.sum(0)
        if is_best:
            by_arrival = inverse_of(by_local_expert)
            result = self.experts(Permute.apply(received, by_local_expert, by_arrival), counts, True)
            leaving = Permute.apply(result, by_arrival, by_local_expert)
        else:
            result = self.experts(received[by_local_expert], counts, False)
            leaving = torch.empty_like(result).index_copy(0, by_local_expert, result)
        returned = all_to_all_single(leaving.new_empty((by_expert.numel(), shape.hidden)), leaving, sends, receives)

        home = (Permute.apply(returned, by_route, by_expert) if is_best
                else torch.empty_like(returned).index_copy(0, by_expert, returned))
        return torch.einsum("tkh,tk->th", home.view(-1, shape.top_k, shape.hidden), routing.weights.to(home.dtype))


def timed(run, iterations, device, pause_s=0.0):
    """Returns the time of each iteration in microseconds, the slowest rank's; a barrier of the streams precedes each."""
    on_gpu = device.type == "cuda"
    warmup = 0 if pause_s else 5
    token = torch.zeros(1, device=device)
    events, times = [], []
    for _ in range(warmup + iterations):
        if pause_s:
            if on_gpu:
                torch.cuda.synchronize()
            time.sleep(pause_s)
        dist.all_reduce(token)
        if on_gpu:
            events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            events[-1][0].record()
            run()
            events[-1][1].record()
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
    if on_gpu:
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1e3 for begin, end in events]
    slowest = torch.tensor(times[warmup:], dtype=torch.float64, device="cpu" if not on_gpu else device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    moe_data.add_shape_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--store", help="a file that all ranks can reach and that does not exist; default: of mpirun's job")
    moe_measure.add_options(parser)
    arguments = parser.parse_args()

    rank, ranks = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default)) for name, default in (("RANK", 0), ("SIZE", 1)))
    job = os.environ.get("OMPI_MCA_ess_base_jobid", os.environ.get("PMIX_NAMESPACE", os.getpid()))
    store = arguments.store or f"{tempfile.gettempdir()}/moe_torch.{job}"
    pacer = moe_measure.Pacer(arguments.paced)
    pacer.begin()
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    options = {}
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
        options = {"device_id": device}
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
                            world_size=ranks, timeout=datetime.timedelta(seconds=120), **options)
    shape = moe_data.shape_of(arguments, ranks)
    layer = Layer(shape, rank, device, arguments.device == "cuda")
    layer.rank_of_expert_on_host = layer.rank_of_expert.cpu()
    tokens, grad_out = (parameter(shape, name, [rank], (shape.tokens, shape.hidden), 1.0, device).detach()[0]
                        for name in (moe_data.TOKENS, moe_data.GRAD_OUT))
    logits = torch.from_numpy(moe_data.logits(shape, rank)).to(device)
    tokens.requires_grad_()
    logits.requires_grad_()
    leaves = {"tokens": tokens, "logits": logits, **layer.parameters}

    def forward(variant):
        with torch.no_grad():
            return variant(tokens, logits)

    def forward_backward(variant):
        for leaf in leaves.values():
            leaf.grad = None
        out = variant(tokens, logits)
        out.backward(grad_out)
        return out

    def lines(variant):
        return {"fwd": lambda iterations, pause_s: timed(lambda: forward(variant), iterations, device, pause_s),
                "fwd+bwd": lambda iterations, pause_s: timed(lambda: forward_backward(variant), iterations, device,
                                                             pause_s)}

    variants = {"torch-usual": functools.partial(layer.forward, is_best=False),
                "torch-best": functools.partial(layer.forward, is_best=True)}
    versions, notes = {"torch": torch.__version__}, {}
    without_fp8 = moe_torch_fp8.left_out(shape, device)
    if without_fp8:
        notes["left_out"] = {"torch-fp8": without_fp8}
        if rank == 0:
            print(f"torch-fp8 is left out, since {without_fp8}")
    else:
        fp8 = moe_torch_fp8.Fp8Layer(layer)
        variants["torch-fp8"] = fp8.forward
        notes["candidates_us"] = {"torch-fp8": fp8.take_fastest(
            lambda: min(timed(lambda: forward_backward(fp8.forward), 3, device)))}
        versions |= moe_torch_fp8.versions(device)
    for variant in variants.values():
        forward(variant)
        forward_backward(variant)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    pacer.end()
    layers = moe_measure.measure_in_rounds(arguments, pacer, {name: lines(variant) for name, variant in variants.items()},
                                           shape)
    pacer.begin()
    for name, variant in variants.items() if arguments.dump else ():
        outputs = {"out": forward_backward(variant)} | {f"grad_{key}": leaf.grad for key, leaf in leaves.items()}
        for tensor, value in outputs.items():
            rows = moe_measure.dumped_rows(shape, value.shape, arguments)
            if rows is not None:
                value = value.reshape(-1, value.shape[-1])[torch.from_numpy(rows).to(device)]
            moe_data.dump(arguments.dump, name, rank, {tensor: value.detach().float().cpu().numpy()})
    if rank == 0:
        if arguments.device == "cuda":
            versions |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        moe_measure.report(arguments.json, "torch", versions, shape, layers, **notes)
    dist.barrier()
    pacer.end()
    dist.destroy_process_group()
    pathlib.Path(store).unlink(missing_ok=True)  # PyTorch may have removed it


if __name__ == "__main__":
    main()
