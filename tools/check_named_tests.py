#!/usr/bin/python3
"""Tests that a page names and that do not exist.

A page names a test as NAME_test "the beginning of the case's name ...", with or without backticks; several cases of one
test follow each other. The file NAME_test.cc must have a case whose name begins so.

usage: tools/check_named_tests.py PAGE...      exit 1 when a named test does not exist
"""
import re
import subprocess
import sys

NAMED = re.compile(r'\b(\w+_test)`?((?:,?\s*"[^"]+")+)')
CASE = re.compile(r'TEST_CASE(?:_METHOD)?\(\s*(?:\w+,\s*)?((?:"(?:\\.|[^"\\])*"\s*)+)')


def named_in(page):
    """Test and beginning of the case's name, of each case that the page names."""
    for test, cases in NAMED.findall(page):
        for case in re.findall(r'"([^"]+)"', cases):
            yield test, " ".join(case.split()).removesuffix("...").rstrip()


def cases_of(path):
    with open(path, encoding="utf-8") as file:
        return ["".join(re.findall(r'"((?:\\.|[^"\\])*)"', literals)) for literals in CASE.findall(file.read())]


def main(pages):
    sources = {}
    for path in subprocess.run(["git", "ls-files", "*_test.cc"], capture_output=True, text=True, check=True).stdout.split():
        sources.setdefault(path.rsplit("/", 1)[-1].removesuffix(".cc"), []).append(path)
    named = missing = 0
    for page in pages:
        with open(page, encoding="utf-8") as file:
            text = file.read()
        for test, case in named_in(text):
            named += 1
            if not any(name.startswith(case) for path in sources.get(test, ()) for name in cases_of(path)):
                print(f'{page}: {test} has no case "{case} ..."', file=sys.stderr)
                missing += 1
    if not named:
        print("no test is named at all", file=sys.stderr)
    return 1 if missing or not named else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
