# SPDX-License-Identifier: Apache-2.0
"""What the tests of epx.jax share: processes of jax.distributed with one CPU device each, and an MoE layer with its dense
reference."""

import os
import pathlib
import socket
import time

import ranks

ranks.require("numpy", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy

import epx
import epx.jax

RANK, RANKS = ranks.rank(), ranks.num_ranks()
EXPERTS, HIDDEN = 4, 6


def join():
    """Has the ranks of epx_test_launch join jax.distributed."""
    if RANKS == 1:
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
    jax.distributed.initialize(address, RANKS, RANK)  # returns when all have come
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
    with epx.bootstrap.from_jax() as bootstrap:
        return epx.Group(bootstrap, transport="host", **config(**changes))


def experts(rows, offsets, weight):
    """tanh(row @ weight[expert of the row]); weight is [E_l, H, H]."""
    expert = jnp.searchsorted(offsets[1:], jnp.arange(rows.shape[0]), side="right")
    return jnp.tanh(jnp.einsum("nh,nhg->ng", rows, weight[jnp.minimum(expert, weight.shape[0] - 1)]))


def moe_layer(group, tokens, topk_idx, weights, expert_weight, token, *, alignment=1, num_rows=None):
    plan, token = epx.jax.prepare(group, topk_idx, token, alignment=alignment)
    rows, row_weights, token = epx.jax.dispatch(group, plan, tokens, weights, token, num_rows=num_rows)
    return epx.jax.combine(group, plan, experts(rows, plan.offsets, expert_weight), row_weights, token)


def rank_major_layer(group, tokens, topk_idx, weights, expert_weight, token, **options):
    """The layer by the rank-major calls; the experts' outputs of a row are weighted and summed here."""
    plan, rows, row_weights, token = epx.jax.dispatch_rank_major(group, topk_idx, tokens, weights, token, **options)
    outs = jnp.tanh(jnp.einsum("pmh,pmkhg->pmkg", rows, expert_weight[plan.topk_idx]))
    outs = jnp.where(plan.topk_idx[..., None] >= 0, outs * row_weights[..., None], 0)
    return epx.jax.combine_rank_major(group, plan, outs.sum(2), token)


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
