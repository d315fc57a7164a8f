#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training that stopped goes on, on any number of ranks; what cannot go on is refused."""
import json
import os
import pathlib
import stat
import tempfile
import threading

import train_runs
from train_runs import FAILURE, TEXT, TrainTest

STEPS = 12
HALF = STEPS // 2
OTHER_TEXT = pathlib.Path("/usr/share/common-licenses/GPL-2")


def header_of(checkpoint):
    return json.loads(checkpoint.read_bytes().split(b"\n", 1)[0])


def with_header(checkpoint, **changes):
    line, numbers = checkpoint.read_bytes().split(b"\n", 1)
    return json.dumps({**json.loads(line), **changes}).encode() + b"\n" + numbers


class Checkpoints(TrainTest):
    def save(self, num_ranks, steps, *args, name="checkpoint"):
        file = self.directory / name
        self.train(num_ranks, "--steps", steps, "--checkpoint", file, *args)
        return file


class Resume(Checkpoints):
    def test_is_as_if_it_had_not_stopped(self):
        whole = self.train(2, "--steps", STEPS, "--checkpoint", self.directory / "whole")
        half = self.save(2, HALF, name="half")
        for num_ranks in (1, 2, 3):
            with self.subTest(num_ranks=num_ranks):
                resumed = self.train(num_ranks, "--steps", STEPS, "--resume", half, "--checkpoint", self.directory / "resumed")
                self.assertEqual(resumed.step_lines, whole.step_lines[HALF:])
                self.assertEqual(resumed.final["held_out_loss"], whole.final["held_out_loss"])
                self.assertEqual((self.directory / "resumed").read_bytes(), (self.directory / "whole").read_bytes())

    def test_on_another_path(self):
        half = self.save(3, HALF)
        resume = ["--steps", STEPS, "--resume", half]
        epx = self.train(1, *resume)
        self.assert_same_curve(self.train(2, *resume, "--path", "native"), epx)
        deviation = self.assert_close(self.train(2, *resume, "--path", "replicated"), epx)
        both = self.train(2, *resume, "--path", "both")
        self.assertEqual(both.step_lines, epx.step_lines)
        self.report(f"differs from replicated by at most {deviation:.1e} of the loss")

    def test_from_replicated(self):
        half = self.save(2, HALF, "--path", "replicated")
        replicated = self.train(1, "--steps", STEPS, "--resume", half, "--path", "replicated")
        self.assert_close(self.train(3, "--steps", STEPS, "--resume", half), replicated)


class Save(Checkpoints):
    def test_file_does_not_depend_on_the_ranks(self):
        for args in ([], ["--experts", 5], ["--experts", 2]):
            with self.subTest(args=args):
                one = self.save(1, 3, *args, name="one")
                three = self.save(3, 3, *args, name="three")
                self.assertEqual(one.read_bytes(), three.read_bytes())

    def test_every_few_steps(self):
        """A step size at which the second step fails: what is left was saved after the first."""
        file = self.directory / "checkpoint"
        run = self.launch(2, "--steps", 6, "--lr", 1e30, "--checkpoint", file, "--checkpoint-every", 1)
        self.assert_refused(run, "step 2", status=FAILURE)
        self.assertEqual(header_of(file)["step"], 1)

    def test_every_few_steps_and_after_the_last(self):
        plain = self.save(1, 7, name="plain")
        every = self.save(2, 7, "--checkpoint-every", 3, name="every")
        self.assertEqual(every.read_bytes(), plain.read_bytes())
        self.assertEqual(sorted(file.name for file in self.directory.iterdir()), ["every", "plain"])

    def test_survives_a_full_disk(self):
        """A limit on the size of files stands in for it: a quarter of what the checkpoint takes."""
        large = ["--ffn", 1024, "--batch", 64, "--path", "replicated"]
        file = self.save(1, 1, *large)
        before = file.read_bytes()
        limited = ["bash", "-c", f"trap '' XFSZ; ulimit -f {len(before) // 4096}; exec \"$@\"", "bash"]
        run = self.launch(1, "--steps", 2, "--resume", file, "--checkpoint", file, *large, wrapper=limited)
        self.assert_refused(run, f"--checkpoint {file}: File too large")
        self.assertEqual(len(run.step_lines), 1)
        self.assertEqual(file.read_bytes(), before)
        self.assertEqual(list(self.directory.iterdir()), [file])

    def test_disk_found_full_by_fsync(self):
        file = self.save(1, 1, "--batch", 64)
        before = file.read_bytes()
        preloaded = ["env", f"LD_PRELOAD={self.file_calls}", "EPX_TEST_FSYNC_FAILS=1"]
        run = self.launch(1, "--steps", 2, "--batch", 64, "--checkpoint", file, wrapper=preloaded)
        self.assert_refused(run, f"--checkpoint {file}: No space left")
        self.assertEqual(file.read_bytes(), before)
        self.assertEqual(list(self.directory.iterdir()), [file])

    def test_is_on_the_disk(self):
        """First the bytes, then the name, then the folder that has the name."""
        calls = self.directory / "calls"
        file = self.directory / "checkpoint"
        preloaded = ["env", f"LD_PRELOAD={self.file_calls}", f"EPX_TEST_CALLS={calls}"]
        run = self.launch(1, "--steps", 1, "--batch", 64, "--checkpoint", file, wrapper=preloaded)
        self.assertEqual(run.status, train_runs.SUCCESS, run)
        self.assertEqual(calls.read_text().splitlines(), ["fsync file", "rename checkpoint", "fsync folder"])

    def test_leaves_files_of_others_alone(self):
        """A file named as the temporary one might be, also as a link to something else."""
        target = self.directory / "target"
        target.write_text("precious\n")
        for make in (lambda tmp: tmp.write_text("a draft\n"), lambda tmp: tmp.symlink_to(target)):
            file = self.directory / "checkpoint"
            tmp = self.directory / "checkpoint.tmp"
            make(tmp)
            before = tmp.lstat()
            self.save(1, 2, "--batch", 64, "--checkpoint-every", 1)
            self.assertEqual((tmp.lstat().st_ino, tmp.lstat().st_mtime_ns), (before.st_ino, before.st_mtime_ns))
            self.assertEqual(target.read_text(), "precious\n")
            self.assertEqual(header_of(file)["step"], 2)
            tmp.unlink()
            self.assertEqual(sorted(self.directory.iterdir()), [file, target])

    def special_files(self):
        """Paths of all kinds that are not regular files, and their names."""
        target = self.directory / "target"
        target.write_text("precious\n")
        (self.directory / "link").symlink_to(target)
        (self.directory / "loose").symlink_to(self.directory / "nothing")
        os.mkfifo(self.directory / "fifo")
        (self.directory / "folder").mkdir()
        kinds = {"link": "a symbolic link", "loose": "a symbolic link", "fifo": "a fifo", "folder": "a directory"}
        try:
            os.mknod(self.directory / "device", stat.S_IFCHR | 0o666, os.makedev(1, 7))
            kinds["device"] = "a character device"
        except PermissionError:
            self.report("no devices without privileges")
        return kinds

    def test_replaces_regular_files_only(self):
        """Found out before training."""
        kinds = self.special_files()
        before = {file: file.lstat().st_ino for file in self.directory.iterdir()}
        for name, kind in kinds.items():
            with self.subTest(name):
                file = self.directory / name
                run = self.launch(1, "--steps", 2, "--batch", 64, "--checkpoint", file)
                self.assert_refused(run, f"--checkpoint {file}: it is {kind}")
                self.assertEqual(run.stdout, "")
        self.assertEqual({file: file.lstat().st_ino for file in self.directory.iterdir()}, before)

    def test_replaces_no_link_that_came_later(self):
        """The checkpoint of an earlier step is replaced by a link while training goes on."""
        file = self.directory / "checkpoint"
        target = self.directory / "target"
        target.write_text("precious\n")
        is_over = threading.Event()

        def disturb():
            while not is_over.wait(0.001):
                if file.is_file() and not file.is_symlink():
                    (self.directory / "link").symlink_to(target)
                    (self.directory / "link").rename(file)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            run = self.launch(1, "--steps", 1_000_000, "--batch", 32, "--path", "replicated", "--checkpoint", file,
                              "--checkpoint-every", 1)
        finally:
            is_over.set()
            thread.join()
        self.assert_refused(run, f"--checkpoint {file}: it is a symbolic link")
        self.assertEqual(target.read_text(), "precious\n")
        self.assertEqual(sorted(self.directory.iterdir()), [file, target])

    def test_file_that_cannot_be_written(self):
        (self.directory / "directory").mkdir()
        for name in ("missing/checkpoint", "directory"):
            with self.subTest(name):
                file = self.directory / name
                self.assert_refused(self.launch(2, "--steps", 2, "--checkpoint", file), f"--checkpoint {file}: ")
        self.assertEqual([file.name for file in self.directory.iterdir()], ["directory"])


class Refusals(Checkpoints):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="train_moe_test.")
        cls.addClassCleanup(directory.cleanup)
        cls.file = pathlib.Path(directory.name, "checkpoint")
        run = cls.launch(1, "--steps", 2, "--batch", 64, "--checkpoint", cls.file)
        assert run.status == train_runs.SUCCESS, run

    def assert_not_resumed(self, *words, file=None, args=(), num_ranks=1):
        """Also nothing is written: no lines and no files."""
        file = file or self.file
        before = sorted(self.directory.iterdir())
        run = self.launch(num_ranks, "--steps", 4, "--batch", 64, "--resume", file, "--checkpoint", self.directory / "new",
                          "--record-routing", self.directory / "routing", *args)
        self.assert_refused(run, f"--resume {file}", *words)
        self.assertEqual(run.stdout, "")
        self.assertEqual(sorted(self.directory.iterdir()), before)

    def refuse_content(self, content, *words, **kwargs):
        file = self.directory / "bad"
        file.write_bytes(content)
        self.assert_not_resumed(*words, file=file, **kwargs)

    def test_all_ranks_end(self):
        self.assert_not_resumed("hidden = 64", "this run has 32", args=("--hidden", 32), num_ranks=2)
        self.assert_not_resumed("No such file", file=self.directory / "missing", num_ranks=3)
        self.refuse_content(self.file.read_bytes()[:-1], self.file.stat().st_size, num_ranks=2)
        self.refuse_content(b"garbage", "not a checkpoint", num_ranks=3)

    def test_keeps_an_earlier_log(self):
        log = self.directory / "log"
        log.write_text("of an earlier run\n")
        self.assert_not_resumed(args=("--seed", 5, "--log", log))
        self.assertEqual(log.read_text(), "of an earlier run\n")

    def test_another_model(self):
        model = header_of(self.file)["model"]
        others = {"context": 9, "embedding": 8, "hidden": 32, "ffn": 96, "layers": 1, "experts": 4, "top-k": 1, "seed": 5}
        self.assertEqual(model.keys(), others.keys() | {"batch"})
        for field, value in others.items():
            with self.subTest(field):
                self.assert_not_resumed(f"{field} = {model[field]}", f"this run has {value}", args=(f"--{field}", value))

    def test_another_batch(self):
        run = self.launch(1, "--steps", 4, "--batch", 96, "--resume", self.file)
        self.assert_refused(run, f"--resume {self.file}", "batch = 64", "this run has 96")

    def test_another_text(self):
        self.assert_not_resumed(f"bytes = {TEXT.stat().st_size}", f"this run has {OTHER_TEXT.stat().st_size}",
                                args=("--text", OTHER_TEXT))

    def test_another_text_of_the_same_size(self):
        text = self.directory / "text"
        text.write_bytes(TEXT.read_bytes()[::-1])
        self.assert_not_resumed(header_of(self.file)["text"]["hash"], args=("--text", text))

    def test_size(self):
        whole = self.file.read_bytes()
        for size in (len(whole) - 1, len(whole) // 2):
            with self.subTest(size=size):
                self.refuse_content(whole[:size], size, len(whole))
        self.refuse_content(whole + b"\0", len(whole) + 1, len(whole))

    def test_flipped_bits(self):
        """One each in the step, the first weight, in the middle, the last moment and the checksum."""
        whole = self.file.read_bytes()
        numbers = whole.index(b"\n") + 1
        for place in (whole.index(b'"step":') + 7, numbers, (numbers + len(whole)) // 2, len(whole) - 17, len(whole) - 2):
            with self.subTest(place=place):
                content = bytearray(whole)
                content[place] ^= 1
                self.refuse_content(bytes(content), "damaged", "checksum", "crc32c")

    def test_checksum_is_crc32c(self):
        table = []
        for byte in range(256):
            for _ in range(8):
                byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
            table.append(byte)

        def crc32c(content):
            crc = 0xFFFFFFFF
            for byte in content:
                crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
            return crc ^ 0xFFFFFFFF

        self.assertEqual(crc32c(b"123456789"), 0xE3069283)
        content = self.file.read_bytes()
        self.assertEqual(content[-16:], b"crc32c %08x\n" % crc32c(content[:-16]))

    def test_another_format(self):
        self.refuse_content(with_header(self.file, format="epx train_moe 1"), "epx train_moe 1", "epx train_moe 2")

    def test_header_alone(self):
        header = self.file.read_bytes().split(b"\n", 1)[0]
        self.refuse_content(header, "not a checkpoint")
        self.refuse_content(header + b"\n", f"{len(header) + 1} bytes", self.file.stat().st_size)

    def test_files_without_end(self):
        """A device, a fifo that nobody writes to, and a large file."""
        fifo = self.directory / "fifo"
        os.mkfifo(fifo)
        large = self.directory / "large"
        with large.open("wb") as file:
            file.write(self.file.read_bytes())
            file.truncate(1 << 40)
        self.assert_not_resumed("a character device", file=pathlib.Path("/dev/zero"))
        self.assert_not_resumed("a fifo", file=fifo)
        self.assert_not_resumed(f"it has {1 << 40} bytes", file=large)

    def test_cut_header(self):
        self.refuse_content(self.file.read_bytes()[:100], "not a checkpoint")

    def test_garbage(self):
        for content in (b"", b"\n", b"\xff\x00\xfe" * 1000, TEXT.read_bytes(), b"[1, 2]\n", b'{"format": 3}\n'):
            with self.subTest(content[:20]):
                self.refuse_content(content, "not a checkpoint")

    def test_bad_step(self):
        for step in (-1, 2**64 - 1, 1.5, None):
            with self.subTest(step=step):
                self.refuse_content(with_header(self.file, step=step), "step")

    def test_header_without_model(self):
        for model in ({}, []):
            with self.subTest(model=model):
                self.refuse_content(with_header(self.file, model=model), "model", "context")

    def test_directory(self):
        self.assert_not_resumed("directory", file=self.directory)

    def test_nothing_left_to_train(self):
        for steps in (1, 2):
            with self.subTest(steps=steps):
                run = self.launch(1, "--steps", steps, "--batch", 64, "--resume", self.file)
                self.assert_refused(run, f"--resume {self.file}", "at step 2", f"--steps is {steps}")
                self.assertEqual(run.stdout, "")


if __name__ == "__main__":
    train_runs.main()
