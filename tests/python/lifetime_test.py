# SPDX-License-Identifier: Apache-2.0
"""When groups die: dropped, destroyed, at the end of the interpreter, by an exception, in a child of fork(), and with a killed
peer."""

import copy
import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import unittest

import ranks

ranks.require("numpy")
import numpy

import epx

CONFIG = dict(num_experts=2, max_tokens_per_rank=4, hidden_dim=8, max_top_k=2, max_token_dtype="float32", transport="host")
INDEX = numpy.array([[0, 1]])
TOKENS = numpy.ones((1, 8), numpy.float32)


def make_group(**changes):
    return epx.Group(epx.bootstrap.local(), **{**CONFIG, **changes})


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_mappings():
    with open("/proc/self/maps", encoding="ascii") as file:
        return sum(1 for _ in file)


class Lifetime(unittest.TestCase):
    def test_1000_groups_dropped(self):
        def create(count):
            for _ in range(count):
                group = make_group()
                group.dispatch(group.prepare(INDEX), TOKENS)
                del group
            gc.collect()
            return resident_bytes(), num_mappings(), len(os.listdir("/proc/self/fd"))

        first = create(100)
        last = create(1000)
        self.assertLess(last[0] - first[0], 4 << 20)
        self.assertLessEqual(last[1] - first[1], 8)
        self.assertEqual(last[2], first[2])

    def test_dropped_while_referred_to(self):
        group = make_group()
        plan = group.prepare(INDEX)
        group = [group]
        group.append(group)  # a cycle, which only the collector ends
        del group
        gc.collect()
        fresh = make_group()
        with self.assertRaises(epx.EventError):  # the plan of a group that is gone
            fresh.dispatch(plan, TOKENS, num_rows=plan.num_rows)
            fresh.check()
        fresh.destroy()
        fresh.destroy()
        self.assertIn("destroyed", repr(fresh))
        with self.assertRaises(epx.InvalidArgumentError):
            fresh.check()

    def test_fork(self):
        group = make_group()
        plan = group.prepare(INDEX)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                group.dispatch(plan, TOKENS)
            except epx.InvalidArgumentError as error:
                code = 0 if "fork" in str(error) else 2
            group.destroy()
            os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        group.dispatch(plan, TOKENS)
        group.check()
        group.destroy()

    def test_fork_whose_child_raises(self):
        """The child's end leaves the parent's group alone, and tells its own exception alone."""
        code, output = ranks.finish(ranks.start(__file__, "--child-raises"))
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("Traceback"), 1, output)
        self.assertIn("the child's program has failed", output)

    def test_copies(self):
        group = make_group()
        for copied in (copy.copy(group), copy.deepcopy({"group": group})["group"]):
            self.assertIs(copied, group)
        with self.assertRaisesRegex(TypeError, "a group cannot be pickled"):
            pickle.dumps(group)
        bootstrap = epx.bootstrap.local()
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(TypeError, "Bootstrap cannot be copied or pickled"):
                copied(bootstrap)
        group.destroy()

    def test_abort_from_another_thread(self):
        with tempfile.TemporaryDirectory() as directory:
            other = ranks.start(__file__, "--peer-sleeps", directory)
            with epx.bootstrap.from_directory(directory, "job", 0, 2, 30) as bootstrap:
                group = epx.Group(bootstrap, **CONFIG, timeout=60)
            timer = threading.Timer(0.3, group.abort)
            timer.start()
            with self.assertRaises(epx.GroupError) as caught:
                group.prepare(INDEX)
            self.assertEqual(caught.exception.status, epx.Status.ABORTED)
            timer.join()
            group.destroy()
            self.assertEqual(ranks.finish(other)[0], 0)

    def test_killed_peer(self):
        with tempfile.TemporaryDirectory() as directory:
            other = ranks.start(__file__, "--peer-dies", directory)
            with epx.bootstrap.from_directory(directory, "job", 0, 2, 30) as bootstrap:
                group = epx.Group(bootstrap, **CONFIG, timeout=2)
            with self.assertRaises(epx.GroupError) as caught:
                for _ in range(2):
                    group.prepare(INDEX)
            self.assertEqual(caught.exception.culprit, 1)
            self.assertEqual(caught.exception.status, epx.Status.TIMEOUT)
            self.assertEqual(caught.exception.missing, (1,))
            self.assertEqual(caught.exception.operation, epx.Operation.PREPARE)
            group.destroy()
            self.assertEqual(ranks.finish(other)[0], -signal.SIGKILL)

    def test_exception_that_ends_the_interpreter_aborts(self):
        with tempfile.TemporaryDirectory() as directory:
            other = ranks.start(__file__, "--peer-raises", directory)
            with epx.bootstrap.from_directory(directory, "job", 0, 2, 30) as bootstrap:
                group = epx.Group(bootstrap, **CONFIG, timeout=60)
            begin = time.monotonic()
            with self.assertRaises(epx.GroupError) as caught:
                for _ in range(2):
                    group.prepare(INDEX)
            self.assertEqual((caught.exception.status, caught.exception.culprit), (epx.Status.ABORTED, 1))
            self.assertLess(time.monotonic() - begin, 20)  # not the timeout
            group.destroy()
            code, output = ranks.finish(other)
            self.assertEqual(code, 1)
            self.assertIn("ZeroDivisionError", output)

    def test_ends_cleanly_in_any_order(self):
        for ending in ENDINGS:
            with self.subTest(ending=ending):
                code, output = ranks.finish(ranks.start(__file__, "--ending", ending))
                self.assertEqual(code, 3 if ending == "sys_exit" else 0, output)
                self.assertEqual(output.strip(), "")


def end_with_global():
    globals()["kept"] = make_group()


def end_with_cycle():
    cycle = [make_group(), make_group()]
    cycle.append(cycle)


def end_in_a_module():
    sys.modules["builtins"].epx_group = make_group()


def end_in_a_thread_that_waits():
    group = make_group()
    threading.Thread(target=lambda: (time.sleep(0.2), group.prepare(INDEX))).start()


def end_by_sys_exit():
    globals()["kept"] = make_group()
    sys.exit(3)


def end_with_abandoned():
    make_group()


ENDINGS = {
    "global": end_with_global,
    "cycle": end_with_cycle,
    "module": end_in_a_module,
    "thread": end_in_a_thread_that_waits,
    "sys_exit": end_by_sys_exit,
    "abandoned": end_with_abandoned,
}


def run_peer(kind, directory):
    with epx.bootstrap.from_directory(directory, "job", 1, 2, 30) as bootstrap:
        group = epx.Group(bootstrap, **CONFIG, timeout=60)
    if kind == "--peer-sleeps":
        time.sleep(1)
        return
    group.prepare(INDEX)
    if kind == "--peer-dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("the peer's program has failed")


def fork_and_raise():
    group = make_group()
    child = os.fork()
    if child == 0:
        raise ZeroDivisionError("the child's program has failed")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    group.prepare(INDEX)
    group.check()
    sys.exit(code != 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ending"]:
        ENDINGS[sys.argv[2]]()
    elif sys.argv[1:2] == ["--child-raises"]:
        fork_and_raise()
    elif sys.argv[1:2] and sys.argv[1].startswith("--peer"):
        run_peer(sys.argv[1], sys.argv[2])
    else:
        ranks.main()
