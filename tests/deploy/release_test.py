"""What a release needs: a changelog's entry, a licence of everything that is linked, a bill of materials, one time for all files."""

import csv
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

# The tools are scripts of the tree, which the test finds by the real place of a page.
TREE = os.path.dirname(os.path.dirname(os.path.realpath("docs/quickstart.md")))
SECONDS = 60
ROWS = [
    {"package": "libc-ares2", "version": "1.18.1-3+b1", "source": "c-ares", "source_version": "1.18.1-3", "libraries": ["libcares.so.2"]},
    {"package": "libcli11-dev", "version": "2.1.2+ds-1", "source": "cli11", "source_version": "2.1.2+ds-1", "libraries": []},
]


def load(name):
    """A script of tools/, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(TREE, "tools", name + ".py"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


class FolderTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)


class ReleaseTest(FolderTest):
    """tools/release --check, in a repository that has a version and a changelog."""

    def git(self, *arguments):
        subprocess.run(["git", "-C", self.folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, timeout=SECONDS,
                       stdout=subprocess.DEVNULL)

    def check(self, changelog, version="1.2.3", commit=True):
        """The exit status and what was said."""
        for name, text in (("CHANGELOG.md", changelog), ("transport/base/version.h", f'inline constexpr char kVersion[] = "{version}";\n')):
            path = os.path.join(self.folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        os.makedirs(self.folder + "/tools", exist_ok=True)
        shutil.copy(TREE + "/tools/release", self.folder + "/tools")
        if commit:
            self.git("init", "-q")
            self.git("add", "-A")
            self.git("commit", "-q", "--allow-empty", "-m", "a")
        done = subprocess.run([self.folder + "/tools/release", "--check"], capture_output=True, text=True, timeout=SECONDS)
        return done.returncode, done.stdout + done.stderr

    def refused(self, said, *arguments, **options):
        status, text = self.check(*arguments, **options)
        self.assertEqual(status, 1, text)
        self.assertIn(said, text)

    def test_a_version_with_an_entry_may_be_released(self):
        self.assertEqual(self.check("# Changelog\n## Unreleased\n\n## 1.2.3 (2026-01-31)\n- A thing.\n"), (0, "1.2.3 may be released\n"))

    def test_a_version_without_an_entry_is_refused(self):
        self.refused("no heading '## 1.2.3", "# Changelog\n## 1.2.2 (2026-01-31)\n- A thing.\n")
        self.refused("no heading '## 1.2.3", "# Changelog\n## 1.2.3\n- No date.\n")
        self.refused("says nothing", "# Changelog\n## 1.2.3 (2026-01-31)\n\n## 1.2.2 (2026-01-01)\n- A thing.\n")

    def test_lines_that_no_version_has_are_refused(self):
        self.refused("unreleased lines", "# Changelog\n## Unreleased\n- Later.\n## 1.2.3 (2026-01-31)\n- A thing.\n")

    def test_a_version_that_is_none_is_refused(self):
        self.refused("no version of three numbers", "# Changelog\n", version="1.2")

    def test_a_tree_with_changes_is_refused(self):
        good = "# Changelog\n## 1.2.3 (2026-01-31)\n- A thing.\n"
        self.check(good)
        self.refused("not committed", good + "- Another.\n", commit=False)

    def test_a_tag_at_another_commit_is_refused(self):
        good = "# Changelog\n## 1.2.3 (2026-01-31)\n- A thing.\n"
        self.check(good)
        self.git("tag", "v1.2.3")
        self.assertEqual(self.check(good, commit=False)[0], 0, "the tag is of this commit")
        self.refused("the tag v1.2.3", good + "- Another.\n")

    def test_the_changelog_of_this_tree_has_lines_for_its_version(self):
        with open(TREE + "/CHANGELOG.md") as file:
            headings = re.findall(r"(?m)^## (\S+)", file.read())
        with open(TREE + "/transport/base/version.h") as file:
            version = re.search(r'kVersion\[\] = "(.+)"', file.read()).group(1)
        self.assertTrue({"Unreleased", version} & set(headings), headings)


class LicensesTest(FolderTest):
    def test_the_notice_has_the_licences_that_the_bill_has(self):
        with open(TREE + "/third_party/licenses.csv", newline="") as file:
            known = {row["name"]: row["licence"] for row in csv.DictReader(file)}
        with open(TREE + "/NOTICE") as file:
            listed = dict(re.findall(r"(?m)^  (\S.*?) {2,}(\S.*)$", file.read()))
        self.assertEqual(listed, known)

    def test_the_bill_has_every_package_with_its_licence(self):
        load("wheel_licenses")
        wheel = os.path.join(self.folder, "refitd-1.2.3-py3-none-any.whl")
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("refitd/_bin/", "")
            archive.writestr("refitd/_bin/refitd", "a program")
            archive.writestr("refitd/_licenses/packages.json", json.dumps(ROWS))
        bill = load("sbom").bill(wheel, 86400)
        self.assertEqual((bill["bomFormat"], bill["metadata"]["timestamp"]), ("CycloneDX", "1970-01-02T00:00:00+00:00"))
        self.assertEqual(bill["metadata"]["component"]["version"], "1.2.3")
        self.assertEqual([each["name"] for each in bill["metadata"]["component"]["components"]], ["refitd/_bin/refitd"])
        self.assertEqual([(each["name"], each["version"], each["licenses"]) for each in bill["components"]], [
            ("libc-ares2", "1.18.1-3+b1", [{"expression": "MIT AND ISC"}]), ("libcli11-dev", "2.1.2+ds-1", [{"expression": "BSD-3-Clause"}])])
        self.assertEqual(bill["components"][1]["purl"], "pkg:deb/debian/libcli11-dev@2.1.2%2Bds-1?arch=amd64&distro=debian-12")
        references = [each["bom-ref"] for each in bill["components"]]
        self.assertEqual(bill["dependencies"][0]["dependsOn"], references)
        self.assertEqual(len(set(references)), len(ROWS))

    def test_a_wheel_that_carries_another_library_is_refused(self):
        check = load("wheel_licenses").check
        wheel = os.path.join(self.folder, "refitd.whl")
        for library, refused in (("libcares-0123abcd.so.2.5", False), ("libother-0123abcd.so.1", True)):
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("refitd/_licenses/packages.json", json.dumps(ROWS))
                archive.writestr("refitd.libs/" + library, "a library")
            if refused:
                self.assertRaises(SystemExit, check, wheel)
            else:
                check(wheel)


if __name__ == "__main__":
    unittest.main()
