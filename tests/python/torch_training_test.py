# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/python.md that train, as they stand there, for 20 steps on several ranks: their parameters are those of
a dense model that one rank trains in float64 on the tokens of all ranks. torch_training_test.py PAGE. Needs an even number of
ranks; with two, one axis of the mesh has a single rank, and both cases are tested. On GPUs with EPX_TEST_DEVICE=cuda, see
ranks.py."""

import re
import sys
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_model import DEVICE, EXPERTS, HIDDEN, INNER, ON_GPU, RANK, RANKS, config, on_device

import epx
import epx.moe
import epx.torch

STEPS = 20
EP_SIZES = [2] if RANKS >= 4 else [1, 2]
# AdamW hides the scale of a gradient, and SGD shows it.
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.2)}

with open(sys.argv.pop(1), encoding="utf-8") as page:
    after = page.read().split("## Ten lines: PyTorch")[1]
TEN_LINES = re.search(r"```python\n(.*?)```", after, flags=re.DOTALL)[1]
MESH, *RECIPES = re.findall(
    r"```python\n(.*?)```", after.split("### Data parallelism")[1].split("\n### ")[0], flags=re.DOTALL
)


def setUpModule():
    torch_model.start_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def tearDownModule():
    torch.distributed.destroy_process_group()


def with_optimizer(program, name):
    """The program with another optimizer in place of AdamW."""
    assert program.count("torch.optim.AdamW(") == 1
    return program.replace("torch.optim.AdamW(", f"OPTIMIZERS[{name!r}](")


def dense_parameters(layer):
    """Those of a layer that has the experts of all ranks, in float64."""
    return {name: each.detach().double().cpu().requires_grad_() for name, each in layer.named_parameters()}


def local_part(group, name, whole):
    """This rank's part of a parameter of the dense layer."""
    first, local = group.first_local_expert, group.num_local_experts
    return whole if name == "gate_weight" else whole[first : first + local]


class Model(torch.nn.Module):
    """Two layers between dense parts, whose gradients come through the layers and through the router's loss."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.last = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        router, ffn = epx.moe.Router(2, aux_loss_coeff=0.05), epx.moe.Ffn(HIDDEN, INNER)
        self.layers = torch.nn.ModuleList(
            epx.torch.MoELayer(group, router=router, ffn=ffn, bias=True, seed=seed) for seed in (1, 2)
        )
        self.to(group.device)

    def forward(self, tokens):
        tokens = self.first(tokens).tanh()
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return self.last(tokens)


def balance_loss(layer, tokens, gate_weight):
    """The load-balance loss of tokens, which those of a group are."""
    logits = tokens @ gate_weight.t()
    counts = torch.bincount(logits.topk(layer.router.top_k).indices.flatten(), minlength=EXPERTS)
    scale = EXPERTS * layer.router.aux_loss_coeff / (layer.router.top_k * len(tokens) ** 2)
    return scale * (logits.softmax(-1).sum(0) * counts).sum()


class Training(unittest.TestCase):
    def compare(self, name, found, wanted, start, tolerance=1e-3):
        """Compares how far the steps have moved a parameter, in norms, which no single rounded element decides."""
        found = found.full_tensor() if isinstance(found, DTensor) else found
        found, wanted = found.detach().double().cpu() - start, wanted - start
        self.assertGreater(wanted.norm().item(), 1e-3, name)
        self.assertLess(((found - wanted).norm() / wanted.norm()).item(), tolerance, name)

    def test_1_ten_lines(self):
        for optimizer in OPTIMIZERS:
            self.check_ten_lines(optimizer)

    def check_ten_lines(self, optimizer):
        hidden = 32

        def batch(rank, step):
            """Tokens and their targets, with another T on each rank and in each step; each rank has steps without tokens."""
            generator = torch.Generator().manual_seed(1000 * step + rank)
            count = 0 if step % 5 == rank else 2 + (3 * step + rank) % 5
            return [torch.randn(count, hidden, generator=generator) for _ in range(2)]

        names = {"OPTIMIZERS": OPTIMIZERS, "batches": [[on_device(x) for x in batch(RANK, step)] for step in range(STEPS)]}
        program = TEN_LINES.replace("torch.distributed.init_process_group()", "")
        program = program.replace("512", str(hidden)).replace("1024", "48")  # float64 on few cores takes minutes else
        exec(with_optimizer(program, optimizer), names)
        layer, group = names["layer"], names["group"]
        with epx.torch.Group(
            epx.bootstrap.local(),
            **config(num_experts=8, max_tokens_per_rank=1, hidden_dim=hidden, transport="host"),
        ) as alone:
            dense = epx.torch.MoELayer(alone, router=layer.router, ffn=layer.ffn)
            parameters = dense_parameters(dense)
            start = {name: each.detach().clone() for name, each in parameters.items()}
            steps = OPTIMIZERS[optimizer](list(parameters.values()))
            for step in range(STEPS):
                tokens, target = (torch.cat(each).double() for each in zip(*(batch(rank, step) for rank in range(RANKS))))
                out = torch_model.dense_block(dense, tokens, parameters, torch.ones(len(tokens)))
                steps.zero_grad()
                (out - target).pow(2).mean().backward()
                steps.step()
        for name, each in layer.named_parameters():
            wanted = [local_part(group, name, whole[name].detach()) for whole in (parameters, start)]
            self.compare(name, each, *wanted, tolerance=1e-2 if optimizer == "AdamW" else 1e-3)
        gates = [torch.empty_like(layer.gate_weight) for _ in range(RANKS)]
        torch.distributed.all_gather(gates, layer.gate_weight.detach())
        for gate in gates:
            torch.testing.assert_close(gate, gates[0], rtol=0, atol=0)
        layer.destroy()
        group.destroy()

    def test_2_recipes(self):
        self.assertEqual(len(RECIPES), 4)
        for ep in EP_SIZES:
            for number, recipe in enumerate(RECIPES):
                with self.subTest(ep=ep, recipe=recipe):
                    self.check_recipe(ep, recipe)

    def check_recipe(self, ep, recipe):
        count = 6  # tokens of each rank and step

        def batch(rank, step):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            return torch.randn(count, HIDDEN, generator=generator), torch.randn(count, HIDDEN, generator=generator)

        names = {
            "torch": torch,
            "epx": epx,
            "init_device_mesh": init_device_mesh,
            "fully_shard": fully_shard,
            "DDP": DistributedDataParallel,
            "OPTIMIZERS": OPTIMIZERS,
            "device_type": DEVICE.type,
            "dp": RANKS // ep,
            "ep": ep,
            "config": config(),
        }
        exec(MESH, names)
        group = names["group"]
        own = Model(group)
        names.update(model=own, moe_layers=list(own.layers))
        exec(with_optimizer(recipe, "SGD"), names)
        model, optimizer = names["model"], names["optimizer"]
        for step in range(STEPS):
            tokens, target = map(on_device, batch(RANK, step))
            optimizer.zero_grad()
            (model(tokens) - target).pow(2).mean().backward()
            optimizer.step()
            group.check()
        with epx.torch.Group(epx.bootstrap.local(), **config(transport="host")) as alone:
            self.compare_with_dense(ep, own, Model(alone), batch)
        for layer in own.layers:
            layer.destroy()
        group.destroy()

    def compare_with_dense(self, ep, own, dense, batch):
        parts = {name: dense_parameters(getattr(dense, name)) for name in ("first", "last")}
        layers = [dense_parameters(layer) for layer in dense.layers]
        everything = [each for part in (*parts.values(), *layers) for each in part.values()]
        start = [each.detach().clone() for each in everything]
        optimizer = OPTIMIZERS["SGD"](everything)
        for step in range(STEPS):
            tokens, target = (torch.cat(each).double() for each in zip(*(batch(rank, step) for rank in range(RANKS))))
            optimizer.zero_grad()
            x, loss = torch.nn.functional.linear(tokens, *parts["first"].values()).tanh(), 0
            for layer, parameters in zip(dense.layers, layers):
                for tokens_of_group in x.chunk(RANKS // ep):  # each on its own balances its experts
                    loss = loss + balance_loss(layer, tokens_of_group, parameters["gate_weight"]) / (RANKS // ep)
                x = x + torch_model.dense_block(layer, x, parameters, torch.ones(len(x)))
            out = torch.nn.functional.linear(x, *parts["last"].values())
            (loss + (out - target).pow(2).mean()).backward()
            optimizer.step()
        found = [each for part in (own.first, own.last, *own.layers) for each in part.named_parameters()]
        self.assertEqual(len(found), len(everything))
        for index, (name, each) in enumerate(found):
            wanted, first = everything[index].detach(), start[index]
            if index >= 4 and name != "gate_weight":
                wanted, first = (local_part(own.layers[0].group, name, whole) for whole in (wanted, first))
            self.compare(f"{index} {name}", each, wanted, first)


if __name__ == "__main__":
    if RANKS < 2 or RANKS % 2:
        print(f"skipped: {RANKS} ranks")
        raise SystemExit(ranks.SKIPPED)
    torch_model.main()
