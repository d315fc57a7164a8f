#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tools/token_sweep.py takes from a file of ep_bench --json; the drawing itself needs matplotlib, which is not needed here."""
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.modules |= dict.fromkeys(["matplotlib", "matplotlib.pyplot", "matplotlib.ticker"], mock.MagicMock())
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import token_sweep  # noqa: E402


def point(tokens, layout="expert-major", us=8.0, status="complete"):
    sequence = {"expert-major": "prepare_dispatch+combine", "rank-major": "dispatch+combine"}[layout]
    operations = {name: {"median_us": us, "floor": {"us": us / 4}} for name in ("dispatch", "combine")}
    operations[sequence] = {"median_us": 2 * us, "floor": None}
    if layout == "expert-major":
        operations["prepare+dispatch+combine"] = {"median_us": 3 * us, "floor": None}
    measured = {"operations": operations} if status == "complete" else {}
    return {"config": {"tokens": tokens, "layout": layout, "routing": "uniform", "num_comm_sms": 0}, "status": status, **measured}


class TokenSweep(unittest.TestCase):
    def read(self, content):
        with tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory) / "sweep.json"
            file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
            return token_sweep.read_points(file)

    def document(self, *starts):
        return {"schema": token_sweep.SCHEMA, "run": {"ranks": 4}, "starts": [{"points": list(points)} for points in starts]}

    def test_lines_by_layout(self):
        ranks, lines = self.read(self.document([point(8), point(1), point(2, status="failed"), point(1, "rank-major", us=4.0)]))
        self.assertEqual((ranks, list(lines), list(lines["expert-major"])), (4, ["expert-major", "rank-major"], [1, 8]))
        self.assertEqual(token_sweep.sequence_of(lines["expert-major"][8]), ("prepare_dispatch+combine", 16.0))
        self.assertEqual(token_sweep.sequence_of(lines["rank-major"][1]), ("dispatch+combine", 8.0))
        self.assertEqual(token_sweep.bound_of(lines["expert-major"][8]), 4.0)

    def test_median_of_starts(self):
        _, lines = self.read(self.document([point(8, us=8.0)], [point(8, us=16.0)], [point(8, us=10.0)]))
        self.assertEqual(token_sweep.sequence_of(lines["expert-major"][8])[1], 20.0)

    def test_files_that_are_no_good(self):
        without_floor = self.document([point(8)])
        without_floor["starts"][0]["points"][0]["operations"]["dispatch"]["floor"] = None
        for content, word in (("{", "is no file of ep_bench"), ("[]", "is no file of ep_bench"),
                              ({"schema": {"name": "ep_bench", "version": 1}}, "has schema"),
                              (without_floor, "no complete point with --floor"), (self.document([]), "no complete point")):
            with self.assertRaises(SystemExit) as exit_:
                self.read(content)
            self.assertIn(word, str(exit_.exception))


if __name__ == "__main__":
    unittest.main(verbosity=2)
