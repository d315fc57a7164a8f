#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pages as readers see them: each link leads to a file that is there, and to a heading that the file has, and no text of a
picture lies outside its frame. pages_test.py SOURCE_ROOT"""
import pathlib
import re
import sys
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop() if len(sys.argv) > 1 else ".").resolve()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md"), *ROOT.glob("python/**/*.md")])


def text_of(page):
    """Returns the page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Returns the anchors of the headings, as the usual viewers make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(page), flags=re.MULTILINE):
        heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        base = name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def links(page):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text_of(page)))


SVG = "{http://www.w3.org/2000/svg}"
CHAR = 0.6  # the average width of a character of a wide sans-serif font, by its size
SLACK = 2.0  # units of the picture


def size_of(svg):
    """Returns width and height in the picture's own units."""
    if "viewBox" in svg.attrib:
        return [float(number) for number in svg.get("viewBox").split()[2:]]
    return float(svg.get("width")), float(svg.get("height"))


def frame_of(text, svg):
    """Returns left, top, right and bottom of a text that stands upright, or is turned to the left."""
    style = dict(entry.split(":", 1) for entry in text.get("style", "").replace(" ", "").split(";") if ":" in entry)
    size = style.get("font-size") or style.get("font") or text.get("font-size") or svg.get("font-size")
    size = float(re.match(r"[\d.]+", size)[0])
    length = CHAR * size * len("".join(text.itertext()))
    before = {"start": 0.0, "middle": 0.5, "end": 1.0}[style.get("text-anchor", text.get("text-anchor", "start"))] * length
    x, y = float(text.get("x")), float(text.get("y"))
    turn = re.search(r"rotate\((-?[\d.]+)", text.get("transform", ""))
    if turn and float(turn[1]) == -90:
        return x - size, y - (length - before), x, y + before
    return x - before, y - size, x - before + length, y


class Pages(unittest.TestCase):
    def test_there_are_pages(self):
        self.assertGreater(len(PAGES), 30)
        self.assertGreater(sum(len(links(page)) for page in PAGES), 60)

    def test_links(self):
        for page in PAGES:
            for link in links(page):
                if re.match(r"[a-z]+:", link):
                    continue
                with self.subTest(page=str(page.relative_to(ROOT)), link=link):
                    path, _, anchor = link.partition("#")
                    target = (page.parent / path).resolve() if path else page
                    self.assertTrue(target.exists(), "the file is not there")
                    self.assertTrue(target.is_relative_to(ROOT), "it leads out of the repository")
                    if anchor:
                        self.assertIn(anchor, anchors(target), "the page has no such heading")

    def test_texts_of_pictures(self):
        pictures = sorted(ROOT.glob("docs/**/*.svg"))
        self.assertGreater(len(pictures), 3)
        for picture in pictures:
            svg = xml.etree.ElementTree.parse(picture).getroot()
            width, height = size_of(svg)
            texts = list(svg.iter(f"{SVG}text"))
            self.assertGreater(len(texts), 10)
            for text in texts:
                with self.subTest(picture=picture.name, text=text.text):
                    left, top, right, bottom = frame_of(text, svg)
                    self.assertGreaterEqual(min(left, top), -SLACK)
                    self.assertLessEqual(right, width + SLACK)
                    self.assertLessEqual(bottom, height + SLACK)


if __name__ == "__main__":
    unittest.main()
