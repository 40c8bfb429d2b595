"""docs/changing.md names files that exist and counts them, docs/architecture.md names the functions of a push; docs/decisions.md is numbered and indexed."""

import os
import re
import unittest

PAGE = "docs/changing.md"
# The page may name any file of the tree, so the test finds the tree by the real place of the page. Bazel does not know
# these files as its inputs, so the test runs anew each time (BUILD.bazel).
TREE = os.path.dirname(os.path.dirname(os.path.realpath(PAGE)))
DECISIONS = os.path.join(TREE, "docs", "decisions.md")
ARCHITECTURE = os.path.join(TREE, "docs", "architecture.md")
MOST_FILES_OF_A_PUSH = 39  # that a reader opens to follow a push from Python's Update.push on, on one daemon
MOST_WORDS_OF_A_RECORD = 250  # a record has reasons and decisive figures; evidence belongs to docs/performance.md
TOP = "client|daemon|deploy|docs|proto|tests|third_party|tools|transport"

# A transport's own folders, and files with names of other projects' interfaces that sound like it.
OWN = ("transport/cuda/", "client/python/refitd/layout/cuda")
OTHERS = (
    "client/python/refitd/integrations/sglang.py",
    "client/python/refitd/integrations/skyrl_strategy.py",
    "client/python/refitd/integrations/vllm/backend.py",
)
TEST_FILE = re.compile(r"(^|/)(tests|examples)/|_test[._]|/test_|_test_util\.|_testing\.")


def paths_of(text):
    """Every path from the tree's root in the text, as `a/b.c` or the folder `a/b/`."""
    return re.findall(r"`((?:%s)/[\w./-]*)`" % TOP, text)


def sections_of(text):
    """{heading: text below it} of the headings of second order."""
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def anchor_of(heading):
    return "#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def code_of(path, text):
    """The file's text without comments and strings."""
    if path.endswith(".py"):
        left_out = r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
    else:
        left_out = r'//[^\n]*|/\*[\s\S]*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(left_out, " ", text)


def files_that_name(pattern, tree=TREE):
    """The product's files whose code has a name that matches."""
    found = []
    for top in ("client", "daemon", "proto", "transport"):
        for folder, _, names in os.walk(os.path.join(tree, top)):
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), tree)
                if not path.endswith((".h", ".cc", ".c", ".proto", ".py")) or TEST_FILE.search(path):
                    continue
                if path.startswith(OWN) or path in OTHERS:
                    continue
                with open(os.path.join(tree, path)) as file:
                    if re.search(pattern, code_of(path, file.read()), flags=re.I):
                        found.append(path)
    return sorted(found)


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

    def test_a_transports_lists_have_the_files_whose_code_names_it(self):
        rows = re.findall(r"^\| (?:\d+|-) \| `([^`]*)` \|", sections_of(self.page)["A transport"], flags=re.M)
        self.assertEqual(sorted(rows), files_that_name("cuda|nccl|gpu"))


class RoadTest(unittest.TestCase):
    """docs/architecture.md, "The road of a push"."""

    def setUp(self):
        with open(ARCHITECTURE) as file:
            self.road = sections_of(file.read())["The road of a push"]
        self.rows = re.findall(r"^\| (\d+) \| `([^`]*)` \| ([^|]*) \|", self.road, flags=re.M)

    def test_every_function_of_a_step_is_in_its_file(self):
        self.assertEqual([int(number) for number, *_ in self.rows], list(range(1, len(self.rows) + 1)))
        missing = []
        for _, path, functions in self.rows:
            with open(os.path.join(TREE, path)) as file:
                text = file.read()
            missing += [(path, name) for name in re.findall(r"`([^`]*)`", functions) if name.split("::")[-1] not in text]
        self.assertEqual(missing, [])

    def test_a_push_on_one_daemon_crosses_few_files(self):
        self.assertLessEqual(len({path for _, path, _ in self.rows}), MOST_FILES_OF_A_PUSH)

    def test_every_path_exists(self):
        paths = paths_of(self.road)
        self.assertGreater(len(paths), 20)
        self.assertEqual([path for path in paths if not os.path.exists(os.path.join(TREE, path))], [])


class DecisionsTest(unittest.TestCase):
    def setUp(self):
        with open(DECISIONS) as file:
            self.page = file.read()
        heads = re.findall(r"^## (.*)\n\*\*(\d+)\.\*\* (\d{4}-\d\d-\d\d), (accepted|rejected|superseded)\b", self.page, flags=re.M)
        self.records = [(int(number), heading, date, status) for heading, number, date, status in heads]

    def test_every_record_has_the_next_number_a_date_and_a_status(self):
        self.assertEqual(len(self.records), len(re.findall(r"^## ", self.page, flags=re.M)))
        self.assertEqual([number for number, *_ in self.records], list(range(1, len(self.records) + 1)))

    def test_the_index_lists_every_record_once(self):
        rows = re.findall(r"^\|(\d+)\|\[([^]]*)\]\((#[\w-]+)\)\|([\d-]+)\|(\w+)\|$", self.page, flags=re.M)
        self.assertEqual(sorted((int(number), heading, date, status) for number, heading, _, date, status in rows), self.records)
        self.assertEqual([anchor for _, _, anchor, *_ in rows], [anchor_of(heading) for _, heading, *_ in rows])

    def test_every_path_exists(self):
        missing = sorted({path for path in paths_of(self.page) if not os.path.exists(os.path.join(TREE, path))})
        self.assertEqual(missing, [])

    def test_links_to_records_lead_to_one(self):
        anchors = {anchor_of(heading) for _, heading, *_ in self.records}
        for folder in ("docs", "tests", "client", "."):
            for here, inner, names in os.walk(os.path.join(TREE, folder)):
                if folder == ".":
                    inner.clear()
                for name in names:
                    if name.endswith(".md"):
                        path = os.path.join(here, name)
                        with open(path) as file:
                            targets = re.findall(r"\]\([^)]*decisions\.md(#[\w-]+)\)", file.read())
                        self.assertLessEqual(set(targets), anchors, path)
        self.assertLessEqual(set(re.findall(r"\]\((#[\w-]+)\)", self.page)), anchors)

    def test_no_record_is_a_report(self):
        long = [text.split("\n")[0] for text in re.split(r"^## ", self.page, flags=re.M)[1:]
                if len(text.split()) > MOST_WORDS_OF_A_RECORD]
        self.assertEqual(long, [])


class PromisesTest(unittest.TestCase):
    """What pages and lists promise to somebody who installs the package."""

    def test_pages_promised_an_install_from_an_index_that_has_no_package(self):
        promised = []
        for top in ("README.md", "docs", "client/python", "tools", "tests", "deploy"):
            top = os.path.join(TREE, top)
            files = [top] if os.path.isfile(top) else [
                os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
            for path in files:
                if path.endswith((".md", ".py")) and os.path.basename(path) != "changing_test.py":
                    with open(path) as file:
                        promised += [path for _ in re.findall(r"pip install ['\"]?refitd\b(?!-)", file.read())]
        self.assertEqual(promised, [])

    def test_the_list_of_trainers_frameworks_was_of_one_python(self):
        """A wheel that is built for each Python has a hash for each of 3.11 to 3.13, any other one hash."""
        with open(os.path.join(TREE, "tools/torch/2.11.0-trainers.txt")) as file:
            hashes = {line.split("==")[0]: line.count("--hash=sha256:") for line in file}
        built_for_each = {name for name, count in hashes.items() if count == 3}
        self.assertLessEqual({"torch", "numpy", "pandas", "pyarrow", "megatron-core"}, built_for_each)
        self.assertEqual({count for count in hashes.values()}, {1, 3})


if __name__ == "__main__":
    unittest.main()
