#!/usr/bin/python3
"""Names of types defined in two files.

Two classes of one qualified name are one class to the linker: whichever copy of an inline function
it keeps serves both, and nothing says so before memory is overwritten. Types inside an unnamed
namespace, templates and forward declarations are passed over.

usage: tools/check_names.py FILE...      exit 1 when a name has two definitions
"""
import collections
import re
import sys

TYPE = re.compile(r"(?:class|struct|union|enum(?: class)?)\s+(?:[A-Z_]+(?:\([^)]*\))?\s+)*([\w:]+)(?:\s+final)?(?:\s*:[^:].*)?", re.S)
NAMESPACE = re.compile(r"(?:inline\s+)?namespace\s*([\w:]*)")
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
UNNAMED = ""


def types_of(text):
    """Qualified names of the types that `text` defines where other files can see them."""
    text = NOT_CODE.sub(" ", text)
    scopes = []  # each scope is a name, UNNAMED, or None for a body of code
    start = 0
    for mark in re.finditer(r"[{};]", text):
        head = text[start : mark.start()].strip()
        start = mark.end()
        if mark.group() == "}":
            if scopes:
                scopes.pop()
        elif mark.group() == "{":
            # An access label may stand before a nested type.
            head = re.sub(r"^(?:public|protected|private)\s*:\s*", "", head)
            namespace, kind = NAMESPACE.fullmatch(head), TYPE.fullmatch(head)
            if kind and None not in scopes and UNNAMED not in scopes:
                yield "::".join([*scopes, kind.group(1)])
            found = namespace or kind
            scopes.append(found.group(1) if found else None)


def main(paths):
    files = collections.defaultdict(set)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for name in types_of(file.read()):
                files[name].add(path)
    twice = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    for name, where in sorted(twice.items()):
        print(f"{name} is defined in {' and '.join(where)}", file=sys.stderr)
    if not files:
        print("no type found at all", file=sys.stderr)
    return 1 if twice or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
