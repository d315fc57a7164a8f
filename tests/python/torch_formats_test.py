# SPDX-License-Identifier: Apache-2.0
"""Row formats of epx.torch: the three ways through each call that dispatches, against the definitions of tests/formats;
gradients, also under torch.compile; refusals. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import dataclasses
import functools
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import format_model
import numpy
import reference
import torch
import torch_model
from format_model import HIDDEN
from torch_model import DEVICE, EXPERTS, RANK, RANKS, Graphs, compiled, count_calls, gradients, on_device

import epx
import epx.moe
import epx.torch

NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 4 + 3 * rank for rank in range(RANKS)]
MAX_ROWS = 16
DTYPES = torch.float32, torch.float16, torch.bfloat16
ELEMENTS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float4_e2m1fn": torch.float4_e2m1fn_x2,
}
SCALES = {"float32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e8m0fnu": torch.float8_e8m0fnu}


def make_group(**changes):
    return torch_model.make_group(**{"hidden_dim": HIDDEN, "max_alignment": 128, "max_tokens_per_rank": MAX_ROWS, **changes})


def formats(**options):
    """The formats with their encode_scale as a tensor."""
    made = format_model.formats(**options)
    return [
        each if each.encode_scale is None else dataclasses.replace(each, encode_scale=on_device(torch.tensor(each.encode_scale)))
        for each in made
    ]


def as_numpy(tensor):
    """float32 and int32 as they are, others as bytes."""
    tensor = tensor.detach().cpu()
    return (tensor if tensor.dtype in (torch.float32, torch.int32) else tensor.view(torch.uint8)).numpy()


def in_numpy(row_format):
    """A format whose encode_scale the definitions take."""
    scale = row_format.encode_scale
    return row_format if scale is None else dataclasses.replace(row_format, encode_scale=as_numpy(scale))


class Data:
    """topk_idx, weights and tokens of each rank, in numpy; `own` are this rank's, on the device."""

    def __init__(self, dtype, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.idx, self.tokens, self.weights = [], [], []
        for count in NUM_TOKENS:
            idx = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :2]
            self.idx.append(torch.where(torch.rand(idx.shape, generator=generator) < 0.2, -1, idx).numpy())
            exponents = torch.randint(-6, 6, (count, HIDDEN // 16), generator=generator).repeat_interleave(16, 1)
            tokens = (torch.randn(count, HIDDEN, generator=generator) * torch.exp2(exponents.float())).to(dtype)
            self.tokens.append(tokens.float().numpy())
            self.weights.append(torch.rand(count, 2, generator=generator).numpy())
            if len(self.idx) - 1 == RANK:
                self.own = on_device(torch.tensor(self.idx[RANK])), on_device(tokens), on_device(torch.tensor(self.weights[RANK]))

    def parts(self, row_format):
        """By part, and then by rank."""
        return list(zip(*[format_model.parts_of(in_numpy(row_format), tokens) for tokens in self.tokens]))

    def given(self, row_format):
        """This rank's rows as a caller gives them whose framework has quantised them."""
        dtypes = ELEMENTS[row_format.dtype], SCALES[row_format.scale_dtype], torch.float32
        tensors = [torch.from_numpy(part[RANK]) for part in self.parts(row_format)]
        return tuple(on_device(each.view(dtype) if each.dtype == torch.uint8 else each) for each, dtype in zip(tensors, dtypes))


def calls(group, idx, weights, alignment=1):
    """Each call, as a function that returns a plan, which rows the plan has, and what arrives. The last is the rank-major one."""

    def dispatch(tokens, **options):
        plan = epx.torch.prepare(group, idx, alignment=alignment)
        return plan, *epx.torch.dispatch(plan, tokens, weights, num_rows=group.max_recv_tokens_per_rank, **options)

    def prepare_dispatch(tokens, **options):
        return epx.torch.prepare_dispatch(group, tokens, idx, weights, alignment=alignment, **options)

    def rank_major(tokens, **options):
        return epx.torch.dispatch_rank_major(group, tokens, idx, weights, **options)

    return dispatch, prepare_dispatch, *([rank_major] if ranks.num_nodes() == 1 else [])


def in_use(plan):
    """The places of rows that hold a token or are pads, among N or P * M."""
    if isinstance(plan, epx.torch.RankMajorPlan):
        return numpy.flatnonzero(plan.is_row.cpu().numpy())
    return numpy.arange(plan.num_rows)


def wanted_rows(plan, data, arrays, alignment=1):
    """Those of in_use() that should have arrived; `arrays` of each rank."""
    if isinstance(plan, epx.torch.RankMajorPlan):
        rows = reference.RankMajorExchange(data.idx, EXPERTS, MAX_ROWS).scatter(arrays)[RANK]
        return rows.reshape(RANKS * MAX_ROWS, *rows.shape[2:])[in_use(plan)]
    return reference.Exchange(data.idx, EXPERTS, alignment).scatter(arrays)[RANK]


class Formats(unittest.TestCase):
    def compare(self, plan, row_format, received, data, alignment):
        parts = data.parts(row_format)
        self.assertEqual(len(received), row_format.num_parts)
        self.assertEqual(received[0].dtype, ELEMENTS[row_format.dtype])
        self.assertEqual(str(received[1].dtype), f"torch.{row_format.recv_scales_dtype}")
        used = in_use(plan)
        num_rows = len(received[0]) if received[0].dim() == 2 else RANKS * MAX_ROWS
        rows = as_numpy(received[0]).reshape(num_rows, -1)
        numpy.testing.assert_array_equal(rows[used], wanted_rows(plan, data, parts[0], alignment))
        num_scales = row_format.num_scales(HIDDEN)
        scales = format_model.by_rows(row_format.scale_layout, as_numpy(received[1]), num_rows, num_scales)
        numpy.testing.assert_array_equal(scales[used], wanted_rows(plan, data, parts[1], alignment))
        if row_format.has_row_scales:
            numpy.testing.assert_array_equal(
                as_numpy(received[2]).reshape(-1)[used], wanted_rows(plan, data, parts[2], alignment)
            )

    def check(self, group, row_format, dtype, alignment=1):
        data = Data(dtype)
        idx, tokens, weights = data.own
        inputs = [tokens]
        if row_format.encode_scale is None:
            inputs.append(data.given(row_format))
        for call in calls(group, idx, weights, alignment):
            if call.__name__ == "rank_major" and row_format.scale_layout == epx.ScaleLayout.TILES:
                continue  # refused there
            for given in inputs:
                plan, received, row_weights = call(given, format=row_format)
                self.compare(plan, row_format, received, data, alignment)
                self.assertFalse(any(part.requires_grad for part in received))
                if call.__name__ != "rank_major":
                    wanted = reference.Exchange(data.idx, EXPERTS, alignment).scatter_weights(data.weights)[RANK]
                    numpy.testing.assert_array_equal(as_numpy(row_weights)[: len(wanted)], wanted)

    def test_1_quantised_rows_by_the_caller_and_in_the_call(self):
        with make_group() as group:
            for row_format in formats():
                for dtype in DTYPES:
                    with self.subTest(format=row_format, dtype=dtype):
                        self.check(group, row_format, dtype, alignment=4)
            group.check()

    def test_2_layouts_of_scales(self):
        with make_group() as group:
            for row_format in formats(scale_layout="columns") + [
                epx.RowFormat("block128_pow2", scale_layout="packed"),
                epx.RowFormat("mx", scale_layout="packed"),
                epx.RowFormat("mx", scale_layout="tiles"),
                epx.RowFormat("nv", scale_layout="tiles"),
            ]:
                with self.subTest(format=row_format):
                    is_tiled = row_format.scale_layout == epx.ScaleLayout.TILES
                    self.check(group, row_format, torch.float32, alignment=128 if is_tiled else 1)
            group.check()

    def test_3_quantised_wire_and_its_gradients(self):
        """Rows are q * s, and gradients those of a dispatch without a format."""
        with make_group() as group:
            for row_format in formats(wire_only=True):
                for dtype in DTYPES:
                    data = Data(dtype, 3)
                    idx, tokens, weights = data.own
                    leaves = [tokens.requires_grad_(), weights.requires_grad_()]
                    there = [
                        torch.tensor(format_model.round_trip(in_numpy(row_format), each)).to(dtype).float().numpy()
                        for each in data.tokens
                    ]
                    for call in calls(group, idx, weights):
                        with self.subTest(format=row_format, dtype=dtype, call=call.__name__):
                            plan, rows, row_weights = call(tokens, format=row_format)
                            self.assertEqual(rows.dtype, dtype)
                            used = in_use(plan)
                            found = as_numpy(rows.detach().float().flatten(0, -2))[used]
                            numpy.testing.assert_array_equal(found, wanted_rows(plan, data, there))
                            self.compare_gradients(call, leaves, rows, row_weights)
            group.check()

    def compare_gradients(self, call, leaves, rows, row_weights):
        """Of rows or what stands for them, beside those of a dispatch without a format."""
        _, plain, plain_weights = call(leaves[0])
        generator = torch.Generator(device=DEVICE).manual_seed(RANK)
        factor = torch.randn(rows.shape, generator=generator, device=DEVICE).to(rows.dtype)
        row_factor = torch.randn(row_weights.shape, generator=generator, device=DEVICE)
        found = [
            torch.autograd.grad([each, weights], leaves, [factor, row_factor])
            for each, weights in ((rows, row_weights), (plain, plain_weights))
        ]
        self.assertTrue(found[0][0].abs().sum() > 0 or leaves[0].numel() == 0)
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

    def test_4_gradients_of_rows_that_arrive_quantised(self):
        for dtype in (torch.float32, torch.bfloat16):  # which fits the group exactly
            with make_group(max_sidecar_bytes=4, max_token_dtype=str(dtype).removeprefix("torch.")) as group:
                data = Data(dtype, 4)
                idx, tokens, weights = data.own
                leaves = [tokens.requires_grad_(), weights.requires_grad_()]
                sidecar = torch.arange(len(tokens), dtype=torch.float32, device=DEVICE)[:, None]
                for row_format in formats():
                    for call in calls(group, idx, weights):
                        with self.subTest(format=row_format, dtype=dtype, call=call.__name__):
                            plan, received, row_weights, recv_sidecar, wide = call(
                                tokens, format=row_format, with_wide=True, sidecar=sidecar
                            )
                            self.compare(plan, row_format, received, data, 1)
                            self.assertEqual(recv_sidecar.dtype, torch.float32)
                            self.assertFalse(any(part.requires_grad for part in received))
                            self.assertEqual((wide.dtype, wide.shape[-1]), (dtype, HIDDEN))
                            self.assertEqual(wide.untyped_storage().nbytes(), dtype.itemsize)
                            self.compare_gradients(call, leaves, wide, row_weights)
                            # Weights alone have a gradient where rows have none.
                            for given in (tokens.detach(), data.given(row_format)):
                                if row_format.encode_scale is not None and isinstance(given, tuple):
                                    continue
                                _, _, row_weights = call(given, format=row_format)
                                (grad,) = gradients(row_weights.sum(), [weights])
                                self.assertTrue(torch.equal(grad, (idx >= 0).float()))
                group.check()

    def test_5_compiled(self):
        with make_group() as group:
            data = Data(torch.float32, 5)
            idx, tokens, weights = data.own
            leaves = [tokens.requires_grad_(), weights.requires_grad_()]
            every = formats()
            for call in calls(group, idx, weights):
                # Tracing takes the time: those of the fewest and of the most tensors, and the latter alone on several ranks.
                for row_format in (every[0], every[-1])[RANKS > 1 :]:
                    on_wire = dataclasses.replace(row_format, wire_only=True)

                    def program(tokens):
                        plan, received, row_weights, wide = call(tokens, format=row_format, with_wide=True)
                        mask = plan.is_row if isinstance(plan, epx.torch.RankMajorPlan) else (
                            torch.arange(len(row_weights), device=DEVICE) < plan.offsets[-1])
                        _, rows, _ = call(tokens, format=on_wire)
                        rows = torch.where(mask[..., None], rows + wide, 0)
                        kept = torch.where(mask.view(*mask.shape, *[1] * (row_weights.dim() - mask.dim())), row_weights, 0)
                        return mask, received, rows.sin().sum() + kept.sin().sum()

                    graphs, found = Graphs(), []
                    for each in (program, compiled(program, backend=graphs.backend())):
                        mask, received, loss = each(tokens)
                        row_scales = [part[mask] for part in received[2:]]
                        rows = received[0].view(torch.uint8)[mask]
                        found.append((rows, row_scales, loss, gradients(loss, leaves)))
                    with self.subTest(format=row_format, call=call.__name__):
                        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
                        name = {"rank_major": "dispatch_rank_major"}.get(call.__name__, call.__name__) + "_format"
                        self.assertEqual([each for each in graphs.forward[0] if each != "prepare"], [name, name])
            group.check()

    def test_6_gradients_of_combine(self):
        """They are those of out's gradient as it has been on the wire."""
        with make_group() as group:
            data = Data(torch.float32, 8)
            idx, grad_out, weights = data.own
            tokens = torch.ones_like(grad_out)
            for row_format in format_model.formats(wire_only=True):
                if row_format.encode_scale is not None:
                    continue  # refused
                there = on_device(torch.tensor(format_model.round_trip(row_format, data.tokens[RANK])))
                for call in calls(group, idx, weights):
                    plan, rows, row_weights = call(tokens)
                    leaves = [torch.ones_like(rows).requires_grad_(), row_weights.requires_grad_()]

                    def program(expert_out, row_weights, **options):
                        if isinstance(plan, epx.torch.RankMajorPlan):
                            summed = expert_out * row_weights.sum(-1, keepdim=True)
                            return epx.torch.combine_rank_major(plan, summed, **options)
                        return epx.torch.combine(plan, expert_out, row_weights, **options)

                    used = in_use(plan)
                    with self.subTest(format=row_format, call=call.__name__):
                        wanted = torch.autograd.grad(program(*leaves), leaves, there)
                        self.assertFalse(len(grad_out) and torch.equal(there, grad_out))
                        # Tracing takes the time, so one format is compiled, and for the backend that runs graphs as they are.
                        traced = [compiled(program, backend=Graphs().backend())] if row_format.amax_floor == 0.5 else []
                        for each in (program, *traced):
                            found = torch.autograd.grad(each(*leaves, grad_format=row_format), leaves, grad_out)
                            rows = [[part.flatten(0, part.dim() - 2)[used] for part in grads[:1]] for grads in (found, wanted)]
                            torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=0)
                            kept = [grads[1].flatten(0, -2 if grads[1].dim() > 1 else -1)[used] for grads in (found, wanted)]
                            torch.testing.assert_close(kept[0], kept[1], rtol=1e-6, atol=1e-6)
            group.check()

    def test_7_sums(self):
        """What travels home is quantised, in combine and in the backward of dispatch; gradients pass straight through."""
        # A group of 8 bits has room for nothing else.
        for max_dtype, dtype in (("float32", torch.float32), ("float32", torch.bfloat16), ("float8_e4m3fn", torch.float32)):
            with make_group(max_token_dtype=max_dtype) as group:
                data = Data(dtype, 10)
                idx, tokens, weights = data.own
                leaves = [tokens.requires_grad_(), weights.requires_grad_()]
                exchange = reference.Exchange(data.idx, EXPERTS)
                rank_major = reference.RankMajorExchange(data.idx, EXPERTS, MAX_ROWS)
                row_weights = exchange.scatter_weights(data.weights)
                for row_format in format_model.sum_formats():
                    options, there = dict(grad_format=row_format), data.tokens
                    if max_dtype != "float32":
                        options["format"] = row_format
                        there = [format_model.round_trip(row_format, each) for each in there]
                    rows = exchange.scatter(there)

                    def home(partial_sums):
                        return on_device(torch.tensor(format_model.sums(row_format, partial_sums[RANK]))).to(dtype)

                    for call in calls(group, idx, weights):
                        with self.subTest(format=row_format, max_dtype=max_dtype, call=call.__name__):
                            plan, received, received_weights = call(tokens, **options)
                            if isinstance(plan, epx.torch.RankMajorPlan):
                                wanted_out = wanted_grad = home(rank_major.partial_sums(rank_major.scatter(there)))
                                combine = functools.partial(epx.torch.combine_rank_major, plan)
                                arguments = [received.detach().requires_grad_()]
                            else:
                                wanted_out = home(exchange.partial_sums(rows, row_weights))
                                wanted_grad = home(exchange.partial_sums(rows))
                                combine = functools.partial(epx.torch.combine, plan)
                                arguments = [each.detach().requires_grad_() for each in (received, received_weights)]
                            out = combine(*arguments, format=row_format, grad_format=row_format)
                            torch.testing.assert_close(out, wanted_out, rtol=0, atol=0)
                            found = torch.autograd.grad(
                                [received, received_weights], leaves, [received.detach(), torch.ones_like(received_weights)]
                            )
                            torch.testing.assert_close(found, (wanted_grad, (idx >= 0).float()), rtol=0, atol=0)
                            if max_dtype == "float32":
                                plain = combine(*arguments, grad_format=row_format)
                                self.assertFalse(len(out) and torch.equal(out, plain))
                                grads = [torch.autograd.grad(each, arguments, tokens.detach()) for each in (out, plain)]
                                for pair in zip(*grads):
                                    pair = [each.flatten(0, max(each.dim() - 2, 0))[in_use(plan)] for each in pair]
                                    torch.testing.assert_close(*pair, rtol=0, atol=0)
                group.check()

    def test_8_sums_compiled(self):
        wire, narrow = epx.RowFormat("mx", wire_only=True), epx.RowFormat("block128", amax_floor=0, wire_only=True)
        with make_group() as group:
            data = Data(torch.float32, 11)
            idx, tokens, weights = data.own
            leaves = [tokens.requires_grad_(), weights.requires_grad_()]
            for call in calls(group, idx, weights)[1:]:

                def program(tokens):
                    plan, rows, row_weights = call(tokens, grad_format=narrow)
                    if isinstance(plan, epx.torch.RankMajorPlan):
                        rows = rows * torch.where(plan.topk_idx >= 0, row_weights, 0).sum(-1, keepdim=True)
                        return epx.torch.combine_rank_major(plan, rows, format=wire)
                    return epx.torch.combine(plan, rows, row_weights, format=wire)

                found = []
                for each in (program, compiled(program, backend=Graphs().backend())):
                    out = each(tokens)
                    found.append((out, torch.autograd.grad(out, leaves, tokens.detach())))
                with self.subTest(call=call.__name__):
                    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
            group.check()

    def test_9_without_a_format(self):
        """The operators are those of before. Rows of few bits are copied and have no gradient, and their weights have theirs."""
        with make_group() as group:
            data = Data(torch.float32, 6)
            idx, tokens, weights = data.own
            with count_calls() as counts:
                epx.torch.prepare_dispatch(group, tokens, idx, weights)
            self.assertEqual(dict(counts), {"prepare_dispatch": 1})
            plan = epx.torch.prepare(group, idx)
            codes = [format_model.parts_of(epx.RowFormat("nv"), each)[0] for each in data.tokens]
            for dtype in ELEMENTS.values():
                rows, _ = epx.torch.dispatch(plan, on_device(torch.tensor(codes[RANK])).view(dtype))
                self.assertEqual(rows.dtype, dtype)
                numpy.testing.assert_array_equal(as_numpy(rows), wanted_rows(plan, data, codes))
            leaf = weights.requires_grad_()
            given = on_device(torch.tensor(codes[RANK])).view(torch.float8_e4m3fn)
            for call in calls(group, idx, leaf):
                plan, rows, row_weights = call(given)
                into = []
                if call.__name__ == "dispatch":
                    into.append(epx.torch.dispatch(plan, given, leaf, recv_tokens=torch.empty_like(rows)))
                if call.__name__ == "rank_major":
                    memory = torch.empty_like(rows)
                    into.append(epx.torch.dispatch_rank_major(group, given, idx, leaf, recv_tokens=memory)[1:])
                for rows, row_weights in ((rows, row_weights), *into):
                    self.assertFalse(rows.requires_grad)
                    (grad,) = torch.autograd.grad(row_weights, [leaf], torch.ones_like(row_weights))
                    self.assertTrue(torch.equal(grad, (idx >= 0).float()))
                words = "tokens is float8_e4m3fn and requires a gradient"
                ranks.refused(self, words, lambda: call(given.clone().requires_grad_()))
            group.check()
        with make_group(max_token_dtype="float8_e4m3fn") as group:
            plan = epx.torch.prepare(group, idx)
            words = "the gradient of topk_weights with a column of float16"
            ranks.refused(self, words, lambda: epx.torch.dispatch(plan, given, leaf))
            wire = epx.RowFormat("mx", wire_only=True)
            _, row_weights = epx.torch.dispatch(plan, given, leaf, grad_format=wire)
            (grad,) = torch.autograd.grad(row_weights, [leaf], torch.ones_like(row_weights))
            self.assertTrue(torch.equal(grad, (idx >= 0).float()))
            group.check()


class Layer(unittest.TestCase):
    def test_dispatch_format(self):
        """The bits are those of tokens that were quantised and dequantised before, forward and backward."""
        with make_group() as group:
            data = Data(torch.float32, 12)
            _, tokens, _ = data.own
            logits = on_device(torch.randn(len(tokens), EXPERTS, generator=torch.Generator().manual_seed(RANK)))
            config = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, 16))
            for row_format in (epx.RowFormat("block128", amax_floor=0.5, wire_only=True), epx.RowFormat("nv", wire_only=True)):
                there = on_device(torch.tensor(format_model.round_trip(row_format, data.tokens[RANK])))
                found = []
                for given, options in ((tokens, dict(dispatch_format=row_format)), (there, {})):
                    layer = epx.torch.MoELayer(group, **config, **options)
                    leaves = [given.detach().requires_grad_(), logits.detach().requires_grad_(), *layer.expert_parameters()]
                    out = layer(leaves[0], logits=leaves[1])
                    found.append((out, *torch.autograd.grad(out, leaves, tokens.detach())))
                    layer.destroy()
                with self.subTest(format=row_format):
                    self.assertFalse(len(tokens) and torch.equal(tokens, there))
                    torch.testing.assert_close(*found, rtol=0, atol=0)
            for words, row_format in format_model.refused_on_wire("dispatch_format", sums=False).items():
                ranks.refused(self, words, lambda: epx.torch.MoELayer(group, **config, dispatch_format=row_format))
            group.check()


class Refusals(unittest.TestCase):
    def test_1_sentences(self):
        """The sentences are those of numpy arrays, but for what tensors alone have."""
        block = epx.RowFormat("block128")
        with make_group() as group:
            data = Data(torch.float32, 7)
            idx, x, _ = data.own
            plan = epx.torch.prepare(group, idx)
            codes, scales = data.given(block)
            dispatch, rank_major = epx.torch.dispatch, epx.torch.dispatch_rank_major
            rows, _ = dispatch(plan, x)
            leaf = torch.ones_like(x).requires_grad_()
            for words, call in {
                "scales has strides": lambda: rank_major(
                    group, (codes, on_device(torch.ones(2, 9)).t()), idx, format=block
                ),
                "recv_tokens and format are given": lambda: dispatch(plan, x, recv_tokens=rows, format=block),
                "tokens requires a gradient, which PyTorch would cast to float8_e4m3fn": lambda: dispatch(
                    plan, leaf, format=block
                ),
                "which the rank-major layout does not have": lambda: rank_major(
                    group, x, idx, format=epx.RowFormat("mx", scale_layout="tiles")
                ),
            }.items():
                ranks.refused(self, words, call)
            arrays = x, codes, scales, scales.half(), on_device(torch.ones(2))
            cases = format_model.refused_by_dispatch(*arrays, lambda tensor, count: tensor[:, :count].contiguous())
            for words, tokens, options in (*cases, *format_model.refused_with_wide(x)):
                for call in calls(group, idx, None):
                    ranks.refused(self, words, lambda: call(tokens, **options))
            rank_major_plan, by_rank, _ = rank_major(group, x, idx)
            for words, row_format in format_model.refused_on_wire("grad_format", sums=False).items():
                ranks.refused(self, words, lambda: epx.torch.combine(plan, rows, grad_format=row_format))
                ranks.refused(self, words, lambda: epx.torch.combine_rank_major(rank_major_plan, by_rank, grad_format=row_format))
            for words, row_format in format_model.refused_on_wire("format", sums=True).items():
                ranks.refused(self, words, lambda: epx.torch.combine(plan, rows, format=row_format))
                ranks.refused(self, words, lambda: epx.torch.combine_rank_major(rank_major_plan, by_rank, format=row_format))
            for words, row_format in format_model.refused_on_wire("grad_format", sums=True).items():
                for call in calls(group, idx, None):
                    ranks.refused(self, words, lambda: call(x, grad_format=row_format))
            with torch.no_grad():
                dispatch(plan, leaf, format=block)
            group.check()

    def test_2_gradients_that_do_not_fit_the_group(self):
        """The forward refuses them, on its rank alone; without gradients the same call is made."""
        block, data = epx.RowFormat("block128"), Data(torch.float32, 9)
        idx, x, weights = data.own
        given = data.given(block)
        for max_dtype, words, tokens, options in format_model.refused_gradients(x, given):
            with make_group(max_token_dtype=max_dtype) as group:
                with_gradient = weights.detach().requires_grad_()
                for call, plain in zip(calls(group, idx, with_gradient), calls(group, idx, weights)):
                    with self.subTest(max_dtype=max_dtype, words=words, call=call.__name__):
                        ranks.refused(self, words, lambda: call(tokens, **options))
                        plain(tokens, **{**options, "grad_format": None})
                group.check()

    def test_3_gradients_of_combine_that_do_not_fit_the_group(self):
        """Likewise."""
        data, wire = Data(torch.float32, 13), epx.RowFormat("mx", wire_only=True)
        idx, x, _ = data.own
        for max_dtype, words, hidden, options in format_model.refused_gradients_of_combine():
            with make_group(max_token_dtype=max_dtype) as group:
                for call in calls(group, idx, None):
                    plan, rows, _ = call(x, format=wire)
                    is_rank_major = isinstance(plan, epx.torch.RankMajorPlan)
                    combine = epx.torch.combine_rank_major if is_rank_major else epx.torch.combine
                    expert_out = torch.ones(*rows.shape[:-1], hidden, device=DEVICE)
                    with self.subTest(max_dtype=max_dtype, words=words, call=call.__name__):
                        ranks.refused(self, words, lambda: combine(plan, expert_out.clone().requires_grad_(), **options))
                        combine(plan, expert_out, **{**options, "grad_format": None})
                group.check()


if __name__ == "__main__":
    torch_model.main()
