#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line and the files that it names: what is refused, and what the routing record and the bar hold."""
import collections
import json
import os
import pathlib

import train_runs
from train_runs import FAILURE, TEXT, TrainTest

CHUNK = 32  # tokens


class CommandLine(TrainTest):
    def refuse(self, *args, words, num_ranks=1):
        run = self.launch(num_ranks, "--steps", 2, *args)
        self.assert_refused(run, *words)
        self.assertEqual(run.stdout, "")

    def test_more_experts_per_token_than_experts(self):
        for num_ranks in (1, 3):
            self.refuse("--experts", 4, "--top-k", 5, words=["--top-k", 5, "--experts", 4], num_ranks=num_ranks)

    def test_values_out_of_range(self):
        for option in ("--batch", "--experts", "--top-k", "--layers", "--hidden", "--ffn", "--context", "--embedding",
                       "--timeout-ms"):
            with self.subTest(option):
                self.refuse(option, 0, words=[option, "Value 0"])
        self.refuse("--batch", -3, words=["--batch", -3])

    def test_values_that_are_not_numbers(self):
        for option in ("--batch", "--lr", "--aux-loss", "--seed"):
            with self.subTest(option):
                self.refuse(option, "some", words=[option, "some"])

    def test_seeds(self):
        for seed in ("-1", "18446744073709551616", "1.5", "0x10"):
            with self.subTest(seed):
                self.refuse(f"--seed={seed}", words=["--seed", seed, "2^64 - 1"])
        largest = self.train(1, "--steps", 1, "--batch", 32, "--seed", 2**64 - 1)
        self.assertNotEqual(largest.losses, self.train(1, "--steps", 1, "--batch", 32).losses)

    def test_the_last_of_a_repeated_option_counts(self):
        run = self.train(1, "--steps", 9, "--batch", 64, "--seed", 5, "--path", "ring", "--steps", 2, "--seed=1",
                         "--path", "replicated")
        self.assertEqual(run.step_lines, self.train(1, "--steps", 2, "--batch", 64, "--path", "replicated").step_lines)
        self.refuse("--hidden", 32, "--hidden", 0, words=["--hidden", "Value 0"])

    def test_models_that_memory_cannot_hold(self):
        """Refused by all ranks before anything is allocated, with what would be needed."""
        for option in ("--hidden", "--ffn", "--experts", "--layers", "--embedding"):
            with self.subTest(option):
                self.refuse(option, 2**31 - 1, words=[f"{option} {2**31 - 1}", "bytes of memory on rank 0"], num_ranks=2)
        limited = ["bash", "-c", "ulimit -v 4000000; exec \"$@\"", "bash"]
        run = self.launch(1, "--steps", 2, "--hidden", 5000, "--ffn", 5000, wrapper=limited)
        self.assert_refused(run, "--hidden 5000", "a process can have 4096000000")

    def test_no_gpu(self):
        """One sentence, from a machine without GPUs as from a build without CUDA."""
        run = self.launch(2, "--device", "cuda", wrapper=["env", "CUDA_VISIBLE_DEVICES=-1"])
        self.assert_refused(run, "--device cuda", "CUDA", status=FAILURE)
        self.assertEqual(run.stdout, "")

    def test_options_that_need_or_exclude_others(self):
        for path in ("native", "dense", "replicated", "both"):
            self.refuse("--device", "cuda", "--path", path, words=[f"--path {path}", "--device cuda", "--path dispatch"])
        self.refuse("--dtype", "bf16", words=["--dtype bf16", "--device host"])
        for path in ("ring", "ragged", "native", "dense", "replicated", "both"):
            self.refuse("--dispatch-format", "fp8-mx", "--path", path, words=["--dispatch-format fp8-mx", f"--path {path}"])
            self.refuse("--format-errors", "--path", path, words=["--format-errors", f"--path {path}"])
            self.refuse("--recipe", "fp8", "--path", path, words=["--recipe fp8", f"--path {path}"])
            self.refuse("--capacity-factor", 2, "--path", path, words=["--capacity-factor", f"--path {path}"])
        self.refuse("--dispatch-format", "fp4-nv", "--hidden", 33, words=["--dispatch-format fp4-nv", 33, "even"])
        self.refuse("--format-errors", "--hidden", 33, words=["--format-errors", 33, "even"])
        self.refuse("--recipe", "fp8", "--dispatch-format", "fp8-mx", words=["--dispatch-format fp8-mx", "--recipe fp8"])
        self.refuse("--recipe", "fp8", "--device", "cuda", "--dtype", "fp32", words=["--dtype is fp32", "bf16"])
        self.refuse("--recipe", "fp8_activations", "--hidden", 64, words=["--hidden is 64", "fp8_activations", 128])
        self.refuse("--recipe", "fp8", "--ffn", 100, words=["--ffn is 100", 128])
        self.refuse("--checkpoint-every", 3, words=["--checkpoint-every", 3, "--checkpoint"])
        self.refuse("--path", "both", "--checkpoint", self.directory / "file", words=["--path both", "--checkpoint"])

    def test_unknown_words(self):
        self.refuse("--path", "nonsense", words=["--path", "nonsense", *train_runs.PATHS])
        self.refuse("--device", "tpu", words=["--device", "tpu", "host", "cuda"])
        self.refuse("--dispatch-format", "fp8", words=["--dispatch-format", "fp8", "none", *train_runs.FORMATS])
        self.refuse("--recipe", "bf8", words=["--recipe", "bf8", "wide", *train_runs.FP8_RECIPES])
        self.refuse("--dtype", "fp8", words=["--dtype", "fp8", "fp32", "bf16"])
        self.refuse("--progress", "nonsense", words=["--progress", "nonsense", "auto"])
        self.refuse("--nonsense", words=["--nonsense"])

    def test_help_and_version(self):
        run = self.train(2, "--help")
        self.assertEqual(run.stdout.count("--record-routing"), 1)
        self.assertEqual(run.complaints, [])
        self.assertRegex(self.train(1, "--version").stdout, r"^train_moe \(epx [\d.]+\)\n$")

    def test_files_in_a_missing_directory(self):
        file = self.directory / "missing" / "file"
        for option in ("--log", "--record-routing"):
            with self.subTest(option):
                self.refuse(option, file, words=[f"{option} {file}: No such file"], num_ranks=2)


class Texts(TrainTest):
    def refuse(self, content, *words):
        text = self.directory / "text"
        text.write_bytes(content)
        run = self.launch(1, "--text", text, "--steps", 2)
        self.assert_refused(run, f"--text {text}", *words)
        self.assertEqual(run.stdout, "")

    def test_missing(self):
        file = self.directory / "missing"
        self.assert_refused(self.launch(2, "--text", file), f"--text {file}: No such file")

    def test_directory(self):
        self.assert_refused(self.launch(2, "--text", self.directory), f"--text {self.directory}: ", "directory")

    def test_files_without_end(self):
        """A device, and a fifo that nobody writes to."""
        fifo = self.directory / "fifo"
        os.mkfifo(fifo)
        for file, kind in ((pathlib.Path("/dev/zero"), "a character device"), (fifo, "a fifo")):
            with self.subTest(kind):
                self.assert_refused(self.launch(2, "--text", file, timeout=30), f"--text {file}: it is {kind}", "regular file")

    def test_too_large(self):
        text = self.directory / "text"
        with text.open("wb") as file:
            file.truncate(2**30 + 1)
        self.assert_refused(self.launch(1, "--text", text), f"--text {text}: it has {2**30 + 1} bytes", f"at most {2**30}")

    def test_file_that_does_not_tell_its_size(self):
        status = self.train(1, "--text", "/proc/self/status", "--steps", 1, "--batch", 32)
        self.assertEqual(len(status.step_lines), 1)

    def test_empty(self):
        self.refuse(b"", "0 bytes")

    def test_shorter_than_a_batch(self):
        """861 bytes are one too few: a tenth is held out, and 776 must be left."""
        self.refuse(bytes(range(256)) * 2, 512, "--context 8", "--batch 768", 776)
        content = TEXT.read_bytes()
        self.refuse(content[:861], "861 bytes", "775 of them", 776)
        text = self.directory / "text"
        text.write_bytes(content[:862])
        self.assertEqual(len(self.train(2, "--text", text, "--steps", 2).step_lines), 2)


class Divergence(TrainTest):
    def test_logits_that_are_not_numbers(self):
        """All ranks find out and end, though the exchange of the step never takes place."""
        for args in ([], ["--path", "native"], ["--path", "dense"], ["--path", "replicated"]):
            with self.subTest(args=args):
                run = self.launch(3, "--steps", 50, "--lr", 1e30, *args, timeout=30)
                self.assert_refused(run, "step 2", "layer 0", "rank 0", "256 tokens", "--lr", status=FAILURE)
                self.assertEqual(len(run.lines), 1)


class Output(TrainTest):
    def test_log(self):
        log = self.directory / "log"
        run = self.train(2, "--steps", 3, "--log", log)
        self.assertEqual(run.stdout, "")
        lines = log.read_text().splitlines()
        self.assertEqual(lines[:3], self.train(1, "--steps", 3).step_lines)
        self.assertEqual(len(lines), 4)
        self.assertIn("held_out_loss", json.loads(lines[3]))

    def test_progress(self):
        run = self.train(2, "--steps", 3, "--progress", "on")
        bars = [bar for bar in run.stderr.split("\r") if bar.startswith("[")]
        self.assertEqual(len(bars), 3, run)
        self.assertIn("step 3/3", bars[-1])
        self.assertIn(f"[{'#' * 40}]", bars[-1])
        run = self.train(2, "--steps", 3, "--progress", "off")
        self.assertNotIn("\r", run.stderr)
        self.assertNotIn("##", run.stderr)


def tokens_of(rank, num_ranks, batch):
    """How many tokens of the batch are the rank's: contiguous runs of chunks."""
    chunks = -(-batch // CHUNK)
    begin, end = (min(chunks * r // num_ranks * CHUNK, batch) for r in (rank, rank + 1))
    return end - begin


class RoutingRecord(TrainTest):
    steps, layers, experts, top_k = 4, 2, 6, 3

    def record(self, num_ranks, batch, *args):
        """Returns the record's lines, by step, layer and rank, and the run."""
        file = self.directory / f"routing-{num_ranks}"
        run = self.train(num_ranks, "--steps", self.steps, "--layers", self.layers, "--experts", self.experts, "--top-k",
                         self.top_k, "--batch", batch, "--record-routing", file, *args)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        by_place = {(line["step"], line["layer"], line["rank"]): line for line in lines}
        self.assertEqual(len(by_place), len(lines), "a step, layer and rank come twice")
        return by_place, run

    def check_lines(self, lines, num_ranks, batch, first_step=1):
        places = [(step, layer, rank) for step in range(first_step, self.steps + 1) for layer in range(self.layers)
                  for rank in range(num_ranks)]
        self.assertEqual(sorted(lines), places)
        for (_, _, rank), line in lines.items():
            self.assertEqual(list(line), ["step", "layer", "rank", "num_ranks", "num_experts", "top_k", "topk_idx"])
            self.assertEqual((line["num_ranks"], line["num_experts"], line["top_k"]), (num_ranks, self.experts, self.top_k))
            self.assertEqual(len(line["topk_idx"]), tokens_of(rank, num_ranks, batch))
            for row in line["topk_idx"]:
                self.assertEqual(len(row), self.top_k)
                self.assertEqual(len(set(row)), self.top_k, "an expert comes twice in a row")
                self.assertLessEqual(set(row), set(range(self.experts)))

    def whole_batches(self, lines):
        """The rows of all ranks, by step and layer."""
        batches = collections.defaultdict(list)
        for (step, layer, _), line in sorted(lines.items()):
            batches[step, layer] += line["topk_idx"]
        return batches

    def test_any_number_of_ranks(self):
        """Batches that chunks divide and do not divide, and one that leaves ranks without tokens."""
        for batch in (192, 100, 20):
            with self.subTest(batch=batch):
                one, _ = self.record(1, batch)
                three, _ = self.record(3, batch)
                self.check_lines(one, 1, batch)
                self.check_lines(three, 3, batch)
                self.assertEqual(self.whole_batches(three), self.whole_batches(one))

    def test_any_path(self):
        epx, _ = self.record(2, 192)
        native, _ = self.record(2, 192, "--path", "native")
        self.assertEqual(native, epx)
        replicated, _ = self.record(2, 192, "--path", "replicated")
        self.check_lines(replicated, 2, 192)

    def test_load_follows_from_it(self):
        """The busiest expert's routes over the mean."""
        batch = 100
        lines, run = self.record(3, batch)
        batches = self.whole_batches(lines)
        for line in run.lines[:self.steps]:
            for layer, load in enumerate(line["load"]):
                routes = collections.Counter(expert for row in batches[line["step"], layer] for expert in row)
                self.assertAlmostEqual(load, max(routes.values()) * self.experts / (batch * self.top_k), places=12)

    def test_after_resume(self):
        checkpoint = self.directory / "checkpoint"
        whole, _ = self.record(2, 100)
        self.train(1, "--steps", 2, "--layers", self.layers, "--experts", self.experts, "--top-k", self.top_k, "--batch", 100,
                   "--checkpoint", checkpoint)
        rest, _ = self.record(2, 100, "--resume", checkpoint)
        self.check_lines(rest, 2, 100, first_step=3)
        self.assertEqual(rest, {place: line for place, line in whole.items() if place[0] > 2})


if __name__ == "__main__":
    train_runs.main()
