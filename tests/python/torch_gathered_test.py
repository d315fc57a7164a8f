# SPDX-License-Identifier: Apache-2.0
"""MoELayer whose experts' weights FSDP2 gathers in FP8: its bits beside those of wide weights that are gathered and
quantised, its training beside that of weights that are not sharded, and the bytes that are gathered. The program of the
page runs as it stands: torch_gathered_test.py PAGE. Needs an even number of ranks; with two, one axis of the mesh has a
single rank, and both cases are tested. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import contextlib
import io
import re
import sys
import unittest
import unittest.mock

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torch_model import DEVICE, EP_SIZES, ON_GPU, RANK, RANKS, config, count_calls, mesh, on_device

import epx
import epx.moe
import epx.torch
from epx.torch._block import quantised
from epx.torch._gathered import transposes_of

EXPERTS, HIDDEN, INNER = 8, 256, 256
TOKENS = 16
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # of tokens
STEPS = 3
NAMES = "first_weight", "down_weight"

with open(sys.argv.pop(1), encoding="utf-8") as page:
    PROGRAM = re.search(r"```python\n(.*?)```", page.read().split("### FSDP2 in FP8")[1], flags=re.DOTALL)[1]


def setUpModule():
    torch_model.start_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def tearDownModule():
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def group_on(axes, **changes):
    sizes = dict(num_experts=EXPERTS, hidden_dim=HIDDEN, combine_precision="exact")
    with epx.torch.Group(axes["ep"].get_group(), **config(**{**sizes, **changes})) as group:
        yield group
        group.check()


def make_layer(group, recipe="fp8", **options):
    sizes = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(group.hidden_dim, INNER), dtype=DTYPE, seed=6)
    layer = epx.torch.MoELayer(group, recipe=recipe, **{**sizes, **options})
    return layer.float()  # masters


def shard(layer, axes, dim=0, **options):
    """Shards experts' weights alone, so that all gathered bytes are theirs. Forward and backward gather them."""
    placement = {"shard_placement_fn": lambda _: Shard(dim)} if dim else {}
    options = {**dict(reshard_after_forward=True, ignored_params={layer.gate_weight}), **placement, **options}
    return fully_shard(layer, mesh=axes["dp"], **options)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return on_device(torch.randn(TOKENS, HIDDEN, generator=generator).to(DTYPE))


def steps(layer, call=None, make_optimizer=torch.optim.AdamW):
    """The outputs of a few steps of an optimizer, and the gradients and weights after them, of this rank's shards."""
    optimizer = make_optimizer(layer.expert_parameters(), lr=0.02)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = (call or layer)(batch(step))
        found.append(out.detach())
        out.float().sin().sum().backward()
        found += [each.grad for each in layer.expert_parameters()]
        optimizer.step()
        found += [each.detach().clone() for each in layer.expert_parameters()]
    return found


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class CountBytes:
    """The bytes that a rank gives to all-gathers."""

    def __enter__(self):
        self.num_bytes, self.num_calls = 0, 0
        gather = torch.distributed.all_gather_into_tensor

        def counted(output_tensor, input_tensor, *args, **options):
            self.num_bytes += input_tensor.numel() * input_tensor.itemsize
            self.num_calls += 1
            return gather(output_tensor, input_tensor, *args, **options)

        self._patch = unittest.mock.patch("torch.distributed.all_gather_into_tensor", counted)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


class Gathered(unittest.TestCase):
    def assert_same(self, found, wanted):
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            one, other = whole(one), whole(other)
            self.assertEqual(one.dtype, other.dtype)
            self.assertTrue(
                torch.equal(one.view(torch.uint8), other.view(torch.uint8)), f"{number}: {one.dtype} {list(one.shape)}"
            )

    def test_1_codes(self):
        """Codes and scales are those of the whole weights, quantised, and transposed those of their transposes."""
        for ep in EP_SIZES:
            axes = mesh(ep)
            with group_on(axes) as group:
                plain = make_layer(group)
                for dim in (0, 1, 2):
                    layer = shard(make_layer(group), axes, dim)
                    layer.gather_in_fp8()
                    for _ in range(2):
                        layer.unshard()
                        for one, other in zip(layer.expert_parameters(), plain.expert_parameters(), strict=True):
                            codes, scales = one.codes, one.scales
                            self.assert_same((codes, scales), quantised(group.number, [other], False))
                            self.assert_same(transposes_of((codes, scales)), quantised(group.number, [other], True))
                            self.assertEqual((one.shape, one.dtype), (other.shape, other.dtype))
                        layer.reshard()
                    layer.destroy()
                plain.destroy()

    def test_2_bits(self):
        """The bits of weights that are gathered wide and quantised: outputs, gradients and weights, step after step."""
        for ep in EP_SIZES:
            axes = mesh(ep)
            with group_on(axes) as group:
                for options in (dict(recipe="fp8"), dict(recipe="fp8", recompute=True), dict(recipe="fp8_activations")):
                    for dim in (0, 1, 2):
                        with self.subTest(ep=ep, dim=dim, **options):
                            self.check_bits(group, axes, dim, options)

    def check_bits(self, group, axes, dim, options):
        narrow, wide = (shard(make_layer(group, **options), axes, dim) for _ in range(2))
        narrow.gather_in_fp8()
        with count_calls() as calls:
            found = steps(narrow)
        # Each rank quantises its shard, once for each gathering.
        self.assertEqual(calls["quantise_weights"], STEPS * 2 * len(NAMES))
        self.assert_same(found, steps(wide))
        for each in narrow.expert_parameters():
            self.assertIsInstance(each, DTensor)
            self.assertEqual((each.dtype, each.placements), (torch.float32, (Shard(dim),)))
        narrow.destroy(), wide.destroy()

    def test_3_unsharded(self):
        """Training is that of a layer that is not sharded."""
        for ep in EP_SIZES:
            axes = mesh(ep)
            with group_on(axes) as group:
                for dim in (0, 1):
                    narrow, plain = shard(make_layer(group), axes, dim), make_layer(group)
                    narrow.gather_in_fp8()
                    epx.torch.average_gradients(plain.expert_parameters(), axes["dp"].get_group())
                    found, wanted = (steps(layer, make_optimizer=torch.optim.SGD) for layer in (narrow, plain))
                    self.assertTrue(torch.equal(found[0], wanted[0]))
                    for one, other in zip(found, wanted, strict=True):
                        one, other = whole(one).float(), other.float()
                        self.assertGreater(other.norm().item(), 0)
                        self.assertLessEqual(((one - other).norm() / other.norm()).item(), 1e-3)
                    narrow.destroy(), plain.destroy()

    def test_4_bytes(self):
        for ep in EP_SIZES:
            axes = mesh(ep)
            with group_on(axes) as group:
                for dim in (0, 1):
                    num_bytes = {}
                    for is_narrow in (True, False):
                        layer = shard(make_layer(group).bfloat16(), axes, dim)
                        if is_narrow:
                            layer.gather_in_fp8()
                        with CountBytes() as count, torch.no_grad():
                            layer(batch(0))
                        num_bytes[is_narrow] = count.num_bytes
                        num_weights = sum(each.to_local().numel() for each in layer.expert_parameters())
                        layer.destroy()
                    if axes["dp"].size() > 1:
                        self.assertEqual(num_bytes[False], 2 * num_weights)
                        self.assertEqual(num_bytes[True], num_weights + 4 * num_weights // 128**2)
                        self.assertLess(num_bytes[True], 0.51 * num_bytes[False])

    def test_5_whole_layer(self):
        """Two layers with the router's weights beside the experts', a module around them, and gradients that add up."""
        for ep in EP_SIZES:
            axes = mesh(ep)
            with group_on(axes) as group:
                for reshards in (True, False):
                    found = []
                    for is_narrow in (True, False):
                        torch.manual_seed(3)
                        layers = [make_layer(group, seed=seed) for seed in (1, 2)]
                        model = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, 8, device=DEVICE, dtype=DTYPE))
                        names = dict(fully_shard=fully_shard, mesh=axes, moe_layers=layers, model=model, torch=torch)
                        program = PROGRAM.replace('["dp"]', f'["dp"], reshard_after_forward={reshards}', 1)
                        exec(program if is_narrow else program.replace("layer.gather_in_fp8()", "pass"), names)
                        for step in range(4):
                            if step % 2 == 0:
                                names["optimizer"].zero_grad()
                            out = model(batch(step))
                            out.float().sin().sum().backward()
                            if step % 2:
                                names["optimizer"].step()
                        found.append(
                            [out.detach(), *[tensor for each in model.parameters() for tensor in (each.grad, each)]]
                        )
                    self.assert_same(*found)
                    self.assertGreater(whole(layers[0].down_weight.grad).norm().item(), 0)

    def test_6_mixed_precision(self):
        """Shards are quantised as they are, and gradients have the dtype of the policy while they are reduced."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for ep in EP_SIZES:
            axes = mesh(ep)
            with group_on(axes) as group:
                mixed, other = shard(make_layer(group), axes, mp_policy=policy), shard(make_layer(group), axes)
                mixed.gather_in_fp8(), other.gather_in_fp8()
                for layer in (mixed, other):
                    out = layer(batch(0))
                    out.float().sin().sum().backward()
                with torch.no_grad():
                    self.assertTrue(torch.equal(mixed(batch(1)), other(batch(1))))
                for one, exact in zip(mixed.expert_parameters(), other.expert_parameters(), strict=True):
                    self.assertEqual(one.grad.dtype, torch.float32)
                    one, exact = whole(one.grad), whole(exact.grad)
                    self.assertLess((one - exact).norm().item(), 0.01 * exact.norm().item())
                mixed.destroy(), other.destroy()

    def test_7_checkpoint_and_state(self):
        axes = mesh(EP_SIZES[0])
        with group_on(axes) as group:
            narrow, other = (shard(make_layer(group), axes) for _ in range(2))
            narrow.gather_in_fp8(), other.gather_in_fp8()
            wanted = steps(narrow)
            found = steps(other, lambda tokens: checkpoint(other, tokens, use_reentrant=False))
            self.assert_same(found, wanted)
            # Masters alone are in the state, which a reader without epx can load.
            state = {name: each.to_local() for name, each in narrow.state_dict().items() if name in NAMES}
            self.assertEqual({(type(each), each.dtype) for each in state.values()}, {(torch.Tensor, torch.float32)})
            file = io.BytesIO()
            torch.save({name: each.clone() for name, each in state.items()}, file)
            file.seek(0)
            for name, each in torch.load(file, weights_only=True).items():
                self.assertTrue(torch.equal(each, getattr(narrow, name).to_local()))
            third = shard(make_layer(group, seed=9), axes)
            third.gather_in_fp8()
            with torch.no_grad():
                third(batch(7))
            third.load_state_dict(narrow.state_dict())
            with torch.no_grad():
                self.assertTrue(torch.equal(third(batch(7)), narrow(batch(7))))
            for layer in (narrow, other, third):
                layer.destroy()

    def test_8_replicas_of_shards(self):
        axes = init_device_mesh(DEVICE.type, (RANKS // 2, 2), mesh_dim_names=("replicas", "shards"))
        sizes = dict(num_experts=4, hidden_dim=HIDDEN, combine_precision="exact")
        with epx.torch.Group(epx.bootstrap.local(), **config(**sizes)) as group:
            for dim in (0, 1):
                found = []
                for is_narrow in (True, False):
                    layer = make_layer(group)
                    fully_shard(
                        layer,
                        mesh=axes,
                        ignored_params={layer.gate_weight},
                        reshard_after_forward=True,
                        shard_placement_fn=lambda _: Shard(dim),
                    )
                    if is_narrow:
                        layer.gather_in_fp8()
                    found.append(steps(layer))
                    layer.destroy()
                self.assert_same(*found)
            group.check()

    def test_9_refusals(self):
        axes = mesh(EP_SIZES[0])
        num_shards = axes["dp"].size()
        with group_on(axes) as group:
            layer = make_layer(group, "wide")
            ranks.refused(self, "the layer was created with recipe wide", layer.gather_in_fp8)
            layer.destroy()
            layer = make_layer(group)
            ranks.refused(
                self, "first_weight is not sharded: call gather_in_fp8() after fully_shard()", layer.gather_in_fp8
            )
            shard(layer, axes)
            layer.gather_in_fp8()
            layer.double()  # which replaces the shards
            layer.float()
            ranks.refused(
                self, "first_weight has not been gathered in FP8: call gather_in_fp8() again", lambda: layer(batch(0))
            )
            layer.destroy()
            layer = shard(make_layer(group), axes)
            layer.gather_in_fp8()
            layer.unshard()
            ranks.refused(self, "first_weight has been gathered in FP8", layer.quantise_parameters)
            ranks.refused(self, "of which there are codes and scales alone", lambda: layer.down_weight.sum())
            self.assertIn("GatheredWeights", repr(layer.down_weight))
            layer.reshard()
            with self.assertRaisesRegex(Exception, "weights gathered in FP8 are not supported under torch.compile"):
                torch.compile(layer, backend="eager")(batch(0))
            layer.destroy()
        if num_shards == 1:
            return
        with group_on(axes, hidden_dim=128 * (num_shards - 1)) as group:  # which are the rows of down_weight
            layer = make_layer(group)
            sizes = [group.num_local_experts, group.hidden_dim, INNER]
            fully_shard(layer, mesh=axes["dp"], ignored_params={layer.gate_weight}, shard_placement_fn=lambda _: Shard(1))
            words = (
                f"down_weight is {sizes}, sharded along dimension 1 over {num_shards} ranks: "
                f"shards of {sizes[1] // num_shards} cut blocks of 128"
            )
            ranks.refused(self, words, layer.gather_in_fp8)
            layer.destroy()
        with group_on(axes, num_experts=(num_shards + 1) * axes["ep"].size()) as group:
            layer = shard(make_layer(group), axes)
            words = f"dimension 0 over {num_shards} ranks: {num_shards + 1} experts are no multiple of {num_shards}; shard"
            ranks.refused(self, words, layer.gather_in_fp8)
            layer.destroy()


if __name__ == "__main__":
    if RANKS < 2 or RANKS % 2:
        print(f"skipped: {RANKS} ranks")
        raise SystemExit(ranks.SKIPPED)
    torch_model.main()
