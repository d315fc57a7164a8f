# SPDX-License-Identifier: Apache-2.0
"""Groups from mpi4py communicators: the world, halves of it, and a rank that does not come. Run under mpirun."""

import time
import unittest

import ranks

ranks.require("numpy", "mpi4py")
import numpy
from mpi4py import MPI

import epx

WORLD = MPI.COMM_WORLD
CONFIG = dict(
    num_experts=4, max_tokens_per_rank=8, hidden_dim=4, max_top_k=1, max_token_dtype="float32", transport="host", timeout=20
)


class Mpi(unittest.TestCase):
    def check_exchange(self, communicator):
        with epx.bootstrap.from_mpi(communicator) as bootstrap:
            group = epx.Group(bootstrap, **CONFIG)
        with group:
            self.assertEqual((group.rank, group.num_ranks), (communicator.rank, communicator.size))
            idx = numpy.array([[0], [1], [2], [3]])
            tokens = numpy.full((4, 4), communicator.rank + 1, numpy.float32)
            plan = group.prepare(idx)
            rows, _ = group.dispatch(plan, tokens)
            each = numpy.repeat(numpy.arange(communicator.size) + 1, 1)
            numpy.testing.assert_array_equal(rows[:, 0], numpy.tile(each, group.num_local_experts))
            numpy.testing.assert_array_equal(group.combine(plan, rows), tokens)

    def test_1_world(self):
        self.check_exchange(WORLD)

    def test_2_halves(self):
        half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        self.check_exchange(half)
        half.Free()

    def test_3_rank_that_does_not_come(self):
        with epx.bootstrap.from_mpi(WORLD) as bootstrap:
            if WORLD.rank == 1:
                time.sleep(4)
                raised = None
            else:
                with self.assertRaisesRegex(epx.Error, r"ranks \[1\]") as caught:
                    epx.Group(bootstrap, **{**CONFIG, "timeout": 2})
                raised = caught.exception.status
            self.assertEqual(raised, None if WORLD.rank == 1 else epx.Status.TIMEOUT)
            WORLD.Barrier()


if __name__ == "__main__":
    unittest.main(verbosity=2 if WORLD.rank == 0 else 0)
