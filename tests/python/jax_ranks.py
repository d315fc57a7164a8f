# SPDX-License-Identifier: Apache-2.0
"""What the tests of epx.jax share: processes of jax.distributed with one CPU device each, or one GPU each with
EPX_TEST_DEVICE=cuda (see ranks.py), and an MoE layer with its dense reference."""

import os
import pathlib
import socket
import time
import unittest

import ranks

ON_GPU = ranks.on_gpu()
os.environ["JAX_PLATFORMS"] = "cuda" if ON_GPU else "cpu"  # which JAX reads when it is imported
if ON_GPU:
    ranks.require_jax_on_gpus(ranks.ranks_per_node())
    # Windows and NCCL want some, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2" if ranks.shares_gpu() else "0.5")
ranks.require("numpy", "jax")
import jax
import jax.numpy as jnp
import numpy

import epx
import epx.jax

if ON_GPU:
    jax.config.update("jax_default_matmul_precision", "highest")
RANK, RANKS = ranks.rank(), ranks.num_ranks()
EXPERTS, HIDDEN = 4, 6
TRANSPORT = "nccl" if ON_GPU else "host"


def join():
    """Has the ranks of epx_test_launch join jax.distributed."""
    if RANKS == 1 and not ON_GPU:
        return
    file = pathlib.Path(os.environ["EPX_TEST_DIR"]) / "coordinator"
    if RANK == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        file.with_suffix(".new").write_text(f"127.0.0.1:{port}", encoding="ascii")
        file.with_suffix(".new").rename(file)
    deadline = time.monotonic() + ranks.TIMEOUT_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, "rank 0 has not come"
        time.sleep(0.01)
    address = file.read_text(encoding="ascii")
    local = [ranks.gpu()] if ON_GPU else None
    jax.distributed.initialize(address, RANKS, RANK, local_device_ids=local)  # returns when all have come
    jax.devices()  # waits for all ranks, of which some may need no device before they end
    if RANK == 0:
        file.unlink()


def config(**changes):
    return {
        **dict(
            num_experts=EXPERTS,
            max_tokens_per_rank=8,
            hidden_dim=HIDDEN,
            max_top_k=3,
            max_token_dtype="float32",
            max_alignment=8,
            timeout=ranks.TIMEOUT_SECONDS,
        ),
        **changes,
    }


def make_group(**changes):
    """A group of all ranks, for arrays of this process."""
    if ON_GPU:
        mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
        return epx.jax.make_group(mesh, "ep", transport="nccl", **config(**changes))
    with epx.bootstrap.from_jax() as bootstrap:
        return epx.Group(bootstrap, transport="host", **config(**changes))


class TestCase(unittest.TestCase):
    def group(self, **changes):
        """As make_group(), for one test, which fails when the group reports anything in the end."""
        group = make_group(**changes)
        self.addCleanup(group.destroy)
        self.addCleanup(group.check)  # before that
        return group


def experts(rows, offsets, weight):
    """tanh(row @ weight[expert of the row]); weight is [E_l, H, H]."""
    expert = jnp.searchsorted(offsets[1:], jnp.arange(rows.shape[0]), side="right")
    return jnp.tanh(jnp.einsum("nh,nhg->ng", rows, weight[jnp.minimum(expert, weight.shape[0] - 1)]))


def grouped_experts(rows, counts, weight):
    """experts() of an alignment of 1, by jax.lax.ragged_dot, which does not look at rows that are not in use."""
    return jnp.tanh(jax.lax.ragged_dot(rows, weight, counts))


def undefined_rows_layer(group, tokens, topk_idx, weights, expert_weight, token):
    """moe_layer() with rows that nobody has made zero, which become NaN here to see that they do not matter."""
    plan, token = epx.jax.prepare(group, topk_idx, token, zero_unused=False)
    rows, row_weights, token = epx.jax.dispatch(plan, tokens, weights, token)
    spoilt = jnp.where(jnp.arange(len(rows))[:, None] < plan.offsets[-1], 0, jnp.nan)
    rows = grouped_experts(rows + spoilt, plan.counts, expert_weight) + spoilt
    return epx.jax.combine(plan, rows, row_weights, token)


def moe_layer(group, tokens, topk_idx, weights, expert_weight, token, *, alignment=1, zone_stride=0, num_rows=None):
    plan, token = epx.jax.prepare(group, topk_idx, token, alignment=alignment, zone_stride=zone_stride)
    rows, row_weights, token = epx.jax.dispatch(plan, tokens, weights, token, num_rows=num_rows)
    return epx.jax.combine(plan, experts(rows, plan.offsets, expert_weight), row_weights, token)


def prepare_dispatch_layer(group, tokens, topk_idx, weights, expert_weight, token, **options):
    """moe_layer() with prepare and dispatch in one call."""
    plan, rows, row_weights, token = epx.jax.prepare_dispatch(group, tokens, topk_idx, weights, token, **options)
    return epx.jax.combine(plan, experts(rows, plan.offsets, expert_weight), row_weights, token)


def rank_major_layer(group, tokens, topk_idx, weights, expert_weight, token, **options):
    """The layer by the rank-major calls; the experts' outputs of a row are weighted and summed here."""
    plan, rows, row_weights, token = epx.jax.dispatch_rank_major(group, tokens, topk_idx, weights, token, **options)
    outs = jnp.tanh(jnp.einsum("pmh,pmkhg->pmkg", rows, expert_weight[plan.topk_idx]))
    outs = jnp.where(plan.topk_idx[..., None] >= 0, outs * row_weights[..., None], 0)
    return epx.jax.combine_rank_major(plan, outs.sum(2), token)


def dense_layer(tokens, topk_idx, weights, expert_weight):
    """The same on all experts, with numpy in float64."""
    out = numpy.zeros_like(tokens)
    for token, k in numpy.argwhere(topk_idx >= 0):
        out[token] += weights[token, k] * numpy.tanh(tokens[token] @ expert_weight[topk_idx[token, k]])
    return out


class Data:
    """Tokens, indices, weights and the gradient of the output of each rank, and the experts' weights, in float64."""

    def __init__(self, num_tokens, top_k=2, seed=1, masked=0.2):
        generator = numpy.random.default_rng(seed)
        self.tokens = [generator.standard_normal((count, HIDDEN)) for count in num_tokens]
        self.idx = []
        for count in num_tokens:
            choice = numpy.argsort(generator.random((count, EXPERTS)), axis=1)[:, :top_k]
            self.idx.append(numpy.where(generator.random(choice.shape) < masked, -1, choice).astype(numpy.int32))
        self.weights = [generator.random((count, top_k)) for count in num_tokens]
        self.factor = [generator.standard_normal((count, HIDDEN)) for count in num_tokens]
        self.experts = generator.standard_normal((EXPERTS, HIDDEN, HIDDEN)) / 2

    def out(self, rank):
        return dense_layer(self.tokens[rank], self.idx[rank], self.weights[rank], self.experts)

    def loss(self):
        return sum((self.out(rank) * self.factor[rank]).sum() for rank in range(len(self.tokens)))


def float32(array):
    return jnp.asarray(array, jnp.float32)
