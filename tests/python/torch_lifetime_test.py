# SPDX-License-Identifier: Apache-2.0
"""epx.torch when things die or are used where they must not be: dropped groups, layers and arenas, backwards that outlive their
layer, the end of the interpreter in any order, a killed peer, fork(), two threads. One rank, which starts others. With
EPX_TEST_DEVICE=cuda on the first GPU, which a peer shares."""

import contextlib
import copy
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch_model import DEVICE, ON_GPU, make_group, on_device

import epx
import epx.moe
import epx.torch

HIDDEN = torch_model.HIDDEN


def make_layer(group, inner=6, **options):
    return epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, inner), **options)


def tokens(requires_grad=False):
    return on_device(torch.ones(3, HIDDEN)).requires_grad_(requires_grad)


def used_bytes():
    """Of the process, resident and mapped; on a GPU, of the device."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        sizes = [int(field) * os.sysconf("SC_PAGE_SIZE") for field in file.read().split()]
    if ON_GPU:
        free, total = torch.cuda.mem_get_info(DEVICE)
        return sizes[1], total - free
    return sizes[1], sizes[0]


class Lifetime(unittest.TestCase):
    def test_groups_and_layers_dropped(self):
        def create(count):
            for _ in range(count):
                group = make_group()
                layer = make_layer(group)
                window = group.empty(4, HIDDEN)
                plan, *_ = epx.torch.dispatch_rank_major(group, tokens(), on_device(torch.zeros(3, 1, dtype=torch.int32)))
                layer(tokens()).sum().backward()
                del group, layer, window, plan
            return used_bytes()

        first = create(20 if ON_GPU else 100)
        last = create(50 if ON_GPU else 1000)
        self.assertLess(last[0] - first[0], 8 << 20)
        self.assertLess(last[1] - first[1], 8 << 20)

    def test_layers_dropped_in_a_group_that_lives(self):
        with make_group(max_tokens_per_rank=512) as group:
            sizes = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, 4096))
            arena = epx.torch.Arena(group, **sizes)
            own = arena.info()["total_bytes"] - arena.info()["window_bytes"]
            self.assertGreater(own, 32 << 20)
            del arena
            make_layer(group, 4096)
            first = used_bytes()[1]
            for _ in range(8):
                layer = make_layer(group, 4096)
                layer(tokens()).sum().backward()
                del layer
            self.assertLess(used_bytes()[1] - first, 3 * own)  # those that the next creation frees, and what peers reach
            group.check()

    def test_backward_outlives_its_layer(self):
        with make_group() as group:
            layer = make_layer(group)
            wanted = tokens(True)
            layer(wanted).sum().backward()
            found = tokens(True)
            out = layer(found)
            del layer
            gc.collect()
            make_group().destroy()  # frees what has been dropped, and nobody uses
            out.sum().backward()
            torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=0)

    def test_arena_outlives_its_name(self):
        with make_group() as group:
            arena = epx.torch.Arena(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, 6))
            layer = make_layer(group, arena=arena)
            wanted = layer(tokens()).detach()
            del arena
            gc.collect()
            make_group().destroy()
            torch.testing.assert_close(layer(tokens()).detach(), wanted, rtol=0, atol=0)
            group.check()

    def test_destroyed_after_the_group(self):
        group = make_group()
        layer = make_layer(group)
        arena = epx.torch.Arena(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, 6))
        shared = make_layer(group, arena=arena)
        out = layer(tokens(True))
        group.destroy()
        for each in (shared, arena, layer, layer):
            each.destroy()
        for call in (lambda: layer(tokens()), lambda: out.sum().backward(), lambda: shared(tokens())):
            with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
                call()

    def test_copies_are_refused(self):
        with make_group() as group:
            layer, twin = make_layer(group, seed=1), make_layer(group, seed=2)
            with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
                copy.deepcopy(torch.nn.Sequential(layer))
            twin.load_state_dict(layer.state_dict())
            torch.testing.assert_close(twin(tokens()), layer(tokens()), rtol=0, atol=0)

    @unittest.skipIf(ON_GPU, "CUDA does not work in a child of fork()")
    def test_fork(self):
        group = make_group()
        layer, idx = make_layer(group), torch.zeros(1, 1, dtype=torch.int32)
        child = os.fork()
        if child == 0:
            code = 0
            for call in (lambda: epx.torch.prepare(group, idx), lambda: layer(tokens())):
                try:
                    call()
                    code = 1
                except epx.InvalidArgumentError as error:
                    code |= 0 if "fork" in str(error) else 2
            os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        epx.torch.prepare(group, idx)
        layer(tokens()).sum().backward()
        group.check()
        group.destroy()

    def with_peer(self, kind, timeout):
        """A group of two ranks, of which the other one is a process that does what `kind` says."""
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        peer = ranks.start(__file__, "--peer", kind, directory.name, environment=ranks.peer_environment())
        with epx.bootstrap.from_directory(directory.name, "job", 0, 2, 60) as bootstrap:
            return epx.torch.Group(bootstrap, **torch_model.config(timeout=timeout)), peer

    @unittest.skipIf(ON_GPU, "prepare does not wait for the peer there")
    def test_two_threads(self):
        group, peer = self.with_peer("sleeps", 60)
        idx = torch.zeros(1, 1, dtype=torch.int32)
        waits = threading.Thread(target=lambda: epx.torch.prepare(group, idx))  # for the peer
        waits.start()
        waits.join(0.3)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "another thread is in epx_prepare"):
            epx.torch.prepare(group, idx)
        waits.join()
        epx.torch.prepare(group, idx)  # the refused call has not taken part
        group.check()
        self.assertEqual(ranks.finish(peer), (0, ""))
        group.destroy()

    def test_killed_peer(self):
        # Ranks of several nodes notice a death long before the timeout, which holds for creating the group, too.
        group, peer = self.with_peer("dies", ranks.TIMEOUT_SECONDS if ON_GPU else 2)
        idx = on_device(torch.zeros(1, 1, dtype=torch.int32))
        leaf = on_device(torch.ones(1, HIDDEN)).requires_grad_()
        out, _ = epx.torch.dispatch(epx.torch.prepare(group, idx), leaf, num_rows=2)
        torch_model.wait()
        with self.assertRaises(epx.GroupError) as caught:
            for _ in range(3):  # on a GPU a later call tells
                out.sum().backward(retain_graph=True)
                torch_model.wait()
        self.assertEqual((caught.exception.status, caught.exception.culprit), (epx.Status.TIMEOUT, 1))
        if not ON_GPU:
            self.assertEqual(caught.exception.missing, (1,))
        self.assertEqual(caught.exception.operation, epx.Operation.DISPATCH_BWD)
        with self.assertRaises(epx.GroupError):
            group.check()
        group.destroy()
        self.assertEqual(ranks.finish(peer)[0], -signal.SIGKILL)

    def test_interrupts(self):
        """Ctrl-C while an operation, and its backward, wait for a peer. The layer's would wait in the same calls."""
        if ON_GPU:
            self.skipTest("operations do not wait there")

        def raise_interrupt(_number, _frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, raise_interrupt)
        idx = torch.zeros(1, 1, dtype=torch.int32)
        leaf = torch.ones(1, HIDDEN, requires_grad=True)

        def prepare(group):
            return epx.torch.prepare(group, idx)

        def dispatch(group):
            return epx.torch.dispatch(prepare(group), leaf, num_rows=2)[0]

        for before, waits in ((lambda group: None, lambda group, _: prepare(group)), (dispatch, lambda _, rows: rows.sum().backward())):
            group, peer = groups_of_two()
            results = ranks.at_once(lambda: before(group), lambda: before(peer))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            begin = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                waits(group, results[0])
            self.assertLess(time.monotonic() - begin, 5)
            with self.assertRaisesRegex(epx.GroupError, "rank 0 was interrupted"):
                prepare(peer)
            group.destroy()
            peer.destroy()

    def test_ends_while_a_thread_is_in_a_call(self):
        if ON_GPU:
            self.skipTest("prepare does not wait for the peer there")
        code, output = ranks.finish(ranks.start(__file__, "--in-call"), 120)
        self.assertEqual((code, output.strip()), (0, "main ends"))

    def test_ends_cleanly_in_any_order(self):
        children = {ending: ranks.start(__file__, "--ending", ending) for ending in ENDINGS}
        for ending, child in children.items():
            code, output = ranks.finish(child, 120)
            with self.subTest(ending=ending):
                self.assertEqual((code, output.strip()), (3 if ending == "sys_exit" else 0, ""))


def groups_of_two():
    """Both ranks of a group as this process."""
    with tempfile.TemporaryDirectory() as directory:

        def create(rank):
            with epx.bootstrap.from_directory(directory, "two", rank, 2, 60) as bootstrap:
                return epx.torch.Group(bootstrap, **torch_model.config(timeout=60))

        return ranks.at_once(lambda: create(0), lambda: create(1))


def end_in_a_call():
    """Ends the interpreter while a thread waits for a peer that does not come."""
    group, _peer = groups_of_two()

    def call():
        with contextlib.suppress(epx.Error):
            epx.torch.prepare(group, torch.zeros(1, 1, dtype=torch.int32))

    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.3)
    print("main ends", flush=True)


def end_with_globals():
    group = make_group()
    layer = make_layer(group)
    globals().update(group=group, layer=layer, out=layer(tokens(True)), window=group.empty(3))


def end_with_dropped():
    """A graph, a window, a cycle and a group that nobody refers to are left."""
    layer = make_layer(make_group())
    globals().update(out=layer(tokens(True)), window=make_group().empty(3))
    cycle = [make_layer(make_group()), make_group()]
    cycle.append(cycle)
    make_layer(make_group())(tokens(True)).sum().backward()


def end_in_a_module():
    group = make_group()
    arena = epx.torch.Arena(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, 6))
    sys.modules["builtins"].epx_layer = make_layer(group, arena=arena)


def end_by_sys_exit():
    group = make_group()
    globals().update(layer=make_layer(make_group()), late=make_layer(group))
    group.destroy()
    sys.exit(3)


ENDINGS = {"globals": end_with_globals, "dropped": end_with_dropped, "module": end_in_a_module, "sys_exit": end_by_sys_exit}


def run_peer(kind, directory):
    with epx.bootstrap.from_directory(directory, "job", 1, 2, 60) as bootstrap:
        group = epx.torch.Group(bootstrap, **torch_model.config(timeout=60))
    idx = on_device(torch.zeros(1, 1, dtype=torch.int32))
    if kind == "sleeps":
        threading.Event().wait(1.5)
        epx.torch.prepare(group, idx)
        epx.torch.prepare(group, idx)
        return
    epx.torch.dispatch(epx.torch.prepare(group, idx), on_device(torch.ones(1, HIDDEN)), num_rows=2)
    torch_model.wait()
    if ON_GPU:
        time.sleep(1)  # NCCL's threads may still be sending
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if sys.argv[1:2] == ["--ending"]:
        ENDINGS[sys.argv[2]]()
    elif sys.argv[1:2] == ["--in-call"]:
        end_in_a_call()
    elif sys.argv[1:2] == ["--peer"]:
        run_peer(*sys.argv[2:])
    else:
        torch_model.main()
