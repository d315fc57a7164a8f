#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md quotes sentences that the sources have, and all that a group's report can say."""
import ast
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "…"  # takes the place of a value, in the page and here
CPP_TOKEN = re.compile(r'"((?:[^"\\\n]|\\.)*)"|\'(?:[^\'\\\n]|\\.)\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def sentences_of_cpp(text):
    """The string literals, adjacent ones as one."""
    found, end = [], None
    for token in CPP_TOKEN.finditer(text):
        if token.group(1) is None:
            continue
        literal = token.group(1).replace('\\"', '"')
        if end is not None and text[end:token.start()].isspace():
            found[-1] += literal
        else:
            found.append(literal)
        end = token.end()
    return [re.sub(r"\{[^{}]*\}", VALUE, sentence) for sentence in found]


def sentences_of_python(text):
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def sentences_of_meson(text):
    return re.findall(r"'([^'\n]*)'", text)


READERS = {".cc": sentences_of_cpp, ".h": sentences_of_cpp, ".py": sentences_of_python, ".build": sentences_of_meson}


def all_sentences():
    files = [ROOT / "meson.build"]
    for folder in ("base", "runtime", "transport", "moe", "python"):
        files += [file for file in sorted((ROOT / folder).rglob("*")) if file.suffix in READERS]
    return [sentence for file in files for sentence in READERS[file.suffix](file.read_text(encoding="utf-8"))]


def quotes():
    """The code spans in the first column of the page's tables."""
    cells = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


class Readers(unittest.TestCase):
    def test_cpp(self):
        text = '// a "comment"\nfail(status, "epx: {} of {:016x} "\n     "\\"rows\\"", 10\'000, \'"\'); use("other")'
        self.assertEqual(sentences_of_cpp(text), [f'epx: {VALUE} of {VALUE} "rows"', "other"])

    def test_python(self):
        self.assertIn(f"rank {VALUE} has failed", sentences_of_python('fail(f"rank {rank!r} "\n "has failed")'))


class Page(unittest.TestCase):
    def test_quotes_sentences_of_the_sources(self):
        sentences = all_sentences()
        for quote in quotes():
            with self.subTest(quote):
                self.assertTrue(any(quote in sentence for sentence in sentences), "no source says so")

    def test_quotes_each_sentence_once(self):
        self.assertEqual(sorted(quotes()), sorted(set(quotes())))

    def test_has_all_sentences_of_reports(self):
        reports = ROOT / "runtime" / "stages" / "reports.cc"
        for sentence in sentences_of_cpp(reports.read_text(encoding="utf-8")):
            if len(sentence) > 30 and not sentence.startswith("runtime/"):
                with self.subTest(sentence):
                    self.assertTrue(any(quote in sentence for quote in quotes()), "the page does not have it")


if __name__ == "__main__":
    unittest.main()
