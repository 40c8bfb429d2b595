"""docs/changing.md names files that exist, and tells of each list how many files it has."""

import os
import re
import unittest

PAGE = "docs/changing.md"
# Every file may be named, so the tree is found through the page itself, whose real place is in it. For that the test runs
# anew each time (BUILD.bazel).
TREE = os.path.dirname(os.path.dirname(os.path.realpath(PAGE)))
TOP = "client|daemon|deploy|docs|proto|tests|third_party|tools|transport"


def paths_of(text):
    """Every path from the tree's root in the text, as `a/b.c` or the folder `a/b/`."""
    return re.findall(r"`((?:%s)/[\w./-]*)`" % TOP, text)


def sections_of(text):
    """{heading: text below it} of the headings of second order."""
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def anchor_of(heading):
    return "#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


class ChangingTest(unittest.TestCase):
    def setUp(self):
        self.assertTrue(os.path.isfile(os.path.join(TREE, "WORKSPACE")), "%s is not the tree" % TREE)
        with open(PAGE) as file:
            self.page = file.read()

    def test_every_path_exists(self):
        paths = paths_of(self.page)
        self.assertGreater(len(paths), 100)
        missing = sorted({path for path in paths if not os.path.exists(os.path.join(TREE, path))})
        self.assertEqual(missing, [])

    def test_every_link_leads_somewhere(self):
        anchors = {anchor_of(heading) for heading in sections_of(self.page)}
        for target in re.findall(r"\]\(([^)]*)\)", self.page):
            if target.startswith("#"):
                self.assertIn(target, anchors)
            else:
                self.assertTrue(os.path.exists(os.path.join(TREE, "docs", target.split("#")[0])), target)

    def test_lists_have_as_many_files_as_the_table_tells(self):
        told = re.findall(r"^\| \[[^]]*\]\((#[\w-]+)\).*\| (\d+) \| (\d+) \| \d+ \|$", self.page, flags=re.M)
        self.assertEqual(len(told), 5)
        sections = {anchor_of(heading): text for heading, text in sections_of(self.page).items()}
        for anchor, files, python in told:
            rows = re.findall(r"^\| (\d+) \| `([^`]*)` \|", sections[anchor], flags=re.M)
            paths = [path for _, path in rows]
            self.assertEqual([int(number) for number, _ in rows], list(range(1, int(files) + 1)), anchor)
            self.assertEqual(len(set(paths)), len(paths), anchor)
            self.assertEqual(sum(path.startswith("client/python/") for path in paths), int(python), anchor)


if __name__ == "__main__":
    unittest.main()
