#!/usr/bin/env python3
"""Checks the docstrings of the Python package's public names: those in __all__ of its __init__.py, and all of its public modules.

Each public class, function and method has a docstring, which begins with a sentence. Sections are Google's (Args, Returns, Yields, Raises,
Attributes). A function with three parameters or more has Args, and its Args name the parameters, all of them, in their order; those that are as in
another function may share an entry ("group: As in refitd.Engine, with `instance`, `rank`."). Raises names exceptions.
usage: tools/check_docstrings.py PACKAGE_FOLDER
"""

import ast
import re
import sys
from pathlib import Path

MODULES = ("aio", "doctor", "errors", "testing")  # public as a whole, beside what __all__ names
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes")
MOST_WITHOUT_ARGS = 2


def public(package):
    """(path, node) of each public class and function."""
    tree = ast.parse((package / "__init__.py").read_text())
    names = next(
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    wanted = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            path = package / (node.module.replace(".", "/") + ".py")
            path = path if path.exists() else path.with_suffix("") / "__init__.py"
            wanted.setdefault(path, set()).update(alias.name for alias in node.names if alias.name in names)
    for module in MODULES:
        wanted[package / f"{module}.py"] = None
    for path, those in sorted(wanted.items()):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
                if those is None or node.name in those:
                    yield path, node


def parameters_of(node):
    """The names of a function's parameters, without the first of a method, *arguments and **options."""
    given = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in given if name not in ("self", "cls")]


def sections_of(text):
    """{section: [(entry, its text)]} of a docstring, and the lines that look like a section and are none."""
    found, section = {}, None
    for line in text.splitlines()[1:]:
        heading = re.fullmatch(r"([A-Z]\w*):", line)
        entry = re.match(r"    (\*{0,2}[\w.]+(?:, [\w.]+)*): (.*)", line)
        if heading:
            section = found.setdefault(heading[1], [])
        elif line and not line.startswith(" "):
            section = None
        elif section is not None and entry:
            section.append([entry[1], entry[2]])
        elif section and line.strip():
            section[-1][1] += " " + line.strip()
    return found


def problems_of(node, of):
    """What is wrong with the docstring of a class or function; `of`: the class that it is a method of."""
    text = ast.get_docstring(node)
    called = f"{of}.{node.name}" if of else node.name
    if not text:
        if node.name != "__init__" and not node.name.startswith("__"):
            yield f"{called} has no docstring"
        return
    if not re.match(r"[^\n]*[.:;,)\w`\]\"]", text) or "." not in text:
        yield f"{called}: the docstring begins with no sentence"
    sections = sections_of(text)
    for section in sections:
        if section not in SECTIONS:
            yield f"{called}: there is no section '{section}'"
    if isinstance(node, ast.ClassDef):
        return
    parameters = parameters_of(node)
    entries = sections.get("Args")
    if entries is None:
        if len(parameters) > MOST_WITHOUT_ARGS:
            yield f"{called} has {len(parameters)} parameters and no section Args"
        return
    named = []
    for entry, told in entries:
        named.append(entry)
        named += re.findall(r"`(\w+)`", told) if told.startswith("As in") else []
    for name in named:
        if name not in parameters:
            yield f"{called}: Args names {name}, which is no parameter"
    for name in parameters:
        if name not in named:
            yield f"{called}: Args does not name {name}"


def main():
    failed = False
    package = Path(sys.argv[1])
    for path, node in public(package):
        nodes = [(node, "")]
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
            nodes += [(part, node.name) for part in methods if part.name == "__init__" or not part.name.startswith("_")]
        for part, of in nodes:
            for problem in problems_of(part, of):
                print(f"{path}:{part.lineno}: {problem}", file=sys.stderr)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
