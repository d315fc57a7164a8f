#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small MoE language model in PyTorch, trained on a text with epx and, step by step beside it, with PyTorch's
all_to_all_single: from the same parameters, on the same batches. Prints both losses and step times, and draws the curves.

The two layers round differently. Where two logits of a token differ by no more than that, they select different experts, and with
a large learning rate (3e-3) the losses then part within a hundred steps, as those of any two such layers do.

torchrun --standalone --nproc-per-node 2 examples/torch_moe.py            # on GPUs where there are enough, else on CPUs
"""

import argparse
import math
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

import epx.moe
import epx.torch

MAX_DIFFERENCE = 1e-3


class NativeMoE(torch.nn.Module):
    """The layer that epx.torch.MoELayer is, on collectives of PyTorch: tokens are sorted by expert and travel by
    all_to_all_single."""

    def __init__(self, layer):
        super().__init__()
        self.top_k, self.num_experts = layer.router.top_k, layer.group.num_experts
        self.num_local, self.num_ranks = layer.group.num_local_experts, layer.group.num_ranks
        for name, parameter in layer.named_parameters():
            setattr(self, name, torch.nn.Parameter(parameter.detach().clone()))
        for parameter in self.expert_parameters():
            # They have the gradients of all ranks' tokens, which MoELayer turns into those of the mean over the ranks.
            parameter.register_hook(lambda gradient: gradient / self.num_ranks)

    def expert_parameters(self):
        return [self.first_weight, self.down_weight]

    def forward(self, tokens):
        flat = tokens.reshape(-1, tokens.shape[-1])
        weights, experts = (flat @ self.gate_weight.t()).topk(self.top_k, dim=-1)
        weights, experts = weights.softmax(-1), experts.flatten()
        order = experts.argsort(stable=True)  # routes by expert, and so by rank
        counts = torch.bincount(experts, minlength=self.num_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        received = received.view(self.num_ranks, self.num_local)
        sent_sizes = counts.view(self.num_ranks, -1).sum(1).tolist()
        received_sizes = received.sum(1).tolist()
        rows = exchange(flat[order // self.top_k], sent_sizes, received_sizes)
        # Rows have come by rank and then by expert; the experts want them by expert.
        expert = torch.arange(self.num_local, device=rows.device).repeat(self.num_ranks)
        by_expert = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(received.sum(0).tolist())
        outs = []
        for part, first, down in zip(parts, self.first_weight, self.down_weight):
            gate, up = (part @ first.t()).chunk(2, -1)
            outs.append((torch.nn.functional.silu(gate) * up) @ down.t())
        rows = exchange(torch.cat(outs)[by_expert.argsort()], received_sizes, sent_sizes)
        routes = torch.empty_like(rows).index_copy(0, order, rows).view(len(flat), self.top_k, -1)
        return (weights[..., None] * routes).sum(1).view(tokens.shape)


def exchange(rows, sent_sizes, received_sizes):
    out = rows.new_empty(sum(received_sizes), rows.shape[1])
    return all_to_all_single(out, rows, received_sizes, sent_sizes)


class Block(torch.nn.Module):
    def __init__(self, hidden, heads, moe):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.moe = moe

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Model(torch.nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self, options, layers):
        super().__init__()
        torch.manual_seed(options.seed)
        self.embedding = torch.nn.Embedding(256, options.hidden)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(options.context, options.hidden))
        self.blocks = torch.nn.ModuleList(Block(options.hidden, options.heads, layer) for layer in layers)
        self.norm, self.head = torch.nn.LayerNorm(options.hidden), torch.nn.Linear(options.hidden, 256)

    def forward(self, x):
        x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Trainer:
    def __init__(self, model, options, device):
        self.model, self.device = model.to(device), device
        experts = {parameter for block in model.blocks for parameter in block.moe.expert_parameters()}
        self.shared = [parameter for parameter in model.parameters() if parameter not in experts]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
        self.losses, self.times = [], []

    def step(self, batch):
        wait(self.device)
        dist.barrier()
        begin = time.perf_counter()
        logits = self.model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        # The mean over the ranks, of all at once. It leaves gate_weight's gradient as it is where the layer has made it the mean.
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.shared])
        dist.all_reduce(gradients)
        gradients /= dist.get_world_size()
        for parameter, gradient in zip(self.shared, gradients.split([parameter.numel() for parameter in self.shared])):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        wait(self.device)
        self.times.append(time.perf_counter() - begin)
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(total.item() / dist.get_world_size())


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def show_progress(step, steps, trainers):
    losses = ", ".join(f"{name} {trainer.losses[-1]:.4f}" for name, trainer in trainers.items())
    if sys.stderr.isatty():
        done = 30 * step // steps
        print(
            f"\r[{'#' * done}{'.' * (30 - done)}] {step}/{steps} loss: {losses} ",
            end="\n" if step == steps else "",
            file=sys.stderr,
        )
    elif step % max(steps // 10, 1) == 0:
        print(f"step {step}/{steps} loss: {losses}", file=sys.stderr, flush=True)


def draw(file, trainers):
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"{file} is not drawn: there is no matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    for width, (name, trainer) in zip((5, 1.5), trainers.items()):
        axes.plot(range(1, len(trainer.losses) + 1), trainer.losses, linewidth=width, alpha=0.8, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    print(f"{file} is drawn")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="the file to learn (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plot", default="torch_moe.png", help="where the loss curves are drawn (default: %(default)s)")
    numbers = dict(steps=200, layers=2, hidden=64, heads=4, ffn=128, experts=8, top_k=2, context=64, batch=8, seed=1)
    for name, default in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(default: %(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, which tells each process its rank")
    return options


def main():
    options = parse_options()
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    on_gpu = options.device == "cuda" or options.device == "auto" and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    group = epx.torch.Group(
        num_experts=options.experts,
        max_tokens_per_rank=options.batch * options.context,
        hidden_dim=options.hidden,
        max_top_k=options.top_k,
        max_alignment=1,
        max_token_dtype="float32",
        transport="nccl" if on_gpu else "host",
    )
    router, ffn = epx.moe.Router(options.top_k), epx.moe.Ffn(options.hidden, options.ffn)
    layers = [epx.torch.MoELayer(group, router=router, ffn=ffn, seed=options.seed + number) for number in range(options.layers)]
    trainers = {
        "epx": Trainer(Model(options, layers), options, device),
        "all_to_all_single": Trainer(Model(options, [NativeMoE(layer) for layer in layers]), options, device),
    }
    with open(options.text, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - options.context, (options.batch,), generator=generator)
        batch = torch.stack([text[start : start + options.context + 1] for start in starts]).long().to(device)
        for name in trainers if step % 2 else reversed(trainers):  # neither is always the first
            trainers[name].step(batch)
        group.check()
        if rank == 0:
            show_progress(step, options.steps, trainers)
    pairs = zip(*(trainer.losses for trainer in trainers.values()))
    difference = max(abs(one - other) / other for one, other in pairs)
    if rank == 0:
        for name, trainer in trainers.items():
            median = statistics.median(trainer.times[len(trainer.times) // 10 :])
            print(
                f"{name}: loss {trainer.losses[0]:.4f} -> {trainer.losses[-1]:.4f}, {1000 * median:.2f} ms for each step (median)"
            )
        print(f"largest relative difference of the losses: {difference:.2e} (at most {MAX_DIFFERENCE:g} is expected)")
        draw(options.plot, trainers)
    for layer in layers:
        layer.destroy()
    group.destroy()
    dist.destroy_process_group()
    return 0 if difference <= MAX_DIFFERENCE and math.isfinite(difference) else 1


if __name__ == "__main__":
    sys.exit(main())
