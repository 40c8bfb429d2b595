"""The reference pages that the site alone has: Python from docstrings; C, C++ and the protocol from headers and protos, comments included.

tools/docs_tree.py lays them out beside the other pages. Their sources read as well without the site, so they are not committed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TREE / "tools"))

import check_docstrings  # noqa: E402
from reference import linked  # noqa: E402

PACKAGE = TREE / "client/python/refitd"
FOLDER = "docs/reference"
Function = ast.FunctionDef | ast.AsyncFunctionDef
C_HEADERS = ("client/refit.h",)
CPP_HEADERS = ("client/types.h", "client/member.h", "client/trainer.h", "client/engine.h", "client/bucket.h", "client/packer.h")
PROTOS = ("types", "trainer", "engine", "operator", "peer")


# ---- Python ----

def escaped(text: str) -> str:
    """Prose of a docstring as Markdown: names between backticks stay, stars and angle brackets mean themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts)


def prose(lines: list[str]) -> Iterator[str]:
    """A docstring's text: indented examples become fences, lists and paragraphs stay."""
    code: list[str] = []
    for i, line in enumerate([*lines, ""]):
        is_code = line.startswith("    ") and (bool(code) or i == 0 or not lines[i - 1].strip())
        if is_code or (code and not line.strip() and any(later.startswith("    ") for later in lines[i + 1:i + 2])):
            code.append(line[4:])
            continue
        if code:
            yield "\n".join(["```python", *code, "```", ""])
            code = []
        yield escaped(line)


def docstring(node: ast.AST) -> str:
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if re.fullmatch(r"(Args|Returns|Yields|Raises|Attributes):", line)), len(lines))
    out = "\n".join(prose(lines[:start])).strip() + "\n"
    section = ""
    for line in lines[start:]:
        heading = re.fullmatch(r"(Args|Returns|Yields|Raises|Attributes):", line)
        entry = re.match(r"    (\*{0,2}[\w.]+(?:, [\w.]+)*): (.*)", line)
        if heading:
            section = heading[1]
            out += f"\n*{section}*\n\n"
        elif entry and section not in ("Returns", "Yields"):
            out += f"- `{entry[1]}`: {escaped(entry[2])}\n"
        elif line.strip():
            out += ("  " if section not in ("Returns", "Yields") else "") + escaped(line.strip()) + "\n"
    return out


def parameters(arguments: ast.arguments) -> list[str]:
    """Each parameter as it is written, without `self`."""
    def one(argument: ast.arg, default: ast.expr | None) -> str:
        text = ast.unparse(argument)
        return text if default is None else f"{text}{' = ' if argument.annotation else '='}{ast.unparse(default)}"

    given = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(given) - len(arguments.defaults)), *arguments.defaults]
    shown = [one(argument, default) for argument, default in zip(given, defaults, strict=True) if argument.arg not in ("self", "cls")]
    if arguments.vararg:
        shown.append("*" + ast.unparse(arguments.vararg))
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [one(argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [*shown, "**" + ast.unparse(arguments.kwarg)] if arguments.kwarg else shown


def signature(node: Function, name: str) -> str:
    """The call as it is written."""
    shown = parameters(node.args)
    line = f"{name}({', '.join(shown)})"
    if len(line) > 100:
        line = f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    return f"```python\n{line}{result}\n```\n"


def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for path in sorted(PACKAGE.rglob("*.py")) for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef)}


def is_property(node: Function) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id in ("property", "cached_property") for mark in node.decorator_list)


def class_page(node: ast.ClassDef, name: str, known: dict[str, ast.ClassDef], exported: set[str]) -> Iterator[str]:
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    yield f"### {name}\n\n"
    init = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    fields = [ast.unparse(part) for part in node.body
              if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and not part.target.id.startswith("_")]
    if init:
        yield signature(init, name)
    elif fields:
        yield "```python\nclass " + node.name + ":\n    " + "\n    ".join(fields) + "\n```\n"
    elif shown := [base for base in bases if base in exported]:
        yield f"A subclass of {', '.join(f'`{base}`' for base in shown)}.\n"
    yield "\n" + docstring(node)
    if init and ast.get_docstring(init):
        yield "\n" + docstring(init)
    seen: set[str] = set()
    for owner in (node, *(known[base] for base in bases if base in known and base not in exported)):
        for part in owner.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_") and part.name not in seen:
                if ast.get_docstring(part):
                    seen.add(part.name)
                    yield f"\n#### {name}.{part.name}\n\n"
                    yield "" if is_property(part) else signature(part, part.name)
                    yield "\n" + docstring(part)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def integrations() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((PACKAGE / "integrations").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                yield path, node


def python_page() -> str:
    known, parts = classes(), [
        "# Python\n\nThe package's public names, from their docstrings. [Plain torch](../python.md) says how they go together.\n"]
    sections: dict[str, list[tuple[str, ast.AST]]] = {"refitd": []}
    for path, node in check_docstrings.public(PACKAGE):
        module = module_of(path)
        inner = module.removeprefix("refitd.") in check_docstrings.MODULES and module != "refitd.errors"
        sections.setdefault(module if inner else "refitd", []).append((node.name, node))
    for path, node in integrations():
        sections.setdefault(module_of(path), []).append((node.name, node))  # type: ignore[attr-defined]
    exported = {name for name, _ in sections["refitd"]}
    for module, named in sections.items():
        parts.append(f"\n## {module}\n\n")
        source = PACKAGE.parent / (module.replace(".", "/") + ".py")
        head = ast.parse((source if source.exists() else source.with_suffix("") / "__init__.py").read_text())
        if module != "refitd":
            parts.append(docstring(head) + "\n")
        for name, node in sorted(named, key=lambda pair: pair[0].lower()):
            if isinstance(node, ast.ClassDef):
                parts += class_page(node, f"{module}.{name}", known, exported)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parts.append(f"### {module}.{name}\n\n" + signature(node, f"{module}.{name}") + "\n" + docstring(node))
            parts.append("\n")
    return "".join(parts)


# ---- C, C++ and the protocol ----

NAMED = re.compile(
    r"^(?:typedef )?(?:enum class|struct|class|enum|message|service) (\w+)|^#define (\w+)|\b(refit_\w+)\(|^using (\w+) =|^constexpr [\w:]+ (\w+)|"
    r"^(?:[\w:<>,&* ]+ )?\*?&?(\w+)\(", re.M)


def blocks_of(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, comment, code) of each declaration at the outermost level. The comment above it is its text."""
    comment: list[str] = []
    code: list[str] = []

    def done() -> Iterator[tuple[str, str, str]]:
        body = "\n".join(code).strip("\n")
        named = NAMED.search(body)
        if (body or comment) and body != "}":  # of extern "C"
            yield (next((name for name in named.groups() if name), "") if named and body else "", "\n".join(comment), body)

    in_comment = False
    for line in text.split("\n"):
        starts = line.startswith(("//", "/*"))
        if in_comment or starts:
            if starts and code:
                yield from done()
                comment, code = [], []
            in_comment = (in_comment or line.startswith("/*")) and "*/" not in line
            comment.append(re.sub(r"^(//|/\*| \*/?) ?|\s*\*/$", "", line))
        elif not line.strip() and not code:
            if comment:
                yield from done()
                comment = []
        elif not line.strip() and code and outermost(code):
            yield from done()
            comment, code = [], []
        elif not SKIPPED.match(line):
            code.append(line)
    yield from done()


def outermost(code: list[str]) -> bool:
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"]*\"", "", "\n".join(code), flags=re.S)
    return text.count("{") == text.count("}") and text.count("(") == text.count(")")


# What only the compiler reads.
SKIPPED = re.compile(r'#(?:ifndef|ifdef|endif|include)\b|#define \w+_H_$|namespace |}  // namespace|syntax = |package |import |extern "C" \{')


def literate(paths: tuple[str, ...], language: str) -> Iterator[str]:
    for path in paths:
        text = (TREE / path).read_text()
        yield f"\n## {path.removeprefix('proto/').removeprefix('client/')}\n\n[{path}](../../{path})\n"
        for name, comment, body in blocks_of(text):
            if name:
                yield f"\n### {name}\n"
            if comment:
                yield "\n" + commented(comment) + "\n"
            if body:
                yield f"\n```{language}\n{body}\n```\n"


def commented(comment: str) -> str:
    """A comment as Markdown: what is indented is shown as it stands."""
    out: list[str] = []
    inside = False
    for line in comment.split("\n"):
        indented = bool(re.match(r" {2,}\S", line)) and (inside or not out or not re.match(r" *[-*] ", out[-1]))
        if indented != inside:
            out += ["```"] if inside else ["", "```text"]
            inside = indented
        out.append(line if inside else linked(escaped(line)))
    return "\n".join([*out, "```"] if inside else out)


def c_page() -> str:
    return "# C\n\nThe interface of librefit.so. [client/README.md](../../client/README.md) says how it is built and linked.\n" + "".join(
        literate(C_HEADERS, "c"))


def cpp_page() -> str:
    return "# C++\n\nThe headers that a program includes. [client/README.md](../../client/README.md) has the examples.\n" + "".join(
        literate(CPP_HEADERS, "cpp"))


def proto_page() -> str:
    return "# Messages\n\nEvery service, call and message of `refitd.v1`. [Protocol](../protocol.md) says in what order they go.\n" + "".join(
        literate(tuple(f"proto/refitd/v1/{name}.proto" for name in PROTOS), "protobuf"))


def pages() -> dict[str, str]:
    """{path: text} of the pages that the site alone has."""
    return {f"{FOLDER}/python.md": python_page(), f"{FOLDER}/c.md": c_page(), f"{FOLDER}/cpp.md": cpp_page(),
            f"{FOLDER}/messages.md": proto_page()}
