# SPDX-License-Identifier: Apache-2.0
"""XLA's optimised programs have epx's calls in one order: under jit, grad, scan, checkpoint, with branches and with
donation."""

import unittest

import hlo_order
import jax_ranks
from jax_ranks import HIDDEN, float32, make_group, moe_layer, prepare_dispatch_layer, rank_major_layer

import jax
import jax.numpy as jnp

import epx.jax

FORWARD = ["prepare", "dispatch", "combine"]
BACKWARD = ["combine_bwd", "dispatch_bwd"]
AGAIN = ["prepare", "dispatch"]  # of a checkpointed layer; nothing needs combine again
RANK_MAJOR = ["dispatch_rank_major", "combine_rank_major"]
RANK_MAJOR_BACKWARD = ["combine_rank_major_bwd", "dispatch_rank_major_bwd"]


class Order(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.group = make_group()
        data = jax_ranks.Data([4])
        cls.tokens, cls.weights, cls.experts = float32(data.tokens[0]), float32(data.weights[0]), float32(data.experts)

    @classmethod
    def tearDownClass(cls):
        cls.group.destroy()

    def layer(self, tokens, scale, token):
        # Indices depend on the tokens, as a router's do, so that nothing of a layer can be moved out of a loop.
        idx = jax.lax.top_k(tokens[:, :4], 2)[1].astype(jnp.int32)
        return moe_layer(self.group, tokens, idx, self.weights, self.experts * scale, token)

    def rank_major_layer(self, tokens, scale, token):
        idx = jax.lax.top_k(tokens[:, :4], 2)[1].astype(jnp.int32)
        return rank_major_layer(self.group, tokens, idx, self.weights, self.experts * scale, token)

    def mixed_layer(self, tokens, scale, token):
        """Both layouts, whose calls have one order too."""
        tokens, token = self.rank_major_layer(tokens, scale, token)
        return self.layer(tokens, scale, token)

    def stack(self, layer, tokens, loops=None):
        """Two layers, or a loop whose body has them."""

        def body(carry, scale):
            tokens, token = layer(carry[0], scale, carry[1])
            return layer(tokens, scale, token), None

        carry = tokens, epx.jax.first_token()
        if loops is None:
            carry, _ = body(carry, 1.0)
        else:
            carry, _ = jax.lax.scan(body, carry, jnp.ones(loops))
        return epx.jax.finish(jnp.sum(carry[0]), carry[1])

    def calls(self, function, *arguments, **options):
        return hlo_order.Module(jax.jit(function, **options).lower(*arguments).compile().as_text()).calls()

    def test_forward(self):
        self.assertEqual(self.calls(lambda tokens: self.stack(self.layer, tokens), self.tokens), 2 * FORWARD)

    def test_gradient(self):
        # The gradient of a sum does not depend on what the forward has computed.
        for function in (jax.grad, jax.value_and_grad):
            self.assertEqual(
                self.calls(function(lambda tokens: self.stack(self.layer, tokens)), self.tokens), 2 * FORWARD + 2 * BACKWARD
            )

    def test_scan(self):
        gradient = jax.grad(lambda tokens: self.stack(self.layer, tokens, loops=3))
        self.assertEqual(self.calls(gradient, self.tokens), 2 * FORWARD + 2 * BACKWARD)

    def test_rank_major(self):
        for loops in (None, 3):
            for layer, forward, backward in (
                (self.rank_major_layer, RANK_MAJOR, RANK_MAJOR_BACKWARD),
                (self.mixed_layer, RANK_MAJOR + FORWARD, BACKWARD + RANK_MAJOR_BACKWARD),
            ):
                self.assertEqual(self.calls(lambda x, layer=layer: self.stack(layer, x, loops), self.tokens), 2 * forward)
                gradient = jax.grad(lambda x, layer=layer: self.stack(layer, x, loops))
                self.assertEqual(self.calls(gradient, self.tokens), 2 * forward + 2 * backward)
        gradient = jax.grad(lambda tokens: self.stack(epx.jax.checkpoint(self.rank_major_layer), tokens, 3))
        self.assertEqual(
            self.calls(gradient, self.tokens), 2 * RANK_MAJOR + 2 * (["dispatch_rank_major"] + RANK_MAJOR_BACKWARD)
        )

    def test_prepare_dispatch(self):
        def layer(tokens, scale, token):
            idx = jax.lax.top_k(tokens[:, :4], 2)[1].astype(jnp.int32)
            return prepare_dispatch_layer(self.group, tokens, idx, self.weights, self.experts * scale, token)

        forward = ["prepare_dispatch", "combine"]
        for loops in (None, 3):
            gradient = jax.grad(lambda x, loops=loops: self.stack(layer, x, loops))
            self.assertEqual(self.calls(gradient, self.tokens), 2 * forward + 2 * BACKWARD)
        gradient = jax.grad(lambda x: self.stack(epx.jax.checkpoint(layer), x, 3))
        self.assertEqual(self.calls(gradient, self.tokens), 2 * forward + 2 * (["prepare_dispatch"] + BACKWARD))

    def test_ragged_all_to_all(self):
        """The backward makes a call for each of operand and output that is differentiated, which zeros are not."""

        def layer(tokens, scale, token):
            slices = [jnp.array([each], jnp.int32) for each in (1, 3, 0, 3)]
            rows, token = epx.jax.ragged_all_to_all(self.group, tokens, jnp.zeros((6, HIDDEN)), *slices, token)
            return epx.jax.ragged_all_to_all(self.group, jnp.tanh(rows * scale), tokens, *slices, token, transposed=True)

        for loops in (None, 3):
            for wrap, again in ((lambda layer: layer, []), (epx.jax.checkpoint, ["ragged_all_to_all"])):
                gradient = jax.grad(lambda x, loops=loops, wrap=wrap: self.stack(wrap(layer), x, loops))
                self.assertEqual(
                    self.calls(gradient, self.tokens),
                    4 * ["ragged_all_to_all"] + 2 * (again + 3 * ["ragged_all_to_all_bwd"]),
                )

    def test_checkpoint(self):
        for loops in (None, 3):
            gradient = jax.grad(lambda tokens, loops=loops: self.stack(epx.jax.checkpoint(self.layer), tokens, loops))
            self.assertEqual(self.calls(gradient, self.tokens), 2 * FORWARD + 2 * (AGAIN + BACKWARD))

    def test_jax_checkpoint(self):
        """A checkpoint in the body of a loop, and a sequence of two. Nothing but a barrier orders what the sequence computes
        again, which is gone in the program: XLA takes it for what it has computed already, or leaves it without an order."""
        gradient = jax.grad(lambda tokens: self.stack(jax.checkpoint(self.layer), tokens))
        if jax.__version_info__ < (0, 11):
            self.assertEqual(self.calls(gradient, self.tokens), 2 * FORWARD + 2 * BACKWARD)
        else:
            with self.assertRaisesRegex(ValueError, "nothing orders"):
                self.calls(gradient, self.tokens)

        def loop(tokens):
            layer = jax.checkpoint(self.layer)
            (tokens, token), _ = jax.lax.scan(
                lambda carry, scale: (layer(carry[0], scale, carry[1]), None), (tokens, epx.jax.first_token()), jnp.ones(3)
            )
            return epx.jax.finish(jnp.sum(tokens), token)

        self.assertEqual(self.calls(jax.grad(loop), self.tokens), FORWARD + AGAIN + BACKWARD)

    def test_independent_branches(self):
        for layer, forward, backward in (
            (self.layer, FORWARD, BACKWARD),
            (self.rank_major_layer, RANK_MAJOR, RANK_MAJOR_BACKWARD),
        ):

            def branches(tokens, layer=layer):
                a, token = layer(tokens, 1.0, epx.jax.first_token())
                b, token = layer(tokens, 1.0, token)
                return epx.jax.finish(jnp.sum(a * b), token)

            self.assertEqual(self.calls(branches, self.tokens), 2 * forward)
            self.assertEqual(self.calls(jax.grad(branches), self.tokens), 2 * forward + 2 * backward)

    def test_donation(self):
        def step(tokens, token):
            def loss(tokens):
                out, last = self.layer(tokens, 1.0, token)
                return epx.jax.finish(jnp.sum(out), last), last

            grad, last = jax.grad(loss, has_aux=True)(tokens)
            return tokens - grad, last

        self.assertEqual(self.calls(step, self.tokens, epx.jax.first_token(), donate_argnums=(0, 1)), FORWARD + BACKWARD)

    def test_no_elements(self):
        """A rank without tokens makes the same calls."""
        tokens, weights = jnp.zeros((0, HIDDEN)), jnp.zeros((0, 2))

        def loss(tokens):
            out, token = moe_layer(
                self.group, tokens, jnp.zeros((0, 2), jnp.int32), weights, self.experts, epx.jax.first_token()
            )
            return epx.jax.finish(jnp.sum(out), token)

        self.assertEqual(self.calls(loss, tokens), FORWARD)
        self.assertEqual(self.calls(jax.grad(loss), tokens), FORWARD + BACKWARD)

        def rank_major_loss(tokens):
            out, token = rank_major_layer(
                self.group, tokens, jnp.zeros((0, 2), jnp.int32), weights, self.experts, epx.jax.first_token()
            )
            return epx.jax.finish(jnp.sum(out), token)

        self.assertEqual(self.calls(rank_major_loss, tokens), RANK_MAJOR)
        self.assertEqual(self.calls(jax.grad(rank_major_loss), tokens), RANK_MAJOR + RANK_MAJOR_BACKWARD)

    def test_the_reader_sees_calls_without_an_order(self):
        def fork(tokens):
            token = epx.jax.first_token()
            a, _ = self.layer(tokens, 1.0, token)
            b, _ = self.layer(tokens, 2.0, token)
            return a + b

        with self.assertRaisesRegex(ValueError, "nothing orders"):
            self.calls(fork, self.tokens)


if __name__ == "__main__":
    unittest.main(verbosity=2)
