# SPDX-License-Identifier: Apache-2.0
"""epx.torch beside torch.distributed: groups of process groups and of meshes, and data parallelism on another axis of the mesh
than experts: DistributedDataParallel and fully_shard (FSDP2), compared with a dense model in float64. Needs an even number of
ranks; with two, one axis of the mesh has a single rank, and both cases are tested."""

import time
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch_model import EP_SIZES, HIDDEN, INNER, ON_GPU, RANK, RANKS, config, mesh, on_device

import epx
import epx.moe
import epx.torch

TOKENS = 4


def setUpModule():
    torch_model.start_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def tearDownModule():
    torch.distributed.destroy_process_group()


def make_layer(group, **options):
    return epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER), seed=4, **options)


def dense_gradients():
    """Gradients of the mean over all ranks of each rank's loss, by a layer that has all experts on one rank: gate_weight,
    first_weight, down_weight, of all experts."""
    with epx.torch.Group(epx.bootstrap.local(), **config(transport="host")) as alone:
        layer = make_layer(alone)
        parameters = {name: each.detach().double().requires_grad_() for name, each in layer.named_parameters()}
        loss = 0
        for rank in range(RANKS):
            out = torch_model.dense_block(layer, tokens_of(rank).double(), parameters, torch.ones(TOKENS, dtype=torch.bool))
            loss = loss + out.sin().sum() / RANKS
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))


def tokens_of(rank):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


class Distributed(unittest.TestCase):
    def check_gradients(self, layer, found, tolerance=1e-4):
        wanted = dense_gradients()
        first, local = layer.group.first_local_expert, layer.group.num_local_experts
        for name, grad in found.items():
            expected = wanted[name] if name == "gate_weight" else wanted[name][first : first + local]
            torch.testing.assert_close(
                grad.double().cpu(), expected, rtol=tolerance, atol=tolerance / 10, msg=lambda m: f"{name}: {m}"
            )

    def test_1_process_groups(self):
        for number in range(2):
            with epx.torch.Group(**config()) as group:  # the default process group
                self.assertEqual((group.rank, group.num_ranks), (RANK, RANKS))
                idx = on_device(torch.full((1, 1), number))
                plan = epx.torch.prepare(group, idx)
                rows, _ = epx.torch.dispatch(plan, on_device(torch.full((1, HIDDEN), float(RANK))))
                owner = group.first_local_expert <= number < group.first_local_expert + group.num_local_experts
                self.assertEqual(rows[:, 0].tolist(), [float(rank) for rank in range(RANKS)] if owner else [])
        for ep in EP_SIZES:
            with epx.torch.Group(mesh(ep)["ep"].get_group(), **config()) as group:
                self.assertEqual((group.rank, group.num_ranks), (RANK % ep, ep))
                group.check()
        first = torch.distributed.new_group([0])  # of which one rank alone makes a group
        if RANK == 0:
            epx.torch.Group(first, **config()).destroy()
        with epx.torch.Group(**config()) as group:
            self.assertEqual(group.num_ranks, RANKS)

    def test_2_rank_that_does_not_come(self):
        with epx.torch.from_process_group() as bootstrap:
            if RANK == 1:
                time.sleep(1.5)
            else:
                with self.assertRaisesRegex(epx.Error, r"ranks \[1\]") as caught:
                    epx.Group(bootstrap, **config(timeout=0.5, transport="host"))
                self.assertEqual(caught.exception.status, epx.Status.TIMEOUT)
        torch.distributed.barrier()

    def test_3_ddp(self):
        for ep in EP_SIZES:
            self.check_ddp(mesh(ep))

    def check_ddp(self, axes):
        with epx.torch.Group(axes["ep"].get_group(), **config()) as group:
            layer = make_layer(group)
            model = torch.nn.Sequential(layer)
            names = epx.torch.expert_parameter_names(model)
            self.assertEqual(names, ["0.first_weight", "0.down_weight"])
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
            parallel = DistributedDataParallel(model)
            epx.torch.average_gradients(layer.expert_parameters(), axes["dp"].get_group())
            parallel(on_device(tokens_of(RANK))).sin().sum().backward()
            self.check_gradients(layer, {name: each.grad for name, each in layer.named_parameters()})
            layer.destroy()
            group.check()

    def test_4_fsdp(self):
        for ep in EP_SIZES:
            self.check_fsdp(mesh(ep))

    def check_fsdp(self, axes):
        with epx.torch.Group(axes["ep"].get_group(), **config()) as group:
            layer = make_layer(group)
            fully_shard(layer, mesh=axes["dp"])
            for _ in range(2):
                layer.zero_grad()
                layer(on_device(tokens_of(RANK))).sin().sum().backward()
            found = {}
            for name, each in layer.named_parameters():
                self.assertIsInstance(each, DTensor)
                found[name] = each.grad.full_tensor()
            self.check_gradients(layer, found)
            layer.destroy()
            group.check()

    def test_5_fsdp_of_half_precision(self):
        """FSDP2 shards parameters of one dtype together, so it leaves out the router's, which is float32."""
        if not ON_GPU:
            self.skipTest("the host transport has layers of float32 alone")
        for ep in EP_SIZES:
            axes = mesh(ep)
            with epx.torch.Group(axes["ep"].get_group(), **config()) as group:
                layer = make_layer(group, dtype=torch.bfloat16)
                fully_shard(layer, mesh=axes["dp"], ignored_params={layer.gate_weight})
                epx.torch.average_gradients(layer.gate_weight, axes["dp"].get_group())
                layer(on_device(tokens_of(RANK)).bfloat16()).float().sin().sum().backward()
                found = {"gate_weight": layer.gate_weight.grad}
                for name in ("first_weight", "down_weight"):
                    found[name] = getattr(layer, name).grad.full_tensor()
                self.check_gradients(layer, found, tolerance=0.1)
                layer.destroy()
                group.check()

    def test_6_fsdp_in_fp8(self):
        """Calls quantise the weights that FSDP2 has gathered, step after step, as those of a layer that is not sharded."""
        hidden = 128
        sizes = dict(hidden_dim=hidden, max_token_dtype="float32", combine_precision="exact")
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        options = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(hidden, 128), recipe="fp8", dtype=dtype, seed=6)
        generator = torch.Generator().manual_seed(200 + RANK)
        tokens = on_device(torch.randn(TOKENS, hidden, generator=generator).to(dtype))
        for ep in EP_SIZES:
            axes = mesh(ep)
            with epx.torch.Group(axes["ep"].get_group(), **config(**sizes)) as group:
                sharded, plain = (epx.torch.MoELayer(group, **options) for _ in range(2))
                fully_shard(sharded, mesh=axes["dp"], ignored_params={sharded.gate_weight})
                epx.torch.average_gradients(plain.expert_parameters(), axes["dp"].get_group())
                optimizers = [torch.optim.SGD(layer.expert_parameters(), lr=0.5) for layer in (sharded, plain)]
                outs = []
                for _ in range(3):
                    outs.append([])
                    for layer, optimizer in zip((sharded, plain), optimizers):
                        optimizer.zero_grad()
                        outs[-1].append(layer(tokens))
                        outs[-1][-1].float().sin().sum().backward()
                        optimizer.step()
                    one, other = outs[-1]
                    self.assertLess((one - other).float().norm(), 0.05 * other.float().norm())
                self.assertGreater((outs[2][1] - outs[0][1]).float().norm(), 0.5 * outs[0][1].float().norm())
                self.assertIsInstance(sharded.first_weight, DTensor)
                ranks.refused(self, "first_weight is a DTensor, which is sharded", sharded.quantise_parameters)
                sharded.destroy(), plain.destroy()
                group.check()


if __name__ == "__main__":
    if RANKS < 2 or RANKS % 2:
        print(f"skipped: {RANKS} ranks")
        raise SystemExit(ranks.SKIPPED)
    torch_model.main()
