#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ep_bench compare on files, and docs/ep_bench-json.md against a file: verdicts, exit status, and one sentence for each bad input."""
import argparse
import copy
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

LIMIT_S = 60
SUCCESS, FAILURE, USAGE = 0, 1, 2  # exit statuses
REPLACEMENTS = (None, True, -1, 0, 1e300, "", "x", [], [1], {}, {"x": 1})


# The page.

KINDS = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
    "array of strings": lambda value: isinstance(value, list) and all(map(KINDS["string"], value)),
    "array of numbers": lambda value: isinstance(value, list) and all(map(KINDS["number"], value)),
    "[number, number]": lambda value: KINDS["array of numbers"](value) and len(value) == 2,
    "[number, number, number]": lambda value: KINDS["array of numbers"](value) and len(value) == 3,
}


def read_page(text):
    """Returns {path: {field: type}}; the path of a table is in the heading before it, and that of the document is empty."""
    tables, path = {}, None
    for line in text.splitlines():
        if line.startswith("## "):
            path = ""
        elif line.startswith("### "):
            path = re.fullmatch(r"### `(.+)`( \(complete\))?", line)
            path = path[1] + (path[2] or "")
        elif row := re.fullmatch(r"\| `(\w+)` \| (.+?) \| .+ \|", line):
            tables.setdefault(path, {})[row[1]] = row[2]
    return tables


def place_of(path, tables):
    """Returns the table of an object, whose path has the names of its lines."""
    for table in tables:
        pattern = re.escape(table).replace("NAME", "[^.]+")
        if re.fullmatch(pattern, path):
            return table
    return None


def faults_of(value, tables, path=""):
    """Returns what a document has otherwise than the page says."""
    if isinstance(value, list):
        return [fault for item in value for fault in faults_of(item, tables, path + "[]")]
    if not isinstance(value, dict):
        return []
    faults = []
    table = place_of(path, tables)
    if table is not None:
        fields = dict(tables[table])
        if value.get("status") == "complete":
            fields |= tables.get(table + " (complete)", {})
        faults += [f"{path}: the file lacks {name}" for name in fields.keys() - value.keys()]
        faults += [f"{path}: the page lacks {name}" for name in value.keys() - fields.keys()]
        faults += [f"{path}.{name}: {value[name]!r} is no {kind}" for name, kind in fields.items() if name in value
                   and not any(KINDS[one](value[name]) for one in kind.split(" or "))]
    for name, item in value.items():
        faults += faults_of(item, tables, f"{path}.{name}" if path else name)
    return faults


def paths_of(value, path=()):
    """Returns the path of each value in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [inner for key, item in items for inner in paths_of(item, path + (key,))]


def with_value(document, path, value):
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def without(document, path):
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return changed


class Page(unittest.TestCase):
    def test_sample(self):
        self.assertEqual(faults_of(SAMPLE, TABLES), [])

    def test_each_field_of_the_page_is_in_the_sample(self):
        def seen(value, path=""):
            if isinstance(value, list):
                return set().union(*(seen(item, path + "[]") for item in value))
            if not isinstance(value, dict):
                return set()
            found = {(place_of(path, TABLES), name) for name in value}
            return found.union(*(seen(item, f"{path}.{name}" if path else name) for name, item in value.items()))
        named = {(path.removesuffix(" (complete)"), name) for path, fields in TABLES.items() for name in fields}
        self.assertGreater(len(named), 100)
        self.assertEqual(named - seen(SAMPLE), set())

    def test_a_file_that_differs_from_the_page_is_noticed(self):
        point = ("starts", 0, "points", 0)
        for path in (("run", "ranks"), point + ("config", "seed"), point + ("group", "nodes"), point + ("passed",),
                     point + ("operations", "combine", "floor", "us")):
            self.assertEqual(len(faults_of(without(SAMPLE, path), TABLES)), 1, path)
            self.assertNotEqual(faults_of(with_value(SAMPLE, path, "text"), TABLES), [], path)
            self.assertEqual(len(faults_of(with_value(SAMPLE, path[:-1] + ("extra",), 1), TABLES)), 1, path)

    def test_page_has_the_numbers_of_the_help(self):
        text = subprocess.run([EP_BENCH, "compare", "--help"], timeout=LIMIT_S, capture_output=True, text=True, check=True).stdout
        margin = re.search(r"side: ([\d.]+) % on host, ([\d.]+) % on nccl", text)
        same = re.search(r"within ([\d.]+) % \(host\) or ([\d.]+) % \(nccl\)", text)
        for index, transport in ((1, "host"), (2, "nccl")):
            self.assertRegex(PAGE, rf"\| {transport} \| [\d.]+ % \| [\d.]+ \| {margin[index]} % \| {same[index]} % \|")


class Written(unittest.TestCase):
    def test_file_of_a_run_is_as_the_page_says(self):
        with tempfile.TemporaryDirectory(prefix="ep_bench_written.") as directory:
            file = pathlib.Path(directory) / "out.json"
            for more in ([], ["--append"]):
                command = [EP_BENCH, "--bootstrap", f"file:{directory}", "--rank", "0", "--ranks", "1", "--tokens", "1,8", "--layout",
                           "both", "--iters", "3", "--verify", "--json", file, *more]
                subprocess.run(command, timeout=LIMIT_S, capture_output=True, check=True)
            document = json.loads(file.read_text())
            self.assertEqual(faults_of(document, TABLES), [])
            self.assertEqual([len(start["points"]) for start in document["starts"]], [4, 4])
            run = subprocess.run([EP_BENCH, "compare", file, file], timeout=LIMIT_S, capture_output=True, text=True, check=True)
            self.assertIn("out.json, epx", run.stdout)
            self.assertIn(" of 18 rows", run.stdout)  # 2 x (5 + 4) lines
            self.assertNotRegex(run.stdout, "only in|failed|not run")


class Files(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ep_bench_compare.")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.a, self.b = self.directory / "a.json", self.directory / "b.json"
        self.a.write_text(json.dumps(SAMPLE))
        self.b.write_text(json.dumps(SAMPLE))

    def compare(self, *args):
        return subprocess.run([EP_BENCH, "compare", *map(str, args)], timeout=LIMIT_S, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, check=False)

    def compare_with(self, document, *args):
        self.b.write_text(json.dumps(document))
        return self.compare(self.a, self.b, *args)

    def assert_refused(self, run, *words):
        """There is one sentence, and no table."""
        self.assertEqual((run.returncode, run.stdout), (USAGE, ""), run)
        self.assertEqual(len(run.stderr.splitlines()), 1, run)
        for word in ("ep_bench: ",) + words:
            self.assertIn(word, run.stderr)

    def refuse(self, document, *words):
        self.assert_refused(self.compare_with(document), f"'{self.b}'", *words)

    def slowed(self, line, factor):
        document = copy.deepcopy(SAMPLE)
        for start in document["starts"]:
            figures = start["points"][0]["operations"][line]
            figures["median_us"] *= factor
            figures["interval_us"] = [value * factor for value in figures["interval_us"]]
        return document

    def verdicts(self, run):
        return dict(re.findall(r"^ +\d+ +\S+ +(\S+) .* (\S+)$", run.stdout, re.MULTILINE))

    def test_a_file_with_itself(self):
        run = self.compare(self.a, self.a, "--fail-if-slower", 0)
        self.assertEqual((run.returncode, run.stderr), (SUCCESS, ""), run)
        self.assertEqual(self.verdicts(run), {"prepare": "same", "dispatch": "same", "combine": "same"})
        self.assertIn("0 slower, 0 faster, 3 same, 0 ambiguous of 3 rows", run.stdout)

    def test_slower_and_faster(self):
        run = self.compare_with(self.slowed("dispatch", 1.05), "--fail-if-slower", 4)
        self.assertEqual(self.verdicts(run), {"prepare": "same", "dispatch": "slower", "combine": "same"})
        self.assertEqual(run.returncode, FAILURE)
        self.assertEqual(run.stderr, "ep_bench: 1 of 3 rows are slower by more than 4 %, most of all 128, expert-major, dispatch: "
                                     "by 5.0 %\n")
        for args in ((), ("--fail-if-slower", 6)):
            self.assertEqual(self.compare(self.a, self.b, *args).returncode, SUCCESS)
        run = self.compare(self.b, self.a, "--fail-if-slower", 0)
        self.assertEqual((run.returncode, self.verdicts(run)["dispatch"]), (SUCCESS, "faster"))

    def test_ambiguous(self):
        document = copy.deepcopy(SAMPLE)
        for start in document["starts"]:
            start["points"][0]["operations"]["combine"]["interval_us"] = [20, 40]
        self.assertEqual(self.verdicts(self.compare_with(document))["combine"], "ambiguous")

    def test_points_and_lines_without_a_partner_are_listed(self):
        document = copy.deepcopy(SAMPLE)
        for start in document["starts"]:
            other = copy.deepcopy(start["points"][0])
            other["config"]["tokens"] = 64
            other["operations"] = {"combine": other["operations"]["combine"]}
            del start["points"][0]["operations"]["prepare"]
            start["points"].append(other)
        run = self.compare_with(document)
        self.assertEqual(run.returncode, SUCCESS, run)
        self.assertEqual(self.verdicts(run), {"dispatch": "same", "combine": "same"})
        self.assertIn("\nonly in A: tokens 128, layout expert-major, prepare\n", run.stdout)
        self.assertIn("\nonly in B: tokens 64, layout expert-major\n", run.stdout)
        self.assertIn("\nin A: tokens 1048576, layout expert-major: failed: cannot allocate", run.stdout)
        self.assertIn("\nin B: tokens 128, layout rank-major: not run\n", run.stdout)

    def test_what_does_not_shape_a_call_does_not_keep_points_apart(self):
        for field, value in (("iters", 20), ("warmup", 5), ("noise_percent", None), ("budget_s", 9), ("verify", False),
                             ("floor", False), ("native", False)):
            document = copy.deepcopy(SAMPLE)
            for start in document["starts"]:
                start["points"][0]["config"][field] = value
            self.assertEqual(len(self.verdicts(self.compare_with(document))), 3, field)

    def test_points_of_other_options_have_a_column(self):
        document = copy.deepcopy(SAMPLE)
        for start in document["starts"]:
            other = copy.deepcopy(start["points"][0])
            other["config"]["num_comm_sms"] = 16
            start["points"].append(other)
        self.a.write_text(json.dumps(document))
        run = self.compare_with(document)
        self.assertRegex(run.stdout, r"\ntokens +layout +num_comm_sms  operation")
        self.assertRegex(run.stdout, r"\n +128  expert-major +16  combine")

    def test_files_that_cannot_be_read(self):
        self.b.unlink()
        self.assert_refused(self.compare(self.a, self.b), f"'{self.b}'", "No such file")
        self.assert_refused(self.compare(self.b, self.a), f"'{self.b}'", "No such file")
        self.assert_refused(self.compare(self.a, self.directory), f"'{self.directory}'", "directory")
        self.assert_refused(self.compare(self.a, "/dev/zero"), "'/dev/zero'", "device")
        os.mkfifo(self.b)
        self.assert_refused(self.compare(self.a, self.b), f"'{self.b}'", "fifo")

    def test_files_that_are_not_whole_or_not_json(self):
        text = json.dumps(SAMPLE).encode()
        self.b.write_bytes(b"")
        self.assert_refused(self.compare(self.a, self.b), f"'{self.b}' is empty")
        for length in (1, 100, len(text) // 2, len(text) - 1):
            self.b.write_bytes(text[:length])
            self.assert_refused(self.compare(self.a, self.b), f"'{self.b}' is cut short", f"after {length} bytes")
        for content in (b"ep_bench 0.2.0: 2 ranks", text + b"}", b"\xff\xfe" + text, b"{\"schema\": \"\xff\"}", text[:50] + b"\0"):
            self.b.write_bytes(content)
            self.assert_refused(self.compare(self.a, self.b), f"'{self.b}' is not JSON")
        self.b.write_bytes(text.replace(b"31.6", b"1e999"))
        self.assert_refused(self.compare(self.a, self.b), f"'{self.b}'", "no double can hold")
        self.b.write_bytes(b"[" * 100_000 + b"]" * 100_000)
        self.assert_refused(self.compare(self.a, self.b), f"'{self.b}'", "schema")

    def test_files_of_another_schema(self):
        for document in (3, [], {}, {"schema": {}}, {"schema": 2}):
            self.refuse(document, "schema")
        self.refuse({"epx_version": "0.1.0", "operations": {}}, "from before there were versions")
        self.refuse(with_value(SAMPLE, ("schema", "name"), "nccl-tests"), "schema.name is \"nccl-tests\"", "ep_bench")
        for version in (1, 3, "2", 2.5, None):
            self.refuse(with_value(SAMPLE, ("schema", "version"), version), f"schema.version is {json.dumps(version)}", "2")

    def test_files_of_another_machine_or_another_kind_of_run(self):
        for field, value in (("cpu", "other"), ("gpu", "other"), ("gpu", None)):
            document = with_value(SAMPLE, ("machine", field), value)
            self.refuse(document, f"'{self.a}'", "another machine", SAMPLE["machine"][field], value or "none", "--any-machine")
            run = self.compare_with(document, "--any-machine")
            self.assertEqual(run.returncode, SUCCESS, run)
            self.assertIn(f"note: {field} is {SAMPLE['machine'][field]} in A and {value or 'none'} in B", run.stdout)
        for field, value in (("host", "other"), ("cores", 4), ("driver", "1.2"), ("nccl", None)):
            run = self.compare_with(with_value(SAMPLE, ("machine", field), value))
            self.assertEqual(run.returncode, SUCCESS, run)
            self.assertIn(f"note: {field} is {SAMPLE['machine'][field]} in A and {value or 'none'} in B", run.stdout)
        for field, value in (("ranks", 4), ("ranks_per_node", 1), ("transport", "host")):
            self.refuse(with_value(SAMPLE, ("run", field), value), f"'{self.a}'", f"{value}", f"{SAMPLE['run'][field]}")

    def test_files_without_a_common_line(self):
        document = copy.deepcopy(SAMPLE)
        for start in document["starts"]:
            for point in start["points"]:
                point["config"]["hidden"] = 4096
        self.refuse(document, "hidden: 7168 and 4096")
        for start in document["starts"]:
            start["points"] = start["points"][1:]
        self.refuse(document, "no line in common")
        for start in document["starts"]:
            start["points"] = []
        self.refuse(document, f"'{self.b}' has no point")

    def test_fields_that_are_wrong(self):
        point = ("starts", 1, "points", 0)
        line = point + ("operations", "dispatch")
        for path, value, words in (
                (("status",), "done", ("status is \"done\"", "complete, partial")),
                (("starts",), [], ("starts is []", "at least one start")),
                (("starts",), {}, ("starts is {}", "an array")),
                (("run", "ranks"), 0, ("run.ranks is 0", "at least 1")),
                (("run", "transport"), "mpi", ("run.transport is \"mpi\"", "host, nccl")),
                (point + ("status",), "fine", ("starts[1].points[0].status is \"fine\"",)),
                (point + ("operations",), [], ("starts[1].points[0].operations is []",)),
                (line + ("median_us",), 0, ("operations.dispatch.median_us is 0", "above 0")),
                (line + ("median_us",), None, ("operations.dispatch.median_us is null",)),
                (line + ("median_us",), 99, ("operations.dispatch.interval_us is [", "contains median_us, 99")),
                (line + ("interval_us",), [1], ("operations.dispatch.interval_us is [1]", "two numbers")),
                (line + ("interval_us",), [0, 99], ("operations.dispatch.interval_us[0] is 0",)),
                (line + ("samples",), 0, ("operations.dispatch.samples is 0", "at least 1")),
                (line + ("converged",), 1, ("operations.dispatch.converged is 1", "true or false"))):
            self.refuse(with_value(SAMPLE, path, value), *words)
        for path in (("run",), ("machine", "cpu"), ("starts", 0, "points"), point + ("config", "layout"), line + ("interval_us",)):
            self.refuse(without(SAMPLE, path), "has no field", f"'{path[-1]}'")
        twice = copy.deepcopy(SAMPLE)
        twice["starts"][0]["points"].append(twice["starts"][0]["points"][0])
        self.refuse(twice, "starts[0].points[3].config")

    def test_any_field_may_be_anything(self):
        """Whatever a file has, there is a table or a sentence."""
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        paths = paths_of(SAMPLE)
        for _ in range(150):
            path, value = rng.choice(paths), rng.choice(REPLACEMENTS)
            run = self.compare_with(with_value(SAMPLE, path, value))
            self.assertIn(run.returncode, (SUCCESS, USAGE), (seed, path, value, run))
            self.assertEqual(len(run.stderr.splitlines()), run.returncode == USAGE, (seed, path, value, run))

    def test_command_lines(self):
        for args in ((), (self.a,), (self.a, self.b, self.b), (self.a, self.b, "--unknown")):
            run = self.compare(*args)
            self.assertEqual((run.returncode, run.stdout), (USAGE, ""), run)
        for percent in (-1, "nan", "inf", "x", ""):
            self.assert_refused(self.compare(self.a, self.b, f"--fail-if-slower={percent}"), "--fail-if-slower")

    def test_files_stay_as_they_are(self):
        before = self.a.read_bytes()
        self.compare(self.a, self.a)
        self.b.write_bytes(b"x")
        self.compare(self.a, self.b)
        self.assertEqual((self.a.read_bytes(), self.b.read_bytes()), (before, b"x"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep-bench", required=True)
    parser.add_argument("--page", type=pathlib.Path, required=True)
    parser.add_argument("--sample", type=pathlib.Path, required=True)
    options, rest = parser.parse_known_args()
    EP_BENCH, PAGE = options.ep_bench, options.page.read_text()
    SAMPLE, TABLES = json.loads(options.sample.read_text()), read_page(PAGE)
    unittest.main(argv=sys.argv[:1] + rest)
