#!/usr/bin/python3
"""Checks the links and anchors of the repository's Markdown, and lays the pages out for MkDocs.

A link leads to a file or folder of the repository, and its anchor to a heading there, by the names that forges give to headings.
Addresses outside of the repository are not asked.

usage: tools/docs_tree.py [FOLDER]     FOLDER gets every page at its path, also the reference pages that are not committed, and every file
                                       that a page links
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import reference_api

FENCE = re.compile(r"^( *)(```+|~~~+)[^\n]*\n.*?^ *\2[ \t]*$", re.M | re.S)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.S)
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.M)
LINK = re.compile(r"(!?\[(?:[^][]|\[[^][]*\])*\])\(([^()\s]*)(?:\s+\"[^\"]*\")?\)")
OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|//")
ITEM = re.compile(r"^( *)(?:[-*+]|\d+\.) ")


def pages_of_repository() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], capture_output=True, text=True, check=True)
    return sorted(path for path in listed.stdout.split() if Path(path).is_file())


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """The text with every match replaced by blanks, so that places stay."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def anchors_of(text: str) -> set[str]:
    plain = blanked(FENCE, text)
    anchors: set[str] = set()
    for title in HEADING.findall(plain):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", title).strip().lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in anchors:
            number += 1
        anchors.add(anchor)
    return anchors | set(re.findall(r'<a id="([^"]+)">', plain))


def target_of(page: str, link: str) -> tuple[str, str]:
    """Path from the repository's root, and anchor, that a link of the page names."""
    path, _, anchor = link.partition("#")
    if not path:
        return page, anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), anchor


def links_of(text: str) -> list[tuple[int, str]]:
    """Line and address of every link of a page to the repository."""
    plain = blanked(CODE, blanked(FENCE, text))
    found = [(plain.count("\n", 0, match.start()) + 1, match.group(2)) for match in LINK.finditer(plain)]
    return [(line, address) for line, address in found if not OUTSIDE.match(address)]


def complaints_about(page: str, texts: dict[str, str]) -> list[str]:
    complaints = []
    for line, address in links_of(texts[page]):
        path, anchor = target_of(page, address)
        if not address or path.startswith("..") or not Path(path).exists():
            complaints.append(f"{page}:{line}: no such file: {address}")
        elif anchor and anchor not in anchors_of(texts.get(path, "")):
            complaints.append(f"{page}:{line}: no such heading: {address}")
    return complaints


class Indents:
    """The levels of a list that is open, each by where its text begins, and what they become: four spaces each."""

    def __init__(self) -> None:
        self.levels: list[int] = []

    def moved(self, line: str) -> str:
        """The line, moved; an item opens a level for the lines after it."""
        inside = len(line) - len(line.lstrip())
        if not line.strip():
            return line
        self.levels = [level for level in self.levels if level <= inside]
        depth, rest = len(self.levels), inside - (self.levels[-1] if self.levels else 0)
        if item := ITEM.match(line):
            self.levels.append(item.end())
        return " " * (4 * depth + rest) + line.lstrip()


def with_blank_lines(text: str) -> str:
    """MkDocs wants a blank line before a list or table, and four spaces for each level of a list; forges do not."""
    lines: list[str] = []
    fence, indents, before, loose = "", Indents(), "", False
    for line in text.split("\n"):
        opens = not fence and bool(re.match(" *```", line))
        if fence and line.strip() == "```":
            fence = ""
        if not fence and not opens and before.strip():
            # Items of a list with paragraphs stand apart.
            apart = not indents.levels or (loose and not ITEM.match(before))
            if (ITEM.match(line) and apart) or (line.startswith("|") and not before.startswith("|")):
                lines.append("")
        # Lines of a fence keep their place beside its first.
        lines.append(" " * (4 * len(indents.levels)) + line[len(fence) - 1:] if fence and line.strip() else indents.moved(line))
        if opens:
            fence = " " * (len(line) - len(line.lstrip())) + "`"
        loose = bool(indents.levels) and (loose or not line.strip())
        before = line
    return "\n".join(lines)


def laid_out(page: str, text: str) -> str:
    """The page for MkDocs: a link to a folder leads to the folder's page, or is no link where there is none."""
    plain = blanked(CODE, blanked(FENCE, text))
    parts, end = [], 0
    for match in LINK.finditer(plain):
        if OUTSIDE.match(match.group(2)):
            continue
        path, _ = target_of(page, match.group(2))
        if Path(path).is_dir():
            label = text[match.start(1):match.end(1)]
            inside = posixpath.relpath(posixpath.join(path, "README.md"), posixpath.dirname(page) or ".")
            parts += [text[end:match.start()], f"{label}({inside})" if (Path(path) / "README.md").exists() else label[1:-1]]
            end = match.end()
    return with_blank_lines("".join(parts) + text[end:])


def lay_out(folder: Path, texts: dict[str, str]) -> None:
    for page, text in texts.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(laid_out(page, text))
        for _, address in links_of(text):
            path, _ = target_of(page, address)
            if path not in texts and Path(path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / path)


def main(arguments: list[str]) -> int:
    texts = {page: Path(page).read_text() for page in pages_of_repository()}
    texts |= reference_api.pages()
    complaints = [complaint for page in texts for complaint in complaints_about(page, texts)]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not texts:
        print("no page at all", file=sys.stderr)
    if arguments:
        lay_out(Path(arguments[0]), texts)
    return 1 if complaints or not texts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
