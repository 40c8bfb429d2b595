#!/usr/bin/python3
"""Finds code that decides by a text that is for people: the message of a status or of an exception, or a reason.

What programs decide by is a Failure (transport/base/failure.h; refitd.Error's fields): texts hold what members said, and are cut.
A line that has the words of EXCEPTION says why it may: another program puts data into nothing but a text.
usage: check_texts.py FILE...     prints each place, and ends with 1 if there is one
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

EXCEPTION = "texts: "

# A text: Message(status), status.message(), error_message(), what(), x.reason or reason(), also behind std::string(...).
TEXT = r"(?:\bMessage\([^;]*?\)|(?:\.|->)(?:error_)?message\(\)|(?:\.|->)what\(\)|(?:\.|->)reason(?:\(\))?)\)?"
# ...that is searched, cut apart or compared with words.
READ = r"\s*(?:\.(?:find|rfind|find_first_of|substr|starts_with|ends_with|contains|compare)\(|[=!]= \"[^\"])"
SEARCHED = r"(?:StrContains|StartsWith|EndsWith|ConsumePrefix|SimpleAtoi|from_chars|regex_(?:search|match))\([^;]*?" + TEXT
# A variable that holds one, by its name.
NAMED = r"\b(?:message|reason|why)\.(?:find|rfind|find_first_of|substr|starts_with|ends_with|contains)\("
CPP = re.compile(TEXT + READ + "|" + SEARCHED + "|" + NAMED)

PYTHON_READS = {"find", "index", "startswith", "endswith", "split", "partition", "removeprefix", "removesuffix", "count"}
PYTHON_SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "sub", "split"}


def is_text(node: ast.expr) -> bool:
    """Whether it is str(error), an error's args, or x.reason or x.message."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.value, ast.Name) and is_text(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr in ("reason", "message", "args")
    if isinstance(node, ast.Name):
        return node.id in ("message", "reason")
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
    return named and isinstance(node, ast.Call) and bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id in ("error", "e", "why", "raised")


def reads_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        words = any(isinstance(side, ast.Constant) and isinstance(side.value, str) and side.value for side in sides)
        searched = any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops) and is_text(node.comparators[0])
        return searched or (words and any(is_text(side) for side in sides))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in PYTHON_READS and is_text(node.func.value):
            return True
        return node.func.attr in PYTHON_SEARCHES and any(is_text(argument) for argument in node.args)
    return False


def places_in(path: Path) -> list[tuple[int, str]]:
    source = path.read_text()
    lines = source.splitlines()
    if path.suffix == ".py":
        found = [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr) and reads_text(node)]
    else:
        found = [source.count("\n", 0, match.start()) + 1 for match in CPP.finditer(source)]
    return [(line, lines[line - 1].strip()) for line in sorted(set(found)) if EXCEPTION not in lines[line - 1]]


def main(paths: list[str]) -> int:
    failed = False
    for path in map(Path, paths):
        for line, text in places_in(path):
            print(f"{path}:{line}: reads a text that is for people: {text}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
