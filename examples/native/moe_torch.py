#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An MoE layer on PyTorch's collectives: all_to_all_single with uneven splits, and torch._grouped_mm for the experts.

One process for each GPU: mpirun -n 2 python3 moe_torch.py --json out.json; without GPUs (--device cpu) it runs on gloo, for
correctness only. Rank 0 writes the times. See docs/moe.md for what is timed.
"""
import argparse
import datetime
import json
import os
import statistics
import tempfile
import time

import moe_data
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


class Layer:
    """The parameters of this rank's experts, and the layer."""

    def __init__(self, shape, rank, device):
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

    def experts(self, rows, counts):
        offsets = counts.cumsum(0).to(torch.int32)
        expert = torch.repeat_interleave(torch.arange(self.num_local, device=self.device), counts, output_size=rows.shape[0])
        pre_act = self.grouped(rows, self.gate_up, counts, offsets)
        if self.shape.biases:
            pre_act = pre_act + torch.nn.functional.embedding(expert, self.gate_up_bias)
        gate, up = pre_act.chunk(2, dim=-1)
        result = self.grouped(torch.nn.functional.silu(gate) * up, self.down, counts, offsets)
        return result + torch.nn.functional.embedding(expert, self.down_bias) if self.shape.biases else result

    def forward(self, tokens, logits):
        shape = self.shape
        selected, topk_idx = torch.topk(logits, shape.top_k, dim=-1)
        weights = torch.softmax(selected, dim=-1)

        routes = topk_idx.view(-1)
        by_expert = torch.argsort(routes, stable=True)
        counts = torch.bincount(routes, minlength=shape.experts)
        dist.all_gather_into_tensor(self.all_counts.view(-1), counts)
        all_counts = self.all_counts.cpu()  # the host waits: splits are a list of the host's
        first = shape.owned(self.rank)[0]
        arriving = all_counts[:, first:first + self.num_local]  # [P, E_l]
        sends = torch.zeros(shape.ranks, dtype=torch.int64)
        sends.index_add_(0, self.rank_of_expert_on_host, all_counts[self.rank])
        sends, receives = sends.tolist(), arriving.sum(1).tolist()
        num_rows = sum(receives)

        rows = tokens[by_expert // shape.top_k]
        received = all_to_all_single(rows.new_empty((num_rows, shape.hidden)), rows, receives, sends)
        on_device = arriving.to(self.device, non_blocking=True)
        local_expert = torch.repeat_interleave(
            torch.arange(self.num_local, device=self.device).repeat(shape.ranks), on_device.reshape(-1), output_size=num_rows)
        by_local_expert = torch.argsort(local_expert, stable=True)
        result = self.experts(received[by_local_expert], on_device.sum(0))
        leaving = torch.empty_like(result).index_copy(0, by_local_expert, result)
        returned = all_to_all_single(leaving.new_empty((routes.numel(), shape.hidden)), leaving, sends, receives)

        by_route = torch.empty_like(returned).index_copy(0, by_expert, returned)
        return torch.einsum("tkh,tk->th", by_route.view(-1, shape.top_k, shape.hidden), weights.to(by_route.dtype))


def timed(run, iterations, device, pause_s=0.0):
    """Returns the time of each iteration in microseconds, the slowest rank's; a barrier of the streams precedes each."""
    on_gpu = device.type == "cuda"
    warmup = 1 if pause_s else 5
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


def figures(times, paused, shape, products):
    median = statistics.median(times)
    return {"median_us": median, "min_us": min(times), "p99_us": sorted(times)[-max(1, len(times) // 100)],
            "paused_us": statistics.median(paused) if paused else None,
            "tflops": products * shape.forward_flops() / median / 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    moe_data.add_shape_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--store", help="a file that all ranks can reach and that does not exist; default: of mpirun's job")
    parser.add_argument("--iters", type=int, default=20, help="timed iterations; 0: none")
    parser.add_argument("--pause-ms", type=int, default=0, help="measure again with this pause before each iteration")
    parser.add_argument("--json", help="file for the times")
    parser.add_argument("--dump", metavar="DIR", help="directory for the outputs and gradients, as of ep_bench --dump")
    arguments = parser.parse_args()

    rank, ranks = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default)) for name, default in (("RANK", 0), ("SIZE", 1)))
    job = os.environ.get("OMPI_MCA_ess_base_jobid", os.environ.get("PMIX_NAMESPACE", os.getpid()))
    store = arguments.store or f"{tempfile.gettempdir()}/moe_torch.{job}"
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    options = {}
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
        options = {"device_id": device}
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
                            world_size=ranks, timeout=datetime.timedelta(seconds=120), **options)
    shape = moe_data.shape_of(arguments, ranks)
    layer = Layer(shape, rank, device)
    layer.rank_of_expert_on_host = layer.rank_of_expert.cpu()
    tokens, grad_out = (torch.from_numpy(moe_data.token_data(shape, name, rank)).to(device, torch.bfloat16)
                        for name in (moe_data.TOKENS, moe_data.GRAD_OUT))
    logits = torch.from_numpy(moe_data.logits(shape, rank)).to(device)
    tokens.requires_grad_()
    logits.requires_grad_()
    leaves = {"tokens": tokens, "logits": logits, **layer.parameters}

    def forward():
        with torch.no_grad():
            return layer.forward(tokens, logits)

    def forward_backward():
        for leaf in leaves.values():
            leaf.grad = None
        out = layer.forward(tokens, logits)
        out.backward(grad_out)
        return out

    if arguments.dump:
        outputs = {"out": forward_backward()} | {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
        moe_data.dump(arguments.dump, "torch", rank, {name: x.detach().float().cpu().numpy() for name, x in outputs.items()})
    lines = {}
    if arguments.iters > 0:
        for name, run, products in (("fwd", forward, 1), ("fwd+bwd", forward_backward, 3)):
            times = timed(run, arguments.iters, device)
            paused = timed(run, max(arguments.iters // 4, 5), device, arguments.pause_ms / 1e3) if arguments.pause_ms else []
            lines[name] = figures(times, paused, shape, products)
    if rank == 0:
        for name, line in lines.items():
            print(f"torch {name}: {line['median_us']:.1f} us, {line['tflops']:.1f} TFLOP/s")
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump({"program": "torch", "version": torch.__version__, "ranks": ranks, "lines": lines}, file, indent=2)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0 and os.path.exists(store):
        os.unlink(store)


if __name__ == "__main__":
    main()
