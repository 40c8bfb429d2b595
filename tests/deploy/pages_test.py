"""Pages for users state results: no load, seed, machine, test file or history, which are for evidence pages. They have one shape."""

import ast
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tempfile
import unittest

# The pages may link any file, so the test finds the tree by the real place of one page.
TREE = os.path.dirname(os.path.dirname(os.path.realpath("docs/quickstart.md")))
TUTORIALS = tuple("tutorials/" + name for name in ("fsdp2", "transformers", "lora", "megatron", "skyrl", "verl", "nemo_rl", "slime"))
GUIDES = ("quickstart", "concepts", "comparison", "python", "vllm", "sglang", "trainers", "refitctl", "grpc", "operations", "access",
          "kubernetes", "troubleshooting", "networks", "sizing", "upgrade", "runbook", *TUTORIALS)
SHAPED = ("quickstart", "python", "vllm", "sglang", "trainers", "refitctl", "grpc", "operations", "access", "kubernetes", "troubleshooting",
          "networks", "sizing", "upgrade", "runbook", *TUTORIALS)
README_WORDS = 500

# What belongs to a laboratory's log, by kind.
LOG = {
    "load": r"\bat a load\b|\bload(?: of)? (?:about )?\d|\bload average\b|\boverloaded\b|\bidle (?:virtual )?machine\b|busy with compilers",
    "seed": r"\bseeds?\b",
    "machine": r"\bEPYC\b|\bXeon\b|\b\d+[- ]cores?\b|\bH[12]00\b|virtual machines?\b|\bdriver \d{3}\.",
    "test file": r"\btest_\w+\.py\b|\w_test\.(?:py|cc|sh)\b|\b\w+_test\b|//tests/(?!workloads)|tests/(?:engines|e2e|gpu|sim|bench)\b|\btools/engines\b",
    "history": r"\b(?:was|were|is|are) mended\b|\bmended since\b|\bwas cut\b|\bfailed once\b|\bused to\b|\buntil recently\b|"
               r"\bbefore (?:this|these) changes?\b|\bafter these changes\b|\bwas not (?:traced|recorded)\b|\bnot run yet\b|"
               r"\bthe (?:package|build|state) before\b|\bpassed, \d|\b\d+ failed\b",
}
# In these places the words are what is told: hardware that a comparison's figures are of, and the cores of a machine to install on.
ALLOWED = {
    ("comparison", "machine"): r"\bH[12]00\b",
    ("quickstart", "machine"): r"two cores|\b2 cores\b",
}
SHAPE = (r"\*\*What you get\*\*", r"\*\*Before you start\*\*", r"## If it fails", r"## Next")


def text_of(name):
    with open(os.path.join(TREE, "docs", name + ".md")) as file:
        return file.read()


def log_words(name, text):
    """Every word of a laboratory's log in the page: (line, kind, word)."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        line = re.sub(r"\]\([^)]*\)", "]", line)  # addresses of links are not read
        for kind, pattern in LOG.items():
            for match in re.finditer(pattern, line, flags=re.I if kind != "machine" else 0):
                if not re.fullmatch(ALLOWED.get((name, kind), r"(?!)"), match.group()):
                    found.append((number, kind, match.group()))
    return found


def unknown_flags(block):
    """Flags in the block's commands of refitd and refitctl that their help does not have."""
    with open(os.path.join(TREE, "docs/reference/commands.md")) as file:
        known = set(re.findall(r"--[a-z][a-z-]*", file.read()))
    commands = re.findall(r"(?m)(?:^ *|[|;&] *|-- )(?:refitd|refitctl) ([^\n|;&#]*)", block.replace("\\\n", " "))
    return [flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", command) if flag not in known]


class PagesTest(unittest.TestCase):
    def test_guidance_pages_have_no_word_of_a_laboratorys_log(self):
        for name in GUIDES:
            with self.subTest(page=name):
                self.assertEqual(log_words(name, text_of(name)), [])

    def test_words_of_a_laboratorys_log_are_found(self):
        for text in ("ran at load 8 to 13", "with 0.32.0 and seed 1", "2 cores of an AMD EPYC", "`tests/engines/test_vllm.py` runs it",
                     "the test that failed is mended", "that run was cut", "on one H100", "`faults_test`", "35 passed, 21 skipped",
                     "2 cores that were overloaded"):
            with self.subTest(text=text):
                self.assertNotEqual(log_words("vllm", text), [])
        for text in ("the load format", "`--load-format refitd`", "`load_weights`", "to 16 nodes", "a test of yours", "[it](../tests/e2e/x_test.cc)"):
            with self.subTest(text=text):
                self.assertEqual(log_words("vllm", text), [])

    def test_tutorials_have_one_shape(self):
        for name in SHAPED:
            text = text_of(name)
            places = [re.search(part, text) for part in SHAPE]
            with self.subTest(page=name):
                self.assertNotIn(None, places)
                starts = [place.start() for place in places]
                self.assertEqual(starts, sorted(starts))

    def test_the_status_that_a_server_answers_is_the_drivers(self):
        with open(os.path.join(TREE, "client/python/refitd/serving/driver.py")) as file:
            driver = file.read()
        (shown,) = re.findall(r"```json\n(.*?)```", text_of("vllm"), flags=re.S)
        status = re.search(r"def status\(self\).*?return \{(.*?)\}", driver, flags=re.S).group(1)
        self.assertEqual(list(json.loads(shown)), re.findall(r'"(\w+)":', status))
        self.assertIn('"%s"' % json.loads(shown)["state"], re.search(r"class State\(Enum\):(.*?)\n\n", driver, flags=re.S).group(1))

    def test_figures_of_sizing_are_those_of_the_section_that_they_link(self):
        performance = {LinksTest.anchor(title): below for title, below in
                       re.findall(r"(?m)^#{2,3} (.*)\n((?:(?!^#{2,3} ).*\n)*)", text_of("performance"))}
        links = re.findall(r"\[([^]]*\d[^]]*)\]\(performance\.md#([\w-]+)\)", text_of("sizing"))
        self.assertGreater(len(links), 8)
        for text, anchor in links:
            for number in re.findall(r"\d+(?:\.\d+)?", text):
                with self.subTest(number=number, section=anchor):
                    self.assertRegex(performance[anchor], r"(?<![\d.])%s(?![\d]|\.\d)" % re.escape(number))

    def test_code_on_pages_is_code(self):
        for name in GUIDES:
            for code in re.findall(r"(?m)^```python\n(.*?)^```", text_of(name), flags=re.S):
                with self.subTest(page=name, code=code):
                    ast.parse(code)

    def test_flags_of_commands_on_pages_exist(self):
        self.assertEqual(unknown_flags("refitctl --sockets /tmp/a push X \\\n --creat | refitd --none"), ["--sockets", "--creat", "--none"])
        for name in GUIDES:
            for block in re.findall(r"(?m)^ *```\n(.*?)^ *```", text_of(name), flags=re.S):
                with self.subTest(page=name, block=block):
                    self.assertEqual(unknown_flags(block), [])

    def test_the_readme_is_short_and_shows_a_figure_on_its_first_screen(self):
        with open(os.path.join(TREE, "README.md")) as file:
            text = file.read()
        self.assertLessEqual(len(text.split()), README_WORDS)
        self.assertIn("](docs/figures/", "\n".join(text.split("\n")[:12]))


def load(path):
    """A script of the tree, as a module."""
    sys.path.insert(0, os.path.join(TREE, os.path.dirname(path)))
    loader = importlib.machinery.SourceFileLoader(os.path.basename(path).removesuffix(".py"), os.path.join(TREE, path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


class FiguresTest(unittest.TestCase):
    """tools/figures, which tools/docs runs with --check."""

    figures = load("tools/figures")

    def test_a_table_that_differs_from_its_file_is_found(self):
        with open(os.path.join(TREE, "docs/performance.md")) as file:
            page = file.read()
        self.assertGreater(len(list(self.figures.tables_of(page))), 3)
        self.assertEqual(self.figures.complaints_about_tables("performance.md", page), [])
        for name, rows in self.figures.tables_of(page):
            cell = next(cell for cell in rows[1][1:] if cell)
            marker = page.index(name)
            at = page.index("|" + cell + "|", marker)
            with self.subTest(table=name):
                changed = page[:at] + "|9" + cell + "|" + page[at + len(cell) + 2:]
                self.assertEqual(self.figures.complaints_about_tables("performance.md", changed),
                                 [f"performance.md: its table differs from docs/evidence/data/{name}"])

    def test_figures_take_groups_and_shares_from_the_tables(self):
        rows = list(self.figures.data_of([("series", "refitd = gpu_refits[case=full replicas].off, ms"), ("divide", "2")]))
        self.assertEqual(rows[0], ["Qwen3-4B", "refitd", "11.200"])
        self.assertEqual([row[0] for row in rows], ["Qwen3-4B", "Moonlight-16B-A3B", "Qwen3-30B-A3B"])

    def test_ports_in_the_picture_of_a_node_are_those_of_the_manifests(self):
        with open(os.path.join(TREE, "docs/figures/kubernetes_node.csv")) as file:
            drawn = set(re.findall(r"\b(?:74|94)\d\d\b", file.read()))
        opened = set()
        for path in ("base/daemonset.yaml", "components/nodes/ports.yaml"):
            with open(os.path.join(TREE, "deploy/kubernetes", path)) as file:
                opened |= set(re.findall(r"containerPort: (\d+)", file.read()))
        self.assertEqual(drawn, opened)


class LinksTest(unittest.TestCase):
    """tools/docs_tree.py, which tools/docs asks of every page."""

    docs_tree = load("tools/docs_tree.py")

    @classmethod
    def anchor(cls, title):
        (found,) = cls.docs_tree.anchors_of("# " + title)
        return found

    def test_links_without_a_file_or_heading_are_found(self):
        page = "\n".join([
            "# A page", "## Who may: `do` what", "[a](#who-may-do-what) [b](b.md#its-heading) [c](folder) [d](https://example.org/x)",
            "[e](c.md)", "[f](#nowhere)", "[g](b.md#nowhere)", "[h](../outside.md)", "`[i](c.md)`", "```", "[j](c.md)", "```"])
        texts = {"a.md": page, "b.md": "# Its heading\n"}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            os.mkdir("folder")
            for name, text in texts.items():
                with open(name, "w") as file:
                    file.write(text)
            complaints = self.docs_tree.complaints_about("a.md", texts)
        self.assertEqual([complaint.split(":")[1] for complaint in complaints], ["4", "5", "6", "7"])

    def test_lists_and_tables_get_what_mkdocs_wants_of_them(self):
        laid_out = self.docs_tree.with_blank_lines
        self.assertEqual(laid_out("text\n- a\n  more\n- b"), "text\n\n- a\n    more\n- b")
        self.assertEqual(laid_out("- a\n  - b\n"), "- a\n    - b\n")
        self.assertEqual(laid_out("text\n| a |\n|---|"), "text\n\n| a |\n|---|")
        self.assertEqual(laid_out("```\ntext\n- a\n```"), "```\ntext\n- a\n```")


if __name__ == "__main__":
    unittest.main()
