# SPDX-License-Identifier: Apache-2.0
"""What epx.torch does on GPUs alone: CUDA graphs, streams, tensors on another GPU, many groups. EPX_TEST_DEVICE=cuda, see
ranks.py."""

import ctypes
import gc
import os
import time
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch_model import DEVICE, HIDDEN, INNER, RANK, RANKS, Data, make_group, on_device, single

import epx
import epx.moe
import epx.torch

M_TRIM_THRESHOLD = -1  # malloc.h


class Gpu(unittest.TestCase):
    def test_1_graphs(self):
        """Forward and backward of operations and of a layer in one graph, replayed with other routing."""
        with make_group() as group:
            layer = epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER))
            rows = group.max_recv_tokens_per_rank
            inputs = [
                on_device(Data([6] * RANKS, 2, seed=1).idx[RANK]),
                torch.zeros(6, HIDDEN, device=DEVICE, requires_grad=True),
            ]

            def program(idx, tokens):
                plan = epx.torch.prepare(group, idx)
                received, _ = epx.torch.dispatch(plan, tokens, num_rows=rows)
                out = epx.torch.combine(plan, received) + layer(tokens)
                if ranks.num_nodes() == 1:
                    by_rank, received_by_rank, _ = epx.torch.dispatch_rank_major(group, tokens, idx, max_rows=8)
                    out = out + 2 * epx.torch.combine_rank_major(by_rank, received_by_rank)
                return out

            def step(idx, tokens):
                out = program(idx, tokens)
                return out.detach(), *torch.autograd.grad(out.sin().sum(), [tokens, layer.first_weight, layer.gate_weight])

            step(*inputs)  # loads kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step(*inputs)
            for seed in (2, 3, 4):
                data = Data([6] * RANKS, 2, seed=seed)
                with torch.no_grad():
                    inputs[0].copy_(on_device(data.idx[RANK]))
                    inputs[1].copy_(single(data.tokens[RANK]))
                graph.replay()
                torch.cuda.synchronize()
                found = [each.clone() for each in captured]
                torch.testing.assert_close(found, list(step(*inputs)), rtol=1e-5, atol=1e-5)
                torch.cuda.synchronize()
            group.check()
            del graph, captured
            layer.destroy()

    def test_1b_graphs_in_fp8(self):
        """Graphs with and without what quantises the weights, which change between replays."""
        with make_group(hidden_dim=128, max_token_dtype="bfloat16") as group:
            options = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(128, 256), recipe="fp8", dtype=torch.bfloat16)
            generator = torch.Generator().manual_seed(RANK)
            tokens = torch.randn(6, 128, generator=generator).bfloat16().to(DEVICE).requires_grad_()
            for is_kept in (False, True):
                layer, twin = (epx.torch.MoELayer(group, **options) for _ in range(2))

                def step(layer):
                    out = layer(tokens)
                    return out.detach(), *torch.autograd.grad(out.float().sin().sum(), [tokens, layer.first_weight])

                if is_kept:
                    layer.quantise_parameters()
                step(layer)  # loads kernels
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = step(layer)
                for factor in (1, 2, -1):
                    with torch.no_grad():
                        layer.first_weight.mul_(factor)
                    if is_kept:
                        layer.quantise_parameters()
                    graph.replay()
                    torch.cuda.synchronize()
                    twin.load_state_dict(layer.state_dict())
                    torch.testing.assert_close(list(captured), list(step(twin)), rtol=1e-2, atol=1e-2)
                torch.cuda.synchronize()
                group.check()
                del graph, captured
                layer.destroy(), twin.destroy()

    def test_2_current_stream(self):
        with make_group() as group:
            data = Data([8] * RANKS, 2, seed=5)
            idx, tokens = on_device(data.idx[RANK]), single(data.tokens[RANK])
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # what follows must wait for it, as it is on the same stream
                late = tokens * 2
                plan = epx.torch.prepare(group, idx)
                received, _ = epx.torch.dispatch(plan, late, num_rows=group.max_recv_tokens_per_rank)
                out = epx.torch.combine(plan, received)
            torch.cuda.current_stream().wait_stream(stream)
            routes = on_device((data.idx[RANK] >= 0).sum(1, keepdim=True))
            torch.testing.assert_close(out, 2 * tokens * routes)
            group.check()

    def test_3_another_gpu(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("one GPU")
        with make_group() as group:
            other = torch.device("cuda", (DEVICE.index + 1) % torch.cuda.device_count())
            with self.assertRaisesRegex(
                epx.InvalidArgumentError, f"topk_idx is on {other}; the tensors of this group are on {DEVICE}"
            ):
                epx.torch.prepare(group, torch.zeros(1, 1, dtype=torch.int32, device=other))
            with torch.cuda.device(other):  # the group's GPU counts, and not the current one
                plan = epx.torch.prepare(group, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE))
                layer = epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER))
                layer(torch.ones(2, HIDDEN, device=DEVICE)).sum().backward()
            self.assertEqual(plan.counts.device, DEVICE)
            torch.cuda.synchronize(DEVICE)
            layer.destroy()
            group.check()

    def test_4_bfloat16_layer(self):
        with make_group(max_token_dtype="bfloat16", hidden_dim=64) as group:
            options = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(64, 32), seed=3)
            layer = epx.torch.MoELayer(group, dtype=torch.bfloat16, **options)
            tokens = torch.randn(9, 64, generator=torch.Generator().manual_seed(RANK)).bfloat16().to(DEVICE).requires_grad_()
            out = layer(tokens)
            out.float().pow(2).sum().backward()
            with epx.torch.Group(epx.bootstrap.local(), **torch_model.config(transport="host", hidden_dim=64)) as alone:
                whole = epx.torch.MoELayer(alone, **options)
                source = tokens.detach().float().cpu().requires_grad_()
                wanted = whole(source)
                wanted.pow(2).sum().backward()
            torch.testing.assert_close(out.float().cpu(), wanted, rtol=5e-2, atol=2e-2)
            torch.testing.assert_close(tokens.grad.float().cpu(), source.grad, rtol=1e-1, atol=5e-2)
            torch.cuda.synchronize()
            layer.destroy()

    @unittest.skipIf(ranks.shares_gpu(), "memory in use of a GPU is that of all ranks that share it")
    def test_5_groups_created_and_dropped(self):
        def create(count):
            for _ in range(count):
                group = make_group()
                plan = epx.torch.prepare(group, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
                rows, _ = epx.torch.dispatch(plan, ones)
                del group, plan, rows
            gc.collect()
            epx.torch.Group(epx.bootstrap.local(), **torch_model.config(transport="host")).destroy()  # frees the last one
            time.sleep(0.5)  # threads that nobody waits for end
            free, total = torch.cuda.mem_get_info(DEVICE)
            with open("/proc/self/statm", encoding="ascii") as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            return total - free, resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        # NCCL's thread that makes a communicator allocates 40 MB for a moment. glibc may keep that in each of its arenas, and
        # rank 0, which has one thread of NCCL more, uses more arenas.
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 128 << 10)
        ones = torch.ones(1, HIDDEN, device=DEVICE)
        first, last = create(5), create(50)
        self.assertLess(last[0] - first[0], 8 << 20)
        self.assertLess(last[1] - first[1], 4 << 20)
        self.assertLessEqual(last[2], first[2], "threads")
        self.assertLessEqual(last[3], first[3], "descriptors")


if __name__ == "__main__":
    if not torch_model.ON_GPU:
        print("skipped: EPX_TEST_DEVICE is not cuda")
        raise SystemExit(ranks.SKIPPED)
    torch_model.main()
