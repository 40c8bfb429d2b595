#!/usr/bin/python3
"""Prints the man page of refitd or refitctl, as roff: what the program's own help says, and nothing else.

usage: tools/man_page.py PROGRAM SECTION
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from reference import help_of, subcommands_of

# A line of an option or a command: two spaces, its name, and, after two spaces or more, the beginning of its description.
ITEM = re.compile(r"  (\S.*?)(?: {2,}(\S.*))?$")
FOOTER = "Exit codes:"  # refitctl prints it below every command; the page shows it once


def escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def body(lines: list[str]) -> Iterator[str]:
    """The lines of a help that follow its description, with sections as headings and options as tagged paragraphs."""
    for line in lines:
        item = ITEM.match(line)
        if not line.strip():
            continue
        if line.endswith(":") and not line.startswith(" "):
            yield f".SS {escaped(line[:-1])}"
        elif line.startswith("Usage: "):
            yield f".PP\n.B {escaped(line.removeprefix('Usage: '))}"
        elif line.startswith(" " * 6) or item is None:
            yield escaped(line.strip())
        else:
            yield f".TP\n.B {escaped(item[1])}"
            if item[2]:
                yield escaped(item[2])


def commands(program: str, name: str, before: list[str]) -> Iterator[str]:
    for command in subcommands_of(help_of(program, name, before)):
        path = [*before, command]
        description, *rest = help_of(program, name, path).split("\n")
        if FOOTER in rest:
            rest = rest[: rest.index(FOOTER)]
        yield f".SH {escaped(' '.join([name, *path]))}"
        yield escaped(description)
        yield from body(rest)
        yield from commands(program, name, path)


def page(program: str, section: str) -> str:
    name = os.path.basename(program)
    description, *rest = help_of(program, name, []).split("\n")
    description = description.removeprefix(f"{name}: ").rstrip(".")
    footer = rest.index(FOOTER) if FOOTER in rest else len(rest)
    exits = [".SH EXIT STATUS", *body(rest[footer + 1 :])] if footer < len(rest) else []
    return "\n".join([
        f'.TH {name} {section} "" "refitd" "refitd"',
        ".SH NAME", f"{name} \\- {escaped(description[:1].lower() + description[1:])}",
        ".SH SYNOPSIS", *body(rest[:footer]),
        *commands(program, name, []),
        *exits,
        ".SH SEE ALSO", ".BR refitd (8), .BR refitctl (1), /usr/share/doc/refitd/",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.stdout.write(page(sys.argv[1], sys.argv[2]))
