# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel as pip does, without CUDA, and installs it into a fresh virtual environment: its tag, files, needs, and tests
on it.

wheel_test.py --source REPOSITORY --build-dir DIRECTORY --launcher EPX_TEST_LAUNCH
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import unittest

import ranks

ranks.require("numpy", "jaxlib", "mesonpy", "auditwheel")

FOLDER = pathlib.Path(__file__).parent
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libgcc_s|libstdc\+\+|ld-linux-x86-64|ld-linux-aarch64)\.so\.\d+$")


def run(*command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, env={**os.environ, **environment})
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        folder = pathlib.Path(cls.directory.name)
        # The interpreter's own meson comes before that of the machine, which meson-python may be too new for.
        path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
        # Several sources are one translation unit, and little is optimized: fmt and spdlog are compiled into the libraries here,
        # so that none of the objects is one of the build that this is a test of.
        options = ("cuda=disabled", "unity=on", "unity_size=12", "optimization=1")
        run(
            *[sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"],
            *["--wheel-dir", str(folder), *[f"-Csetup-args=-D{option}" for option in options]],
            *[f"-Cbuild-dir={OPTIONS.build_dir}", OPTIONS.source],
            PATH=path,
        )
        (cls.wheel,) = folder.glob("*.whl")
        # What the package needs is that of this interpreter's environment; epx itself is in the fresh one alone.
        run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
        cls.python = str(folder / "venv" / "bin" / "python")
        cls.installed = pathlib.Path(run(cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (cls.installed / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        run(
            sys.executable,
            "-m",
            "pip",
            "--python",
            cls.python,
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            str(cls.wheel),
        )

    def test_tag(self):
        self.assertRegex(self.wheel.name, r"^epx-[0-9.]+-cp3\d+-abi3-\w+\.whl$")

    def test_files(self):
        package = pathlib.Path(OPTIONS.source) / "python"
        sources = {str(path.relative_to(package)) for path in package.glob("epx/**/*") if path.suffix in (".py", ".typed")}
        files = {str(path.relative_to(self.installed)) for path in self.installed.glob("epx/**/*") if path.is_file()}
        self.assertEqual(files - sources, {f"epx/_libs/{name}.so.0" for name in ("libepx", "libepx_moe", "libepx_ffi")})
        self.assertEqual(sources - files, set())
        licences = {path.name for path in self.installed.glob("*.dist-info/licenses/**/*") if path.is_file()}
        self.assertEqual(licences, {"LICENSE", "THIRD_PARTY.txt"})

    def test_needs(self):
        shown = run(sys.executable, "-m", "auditwheel", "show", str(self.wheel))
        self.assertRegex(shown.replace("\n", " "), r'consistent with the following platform tag: "manylinux_2_\d+_')
        for library in self.installed.glob("epx/_libs/*"):
            needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "--dynamic", "--wide", str(library)))
            self.assertIn("libc.so.6", needed)
            self.assertEqual([name for name in needed if not SYSTEM_LIBRARIES.match(name) and name != "libepx.so.0"], [])

    def test_runs(self):
        for test, count in (("core_test.py", 2), ("block_test.py", 2), ("jax_hlo_test.py", 1)):
            output = run(
                OPTIONS.launcher,
                "-n",
                str(count),
                "--timeout",
                "200",
                "--",
                self.python,
                "-B",
                str(FOLDER / test),
                PYTHONPATH="",
            )
            self.assertNotIn("skipped:", output)

    def test_transport_nccl_is_refused_with_a_sentence(self):
        program = (
            "import epx\n"
            "try:\n"
            "  epx.Group(epx.bootstrap.local(), num_experts=1, max_tokens_per_rank=1, hidden_dim=1, max_top_k=1,\n"
            "            max_token_dtype='float32', transport='nccl')\n"
            "except epx.UnsupportedError as error:\n"
            "  print(error)\n"
        )
        self.assertIn("host transport only", run(self.python, "-c", program, PYTHONPATH=""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True)
    parser.add_argument("--build-dir", required=True)
    parser.add_argument("--launcher", required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
