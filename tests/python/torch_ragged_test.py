# SPDX-License-Identifier: Apache-2.0
"""epx.torch.ragged_all_to_all against a loop over rows, and its gradients against those of a dense matrix; under torch.compile
and checkpoints; refusals. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import functools
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import numpy
import torch
import torch_model
from reference import Slices
from torch.utils.checkpoint import checkpoint
from torch_model import DEVICE, HIDDEN, RANK, RANKS, Graphs, compiled, count_calls, gradients, make_group, on_device

import epx
import epx.torch

move = epx.torch.ragged_all_to_all
NAMES = "ragged_all_to_all", "ragged_all_to_all_into"


def dense(slices, operands, outputs, transposed):
    """What move() returns on each rank, by one matrix [M, N]; of tensors in float64."""
    first_in, first_out = (numpy.cumsum((0, *counts)) for counts in slices.num_rows)
    matrix = torch.zeros(int(first_out[-1]), int(first_in[-1]), dtype=torch.float64)
    for source, row, destination, place in slices.rows:
        matrix[first_out[destination] + place, first_in[source] + row] = 1
    matrix = matrix.t() if transposed else matrix
    landed = matrix.any(dim=1).view(-1, *[1] * (outputs[0].dim() - 1))
    moved = torch.where(landed, torch.tensordot(matrix, torch.cat(operands), 1), torch.cat(outputs))
    return moved.split([len(output) for output in outputs])


def random_rows(counts, row, seed):
    """Small integers, which all dtypes have."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (int(count), *row), generator=generator).double() for count in counts]


@ranks.skip_over_nodes
class Ragged(unittest.TestCase):
    def arguments(self, slices):
        return [on_device(torch.from_numpy(each)) for each in slices.arguments[RANK]]

    def test_1_against_dense(self):
        with make_group() as group:
            for seed, (row, dtype, leaves) in enumerate(
                (((HIDDEN,), torch.float32, (0, 1)), ((2, 9), torch.bfloat16, (0,)), ((), torch.float64, (1,)))
            ):
                slices = Slices(RANKS, 2 + seed, seed, dtype=(numpy.int32, numpy.int64)[seed % 2])
                for transposed in (False, True):
                    counts = slices.num_rows[::-1] if transposed else slices.num_rows
                    wide = [[each.requires_grad_() for each in random_rows(counts[i], row, i)] for i in (0, 1)]
                    wanted = dense(slices, *wide, transposed)
                    (sum((each**2).sum() for each in wanted)).backward()
                    own = [on_device(each[RANK].detach().to(dtype)) for each in wide]
                    for leaf in leaves:
                        own[leaf].requires_grad_()
                    kept = own[1].detach().clone()
                    out = move(group, *own, *self.arguments(slices), transposed=transposed)
                    (out.double() ** 2).sum().backward()
                    torch.testing.assert_close(out.double().cpu(), wanted[RANK].detach(), rtol=0, atol=0)
                    torch.testing.assert_close(own[1].detach(), kept, rtol=0, atol=0)
                    for i in (0, 1):
                        if i in leaves:
                            torch.testing.assert_close(own[i].grad.double().cpu(), wide[i][RANK].grad, rtol=0, atol=0)
                        else:
                            self.assertIsNone(own[i].grad)
            group.check()

    def test_2_dtypes_in_place_and_events(self):
        with make_group() as group:
            slices = Slices(RANKS, 2, 7)
            arguments = self.arguments(slices)
            for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.int64):
                operands, outputs = [
                    [each.abs().to(dtype) for each in random_rows(counts, (3,), 5)] for counts in slices.num_rows
                ]
                as_numpy = [[each.view(torch.uint8).numpy() for each in rows] for rows in (operands, outputs)]
                wanted = torch.from_numpy(slices.move(*as_numpy)[RANK])
                moved = move(group, on_device(operands[RANK]), on_device(outputs[RANK]), *arguments)
                self.assertEqual(moved.dtype, dtype)
                torch.testing.assert_close(moved.view(torch.uint8).cpu(), wanted, rtol=0, atol=0)
            # Into memory that peers reach, and into other memory.
            rows = int(max(slices.num_rows[1]))
            window = group.empty(rows, 2)
            operands, outputs = [random_rows(counts, (2,), 6) for counts in (slices.num_rows[0], [rows] * RANKS)]
            wanted = slices.move([each.numpy() for each in operands], [each.numpy() for each in outputs])[RANK]
            for output in (window, torch.empty(rows, 2, device=DEVICE)):
                output.copy_(outputs[RANK])
                operand = on_device(operands[RANK].float()).requires_grad_()
                moved = move(group, operand, output, *arguments, in_place=True)
                self.assertEqual(moved.data_ptr(), output.data_ptr())
                torch.testing.assert_close(moved.detach().double().cpu(), torch.from_numpy(wanted), rtol=0, atol=0)
                moved.sum().backward()
                sent = torch.zeros(len(operand), 1)
                for source, row, _, _ in slices.rows:
                    if source == RANK:
                        sent[row] = 1
                torch.testing.assert_close(operand.grad.cpu(), sent.expand(-1, 2))
                self.assertFalse(output.requires_grad)
                # What has saved the memory for a backward learns that it is another's now.
                for operand in (operand, operand.detach()):
                    product = output * operand.new_ones(2).requires_grad_()
                    move(group, operand, output, *arguments, in_place=True)
                    with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                        product.sum().backward()
            del moved, product
            group.check()
            one = torch.ones(RANKS, dtype=torch.int32, device=DEVICE)
            output = move(group, torch.ones(2, 1, device=DEVICE), torch.zeros(2, 1, device=DEVICE), 2 * one, one, 0 * one, one)
            self.assertEqual(float(output.sum()), 0)
            with self.assertRaises(epx.EventError) as caught:
                group.check()
            self.assertEqual(caught.exception.events, {epx.EventKind.BAD_SLICE: 2 * RANKS - 1})

    def test_3_compiled_and_checkpoints(self):
        with make_group() as group:
            slices = Slices(RANKS, 1, 8)
            arguments = self.arguments(slices)
            leaves = [on_device(random_rows(counts, (2,), 3)[RANK].float()).requires_grad_() for counts in slices.num_rows]

            def program(operand, output):
                rows = move(group, operand, output, *arguments)
                return move(group, rows.sin(), operand, *arguments, transposed=True)

            def run(function):
                out = function(*leaves)
                return out, gradients(out.sin().sum(), leaves)

            graphs, found = Graphs(), []
            checkpointed = functools.partial(checkpoint, program, use_reentrant=False)
            for function, counted in ((program, [2, 4]), (checkpointed, [4, 4])):
                with count_calls() as calls:
                    found.append(run(function))
                self.assertEqual([calls[name] for name in NAMES], counted)
            for each in (found[1], run(compiled(program, backend=graphs.backend()))):
                torch.testing.assert_close(each, found[0], rtol=1e-6, atol=1e-6)
            self.assertEqual(graphs.forward, [2 * [NAMES[0]]])
            self.assertEqual(graphs.backward[0], 4 * [NAMES[0]])

            def into(operand):
                return move(group, operand, torch.empty(9, 2, device=DEVICE), *arguments, in_place=True)

            with self.assertRaisesRegex(Exception, "not supported under torch.compile"):
                compiled(into, backend="eager")(leaves[0].detach())
            group.check()

    def test_4_refusals(self):
        with make_group() as group:
            rows, zeros = torch.ones(3, 2, device=DEVICE), torch.zeros(RANKS, dtype=torch.int32, device=DEVICE)

            def call(*changed, **options):
                arguments = {**dict(enumerate([group, rows, rows, *[zeros] * 4])), **dict(changed)}
                return lambda: move(*arguments.values(), **options)

            for words, refused in {
                "group is NoneType; this call takes epx.torch.Group": call((0, None)),
                "operand is list; this call takes torch.Tensor": call((1, [1])),
                "operand has strides": call((1, torch.ones(2, 3, device=DEVICE).t())),
                "operand has shape []": call((1, rows.sum())),
                "output is torch.float64; it must be torch.float32": call((2, rows.double())),
                "output has shape [3, 1]; it must be [any, 2]": call((2, rows[:, :1].contiguous())),
                "input_offsets is float32; it must be int32 or int64": call((3, rows[0])),
                f"send_sizes has shape [{RANKS + 1}]; it must be [{RANKS}]": call((4, zeros.new_zeros(RANKS + 1))),
                "recv_sizes is int64; it must be int32": call((6, zeros.long())),
                "K = sizes[0] = 0 slices": call(*((i, zeros[:0]) for i in range(3, 7))),
                "transposed is int; this call takes bool": call(transposed=1),
                "in_place is NoneType; this call takes bool": call(in_place=None),
                "output requires a gradient": call((2, rows.clone().requires_grad_()), in_place=True),
            }.items():
                ranks.refused(self, words, refused)
            with self.assertRaisesRegex(epx.InvalidArgumentError, "vmap"):
                torch.vmap(lambda rows: call((1, rows))())(rows[None])
            group.check()
        if RANKS > 1 and DEVICE.type == "cpu":  # GPUs of one host are one node
            with make_group(combine_precision="node", ranks_per_node=1) as nodes:
                with self.assertRaisesRegex(epx.UnsupportedError, f"has {RANKS} nodes"):
                    call((0, nodes))()
                nodes.check()


if __name__ == "__main__":
    torch_model.main()
