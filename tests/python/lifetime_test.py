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


def two_bootstraps(directory):
    return ranks.at_once(*(lambda rank=rank: epx.bootstrap.from_directory(directory, "two", rank, 2, 30) for rank in (0, 1)))


def two_groups():
    """Both ranks of a group as this process."""
    with tempfile.TemporaryDirectory() as directory:
        bootstraps = two_bootstraps(directory)
        groups = ranks.at_once(*(lambda each=each: epx.Group(each, **CONFIG, timeout=60) for each in bootstraps))
        for bootstrap in bootstraps:
            bootstrap.close()
    return groups


def end_in_call(ending):
    """Ends this interpreter while a thread is in a call whose peer does not come."""
    group, _peer = two_groups()

    def call():
        try:
            group.prepare(INDEX)
        except epx.Error as error:
            print("in the thread:", error.status.name, flush=True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    time.sleep(0.3)
    print("main ends", flush=True)
    if ending == "raises":
        raise ZeroDivisionError("the program has failed")
    if ending == "leaves with":
        try:
            with group:
                raise ValueError
        except ValueError:
            thread.join(30)
    if ending == "aborts":
        group.abort()
        group.destroy()
        thread.join(30)
    if ending != "returns":
        sys.exit(3)


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

    def test_interpreter_ends_while_a_thread_is_in_a_call(self):
        for ending, right_code in {"returns": 0, "exits": 3, "raises": 1, "leaves with": 3, "aborts": 3}.items():
            with self.subTest(ending=ending):
                code, output = ranks.finish(ranks.start(__file__, "--in-call", ending))
                self.assertEqual(code, right_code, output)
                self.assertIn("main ends", output)
                if ending in ("leaves with", "aborts"):
                    self.assertRegex(output, "in the thread: (ABORTED|INVALID_ARGUMENT)")  # refused, where it comes too late

    def test_destroy_from_another_thread(self):
        group, peer = two_groups()
        timer = threading.Timer(0.1, group.destroy)
        timer.start()
        with self.assertRaises(epx.Error) as caught:
            group.prepare(INDEX)
        # On a busy machine the call may come too late, and is refused.
        self.assertIn(caught.exception.status, (epx.Status.ABORTED, epx.Status.INVALID_ARGUMENT))
        timer.join()
        with self.assertRaises(epx.GroupError) as caught:
            peer.prepare(INDEX)
        self.assertEqual((caught.exception.status, caught.exception.culprit), (epx.Status.ABORTED, 0))
        peer.destroy()

    def check_interrupted(self, wait):
        """Has the waiting call end by Ctrl-C soon."""
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            wait()
        self.assertLess(time.monotonic() - begin, 3)  # 0.2 s, the test's timer and a busy machine; the timeout is 60 s

    def test_interrupts(self):
        def raise_interrupt(_number, _frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, raise_interrupt)
        with tempfile.TemporaryDirectory() as directory:
            for rank in (0, 1):
                self.check_interrupted(lambda: epx.bootstrap.from_directory(directory, "alone", rank, 2, 60))
            self.assertEqual(os.listdir(directory), [])
            group, peer = two_groups()
            self.check_interrupted(lambda: group.prepare(INDEX))
            with self.assertRaisesRegex(epx.GroupError, "rank 0 was interrupted in prepare"):
                peer.prepare(INDEX)
            group.destroy()
            peer.destroy()
            # A rank that is interrupted while it creates its group, and a peer that comes later.
            bootstraps = two_bootstraps(directory)
            self.check_interrupted(lambda: epx.Group(bootstraps[0], **CONFIG, timeout=60))
            with self.assertRaisesRegex(epx.Error, "rank 0 was interrupted"):
                epx.Group(bootstraps[1], **CONFIG, timeout=60)
            for bootstrap in bootstraps:
                bootstrap.close()
            self.assertEqual(os.listdir(directory), [])

    def test_two_signals_at_once(self):
        """Both handlers raise while a call waits. One exception ends the call, and the next signal is heard as well."""

        def raise_interrupt(_number, _frame):
            raise KeyboardInterrupt

        def raise_other(_number, _frame):
            raise ZeroDivisionError

        signal.signal(signal.SIGALRM, raise_interrupt)
        signal.signal(signal.SIGUSR1, raise_other)

        def send_both():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGALRM)

        for _ in range(3):
            group, peer = two_groups()
            timer = threading.Timer(0.2, send_both)
            timer.start()
            begin = time.monotonic()
            with self.assertRaises((KeyboardInterrupt, ZeroDivisionError)):
                try:
                    group.prepare(INDEX)
                finally:
                    timer.join()  # a signal that the call has not heard is heard here
            self.assertLess(time.monotonic() - begin, 3)
            group.destroy()
            peer.destroy()
        group, peer = two_groups()
        self.check_interrupted(lambda: group.prepare(INDEX))
        group.destroy()
        peer.destroy()

    def test_handler_that_destroys(self):
        """A handler destroys the group whose call waits, in the thread that waits."""
        group, peer = two_groups()
        signal.signal(signal.SIGALRM, lambda *_: group.destroy())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with self.assertRaises(epx.GroupError) as caught:
            group.prepare(INDEX)
        self.assertLess(time.monotonic() - begin, 3)
        self.assertEqual(caught.exception.status, epx.Status.ABORTED)
        with self.assertRaises(epx.GroupError):
            peer.prepare(INDEX)
        peer.destroy()

    def test_interrupted_in_a_store(self):
        """The peers of a rank that is interrupted in an all-gather by a store find its exception there."""
        store = {}

        def get(key, seconds):
            deadline = time.monotonic() + seconds
            while key not in store and time.monotonic() < deadline:
                time.sleep(0.001)
            return store.get(key)

        def bootstrap(rank, prefix="interrupted"):
            return epx.bootstrap.from_store(rank, 2, prefix, [], put=store.__setitem__, get=get, delete=store.pop)

        def raise_interrupt(_number, _frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, raise_interrupt)
        self.check_interrupted(lambda: epx.Group(bootstrap(0), **CONFIG, timeout=60))
        with self.assertRaisesRegex(epx.Error, "rank 0 has failed: KeyboardInterrupt"):
            epx.Group(bootstrap(1), **CONFIG, timeout=60)
        self.assertIn("rank 0", store["interrupted/failure"].decode())  # a peer that is told puts no sentence of its own
        # A wait of C has heard Ctrl-C, and the rank comes to an all-gather of Python to tell the others.
        epx._interrupt._raised.append(KeyboardInterrupt())
        with self.assertRaises(KeyboardInterrupt):
            epx.Group(bootstrap(0, "heard"), **CONFIG, timeout=60)
        self.assertIn("heard/failure", store)
        groups = ranks.at_once(*(lambda rank=rank: epx.Group(bootstrap(rank, "good"), **CONFIG, timeout=60) for rank in (0, 1)))
        ranks.at_once(*(lambda group=group: group.prepare(INDEX) for group in groups))
        for group in groups:
            group.destroy()

    def test_signals_whose_handler_does_not_raise(self):
        """They run while a call waits, and do not end it."""
        heard = []
        signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
        group, peer = two_groups()
        late = threading.Timer(0.4, peer.prepare, (INDEX,))
        late.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        group.prepare(INDEX)
        late.join()
        self.assertEqual(heard, [1])
        group.destroy()
        peer.destroy()

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

    def test_open_bootstrap_leaves_no_files(self):
        for ending in BOOTSTRAP_ENDINGS:
            with self.subTest(ending=ending), tempfile.TemporaryDirectory() as directory:
                others = [ranks.start(__file__, "--open-bootstrap", ending, directory, str(rank)) for rank in range(2)]
                for other in others:
                    code, output = ranks.finish(other)
                    self.assertEqual(code, 1 if ending == "raises" else 0, output)
                # What a thread still uses is not taken from it. The next start removes those files.
                self.assertEqual(os.listdir(directory), ["epx-job"] if ending == "in_use" else [])


def end_with_open_bootstrap(ending, directory, rank):
    bootstrap = epx.bootstrap.from_directory(directory, "job", rank, 2, 30)
    group = epx.Group(bootstrap, **CONFIG, timeout=60)
    if ending == "kept":
        globals()["kept"] = bootstrap, group
    elif ending == "dropped":
        del bootstrap
        gc.collect()
    elif ending == "in_use" and rank == 0:  # by a creation to which the peer, which has left, does not come
        threading.Thread(target=lambda: epx.Group(bootstrap, **CONFIG, timeout=60), daemon=True).start()
        deadline = time.monotonic() + 30
        while not bootstrap._num_users and time.monotonic() < deadline:
            time.sleep(0.01)
        while any(".1." in name for name in os.listdir(f"{directory}/epx-job")) and time.monotonic() < deadline:
            time.sleep(0.01)
    elif ending == "raises":
        globals()["kept"] = bootstrap
        raise ZeroDivisionError("the program has failed")


BOOTSTRAP_ENDINGS = ("kept", "dropped", "raises", "in_use")


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
    elif sys.argv[1:2] == ["--in-call"]:
        end_in_call(sys.argv[2])
    elif sys.argv[1:2] == ["--open-bootstrap"]:
        end_with_open_bootstrap(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["--child-raises"]:
        fork_and_raise()
    elif sys.argv[1:2] and sys.argv[1].startswith("--peer"):
        run_peer(sys.argv[1], sys.argv[2])
    else:
        ranks.main()
