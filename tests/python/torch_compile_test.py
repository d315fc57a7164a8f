# SPDX-License-Identifier: Apache-2.0
"""epx.torch under torch.compile: the same results, and graphs in which the calls have the order of the program on every rank,
whatever its number of tokens: none merged, dropped, reordered or computed again."""

import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch.utils.checkpoint import checkpoint
from torch_model import HIDDEN, INNER, ON_GPU, RANK, RANKS, Data, Graphs, compiled, make_group, on_device, single

import epx
import epx.moe
import epx.torch

WITH_INDUCTOR = RANKS == 1 or ON_GPU  # a compiler for each rank takes minutes on few cores
NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 4 for rank in range(RANKS)]


class Compile(unittest.TestCase):
    def data(self, seed):
        data = Data(NUM_TOKENS, 2, seed=seed)
        return (
            on_device(data.idx[RANK]),
            single(data.tokens[RANK]).requires_grad_(),
            single(data.weights[RANK]).requires_grad_(),
        )

    def compare(self, function, inputs, leaves, backend, tolerance=1e-6):
        """Compares the function's outputs and its gradients with those of eager mode."""
        found = []
        for each in (function, compiled(function, backend=backend)):
            outputs = each(*inputs)
            loss = sum(output.sin().sum() for output in outputs)
            found.append((outputs, torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)

    def test_1_operations(self):
        with make_group() as group:
            rows = group.max_recv_tokens_per_rank

            def layer(idx, tokens, weights):
                plan = epx.torch.prepare(group, idx, alignment=4)
                received, row_weights = epx.torch.dispatch(plan, tokens, weights, num_rows=rows)
                used = torch.arange(rows, device=received.device) < plan.offsets[-1]
                return epx.torch.combine(plan, torch.where(used[:, None], torch.tanh(received), 0), row_weights)

            def program(idx, tokens, weights):
                one, two = layer(idx, tokens, weights), layer(idx, tokens, weights)  # equal calls, which must not be merged
                epx.torch.dispatch(epx.torch.prepare(group, idx), tokens, num_rows=rows)  # nobody uses what it returns
                return one, two, layer(idx, one + two, weights)

            idx, tokens, weights = self.data(1)
            graphs = Graphs()
            self.compare(program, (idx, tokens, weights), (tokens, weights), graphs.backend())
            forward, backward = ["prepare", "dispatch", "combine"], ["combine_bwd", "dispatch_bwd"]
            self.assertEqual(graphs.forward, [2 * forward + forward[:2] + forward])
            self.assertEqual(len(graphs.backward), 1)
            self.assertEqual(sorted(graphs.backward[0]), sorted(3 * backward))
            self.assertEqual(graphs.backward[0][:2], backward)
            if WITH_INDUCTOR:
                self.compare(program, (idx, tokens, weights), (tokens, weights), "inductor", 1e-5)
            group.check()

    def test_2_layer(self):
        with make_group() as group:
            layer = epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER), max_in_flight=2)
            _, tokens, _ = self.data(2)
            norm = torch.nn.LayerNorm(HIDDEN, device=tokens.device)
            leaves = [tokens, *layer.parameters()]

            def model(tokens):
                return (tokens + layer(norm(tokens)) + layer(norm(tokens)),)

            graphs = Graphs()
            self.compare(model, (tokens,), leaves, graphs.backend())
            backward = ["block_bwd"] + ["mean_over_ranks"] * (RANKS > 1)
            self.assertEqual((graphs.forward, graphs.backward), ([["block_fwd"] * 2], [backward * 2]))
            if WITH_INDUCTOR:
                self.compare(model, (tokens,), leaves, "inductor", 1e-5)
            with torch.no_grad():
                torch.testing.assert_close(compiled(layer, backend="aot_eager")(tokens), layer(tokens))
            layer.destroy()
            group.check()

    def test_3_checkpointing_saves_the_exchange(self):
        with make_group() as group:
            rows = group.max_recv_tokens_per_rank
            idx, tokens, weights = self.data(3)

            def layer(tokens, weights):
                plan = epx.torch.prepare(group, idx)
                received, row_weights = epx.torch.dispatch(plan, tokens.cos(), weights, num_rows=rows)
                return epx.torch.combine(plan, received, row_weights)

            def program(tokens, weights):
                return (checkpoint(layer, tokens, weights, use_reentrant=False, context_fn=epx.torch.saves_exchange).sin(),)

            graphs = Graphs()
            self.compare(program, (tokens, weights), (tokens, weights), graphs.backend())
            self.assertEqual(graphs.forward, [["prepare", "dispatch", "combine"]])
            self.assertEqual(graphs.backward, [["combine_bwd", "dispatch_bwd"]])
            group.check()

    def test_4_numbers_of_tokens_that_change(self):
        with make_group() as group:
            layer = epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER))
            fast = compiled(layer, backend="aot_eager", dynamic=True)
            generator = torch.Generator().manual_seed(RANK)
            for step in range(4):
                count = 0 if step % RANKS == RANK and RANKS > 1 else 2 + step + RANK
                tokens = on_device(torch.randn(count, HIDDEN, generator=generator)).requires_grad_()
                out = fast(tokens)
                grads = torch.autograd.grad(out.sin().sum(), [tokens, layer.first_weight])
                del out
                expected = torch.autograd.grad(layer(tokens).sin().sum(), [tokens, layer.first_weight])
                torch.testing.assert_close(grads, expected)
            layer.destroy()
            group.check()

    def test_4a_two_groups(self):
        """Calls of two groups keep the order of the program among each other too."""
        with make_group() as one, make_group(combine_precision="exact") as two:
            idx, tokens, weights = self.data(7)

            def layer(group, tokens, top_k):
                plan = epx.torch.prepare(group, idx[:, :top_k].contiguous(), alignment=8 // top_k)
                rows, row_weights = epx.torch.dispatch(
                    plan, tokens, weights[:, :top_k].contiguous(), num_rows=group.max_recv_tokens_per_rank
                )
                return epx.torch.combine(plan, rows, row_weights)

            def program(tokens, weights):
                return layer(one, tokens, 2), layer(two, tokens, 1) + layer(one, tokens, 1)

            graphs = Graphs()
            self.compare(program, (tokens, weights), (tokens, weights), graphs.backend())
            self.assertEqual(graphs.forward, [3 * ["prepare", "dispatch", "combine"]])
            self.assertEqual(graphs.groups[0], [one.number] * 3 + [two.number] * 3 + [one.number] * 3)
            self.assertEqual(sorted(graphs.backward[0]), sorted(3 * ["combine_bwd", "dispatch_bwd"]))
            one.check()
            two.check()

    def test_4b_prepare_and_dispatch_in_one_call(self):
        with make_group() as group:
            rows = group.max_recv_tokens_per_rank
            idx, tokens, weights = self.data(6)

            def program(tokens, weights):
                plan, received, row_weights = epx.torch.prepare_dispatch(group, tokens, idx, weights, num_rows=rows)
                return (epx.torch.combine(plan, received, row_weights),)

            graphs = Graphs()
            self.compare(program, (tokens, weights), (tokens, weights), graphs.backend())
            self.assertEqual(graphs.forward, [["prepare_dispatch", "combine"]])
            self.assertEqual(graphs.backward, [["combine_bwd", "dispatch_bwd"]])
            group.check()

    def test_5_refusals(self):
        with make_group() as group:
            idx, tokens, _ = self.data(5)

            def without_num_rows(tokens):
                return epx.torch.dispatch(epx.torch.prepare(group, idx), tokens)[0]

            with self.assertRaisesRegex(Exception, "needs num_rows under torch.compile"):
                compiled(without_num_rows, backend="eager")(tokens)

            def bad(tokens):
                return epx.torch.dispatch(epx.torch.prepare(group, idx), tokens.double(), num_rows=8)[0]

            # A compiled graph raises the operator's own exception, with the same sentence.
            with self.assertRaisesRegex(RuntimeError, "tokens is float64; it must be"):
                compiled(bad, backend="aot_eager")(tokens.detach())


if __name__ == "__main__":
    torch_model.main()
