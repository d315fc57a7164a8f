# SPDX-License-Identifier: Apache-2.0
"""What the tests of epx.torch share: devices, groups, and dense models in float64 that see the data of all ranks."""

import collections
import contextlib
import os
import pathlib
import time

import ranks
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import epx
import epx.torch

RANK, RANKS = ranks.rank(), ranks.num_ranks()
ON_GPU = ranks.on_gpu()
DEVICE = torch.device("cuda", ranks.gpu()) if ON_GPU else torch.device("cpu")
EXPERTS, HIDDEN, INNER = 5, 8, 6
EP_SIZES = [2] if RANKS >= 4 else [1, 2]  # of the meshes of tests with several axes
torch.set_num_threads(1)
_numbers = iter(range(1_000_000))


def main():
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    ranks.main()


def mesh(ep):
    """All ranks on the axes dp and ep, of `ep` ranks."""
    return init_device_mesh(DEVICE.type, (RANKS // ep, ep), mesh_dim_names=("dp", "ep"))


def start_process_group(backend, **options):
    """torch.distributed's default group of the ranks under epx_test_launch, which leaves no file behind."""
    file = pathlib.Path(os.environ["EPX_TEST_DIR"], "port")
    if RANK == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
    else:
        while not file.exists():
            time.sleep(0.01)
        store = torch.distributed.TCPStore("127.0.0.1", int(file.read_text()), RANKS, is_master=False)
    torch.distributed.init_process_group(backend, store=store, rank=RANK, world_size=RANKS, **options)
    torch.distributed.barrier()
    if RANK == 0:
        file.unlink()


def on_device(tensor):
    return tensor.to(DEVICE)


def single(tensor):
    """A copy in float32 on the device, which has no gradient yet."""
    return tensor.detach().to(DEVICE, torch.float32, copy=True)


def wait():
    """On a GPU, waits for what has been enqueued there."""
    if ON_GPU:
        torch.cuda.synchronize()


def config(**changes):
    default = dict(
        num_experts=EXPERTS,
        max_tokens_per_rank=32,
        hidden_dim=HIDDEN,
        max_top_k=3,
        max_alignment=16,
        max_token_dtype="float32",
        transport="nccl" if ON_GPU else "host",
        timeout=ranks.TIMEOUT_SECONDS,
    )
    return {**default, **changes}


def make_group(**changes):
    with ranks.directory_bootstrap(f"torch-{next(_numbers)}") as bootstrap:
        return epx.torch.Group(bootstrap, **config(**changes))


class Data:
    """topk_idx, tokens and weights of each rank, and a matrix for each expert. What has gradients is float64, and has the
    values that tensors of `dtype` have."""

    def __init__(self, num_tokens, top_k, seed, masked=0.2, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.idx, self.tokens, self.weights = [], [], []
        for count in num_tokens:
            idx = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :top_k]
            self.idx.append(torch.where(torch.rand(idx.shape, generator=generator) < masked, -1, idx))
            self.tokens.append(torch.randn(count, HIDDEN, generator=generator).to(dtype).double().requires_grad_())
            self.weights.append(torch.rand(count, top_k, generator=generator).double().requires_grad_())
        self.matrices = (torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 3).to(dtype).double().requires_grad_()
        self.dtype = dtype


def dense(idx, tokens, weights, matrices):
    """[T, H]: the sum over a token's routes of weight * tanh(A_e x)."""
    outs = torch.tanh(torch.einsum("th,egh->teg", tokens, matrices))
    chosen = torch.take_along_dim(outs, idx.clamp(min=0)[..., None], 1)
    return ((weights * (idx >= 0))[..., None] * chosen).sum(1)


def check_against_dense(data, out, leaves, own, *, weighted=True, tolerance=1e-5):
    """Compares a layer's output, and the gradients of its sin().sum() with respect to the leaves, which are this rank's tokens
    and weights and its experts' matrices (the slice `own`), with the dense model in float64 by one process."""
    wanted, losses = [], []
    for rank in range(RANKS):
        weights = data.weights[rank] if weighted else torch.ones_like(data.weights[rank])
        wanted.append(dense(data.idx[rank], data.tokens[rank], weights, data.matrices))
        losses.append(wanted[-1].sin().sum())
    torch.testing.assert_close(out.double().cpu(), wanted[RANK], rtol=tolerance, atol=tolerance)
    found = gradients(out.float().sin().sum(), leaves)
    expected = gradients(losses[RANK], [data.tokens[RANK], data.weights[RANK]], keep=True)
    expected.append(gradients(sum(losses), [data.matrices])[0][own])
    for grad, expected_grad in zip(found, expected):
        torch.testing.assert_close(grad.double().cpu(), expected_grad, rtol=10 * tolerance, atol=10 * tolerance)


def exchange_layer(
    group, idx, tokens, weights, matrices, alignment=1, weighted=True, num_rows=None, in_one_call=False, zone_stride=0
):
    """The same by the operations; `matrices` are those of this rank's experts. in_one_call: by prepare_dispatch."""
    zones = dict(alignment=alignment, zone_stride=zone_stride)
    dtype = matrices.dtype if tokens.dtype == torch.float64 else tokens.dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    sent, weights = tokens.to(dtype), weights.float() if weighted else None
    if in_one_call:
        plan, rows, row_weights = epx.torch.prepare_dispatch(
            group, sent, on_device(idx), weights, num_rows=num_rows or group.max_recv_tokens_per_rank, **zones
        )
    else:
        plan = epx.torch.prepare(group, on_device(idx), **zones)
        rows, row_weights = epx.torch.dispatch(plan, sent, weights, num_rows=num_rows)
    if zone_stride:
        assert plan.offsets.tolist() == [zone_stride * zone for zone in range(group.num_local_experts + 1)]
    parts, end = [], 0
    for expert, (begin, count) in enumerate(zip(plan.offsets.tolist(), plan.counts.tolist())):
        parts += [rows[end:begin] * 0, torch.tanh(rows[begin : begin + count] @ matrices[expert].to(dtype).t())]
        end = begin + count
    parts.append(torch.zeros_like(rows[end:]))
    return epx.torch.combine(plan, torch.cat(parts), row_weights)


def whole_parameters(layer):
    """Parameters of the experts of all ranks, in float64, of which this rank's layer gets its own; by name."""
    group, generator = layer.group, torch.Generator().manual_seed(5)
    first = group.first_local_expert
    found = {"gate_weight": layer.gate_weight.detach().double().cpu().requires_grad_()}
    for name in ("first_weight", "down_weight", "first_bias", "down_bias"):
        own = getattr(layer, name)
        if own is not None:
            values = torch.randn(EXPERTS, *own.shape[1:], generator=generator) / 2
            own.data.copy_(values[first : first + group.num_local_experts])
            found[name] = values.double().requires_grad_()
    return found


def dense_block(layer, tokens, parameters, mask):
    """The layer on tokens of one rank, with the experts of all ranks, in float64."""
    router = layer.router
    logits = tokens @ parameters["gate_weight"].t()
    if router.score == "topk_then_softmax":
        chosen, idx = logits.topk(router.top_k, sorted=True)
        weights = chosen.softmax(-1)
    else:
        weights, idx = logits.softmax(-1).topk(router.top_k, sorted=True)
    first = torch.einsum("th,efh->tef", tokens, parameters["first_weight"])
    if "first_bias" in parameters:
        first = first + parameters["first_bias"]
    if layer.ffn.activation == "swiglu":
        gate, up = first.chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
    else:
        inner = torch.nn.functional.gelu(first)
    outs = torch.einsum("tef,ehf->teh", inner, parameters["down_weight"])
    if "down_bias" in parameters:
        outs = outs + parameters["down_bias"]
    chosen = torch.take_along_dim(outs, idx[..., None], 1)
    return (weights[..., None] * chosen).sum(1) * mask[:, None]


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "epx":
            self.calls[function._opname] += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def count_calls():
    """Counts the operators of epx by name, those of backwards too."""
    with _Count() as mode:
        yield mode.calls


def gradients(loss, tensors, keep=False):
    """Those of the loss, zero where it does not depend on a tensor."""
    found = torch.autograd.grad(loss, tensors, allow_unused=True, retain_graph=keep)
    return [torch.zeros_like(tensor) if grad is None else grad for grad, tensor in zip(found, tensors)]


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and keeps the names of epx's operators in them, in the order in
    which the effect's token passes through them; `groups`, of each graph, the numbers of their groups (of the layer's
    block)."""

    def __init__(self):
        self.forward, self.backward, self.groups = [], [], []

    def backend(self):
        def collect(into):
            def compiler(graph, _inputs):
                names, numbers = self.order(graph)
                into.append(names)
                self.groups.append(numbers)
                return make_boxed_func(graph.forward)

            return compiler

        return aot_autograd(fw_compiler=collect(self.forward), bw_compiler=collect(self.backward))

    @staticmethod
    def order(graph):
        names, numbers, last = [], [], None
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is torch.ops.higher_order.with_effects:
                token, operator = node.args[:2]
                source = token.args[0] if token.op == "call_function" and token.args else None
                assert last is None or source is last, f"{node} does not take the token of {last}"
                names.append(operator._opname)
                numbers.append(node.args[2])
                last = node
            else:
                is_local = node.target is torch.ops.epx.quantise_weights.default  # and has no effect
                assert getattr(node.target, "namespace", "") != "epx" or is_local, f"{node.target} has no token"
        return names, numbers


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)
