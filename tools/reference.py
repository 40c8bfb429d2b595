#!/usr/bin/python3
"""Makes the reference pages from the source: docs/reference/NAME.md.

Settings, metrics, log lines and compatibility are committed, so that they are read without the site. tools/docs makes the pages of Python, C, C++ and the
protocol (tools/reference_api.py) for the site alone, since their sources read as well. The page of commands is what the programs' help
prints.

usage: tools/reference.py [--check]                    writes the committed pages; --check: fails where one differs
       tools/reference.py --commands REFITD REFITCTL [--check]     the same of docs/reference/commands.md, by these binaries
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

TREE = Path(__file__).resolve().parents[1]
FOLDER = "docs/reference"
CONFIG_PROTO, CONFIG_CC, CONFIG_H = "daemon/config.proto", "daemon/config.cc", "daemon/config.h"
METRICS_CC, METRICS_H, OBSERVER_H = "daemon/metrics.cc", "daemon/metrics.h", "daemon/process/observer.h"
LOG_NOTES = FOLDER + "/log_lines.csv"
RUNS = "docs/evidence/runs.yaml"
KINDS = {"engine": "Engines", "trainer": "Trainers", "base": "Beneath"}
RESULTS = ("passed", "partly", "not possible in this vLLM", "by signature", "by source")
MADE = "<!-- Made by {}: edit {} instead. -->\n"


def read(path: str) -> str:
    return (TREE / path).read_text()


def linked(text: str) -> str:
    """The text with the pages that it names as links."""
    return re.sub(r"\bdocs/(\w+)\.md(#[\w-]+)?\b", lambda at: f"[{at[1].replace('_', ' ')}](../{at[1]}.md{at[2] or ''})", text)


def cell(text: str) -> str:
    """The text in a cell of a table."""
    return linked(text).replace("|", "\\|").replace("\n", " ")


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


# ---- C++ source ----

TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:\\.[^\'\n]*|[^\\\'\n])\'', re.S)
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')


def without_comments(code: str) -> str:
    return TOKEN.sub(lambda match: "" if match.group()[0] == "/" else match.group(), code)


def joined(literal: str) -> str:
    """The text of string literals that stand one after the other."""
    parts = re.findall(r'"((?:[^"\\\n]|\\.)*)"', literal)
    return "".join(parts).replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")


def arguments(code: str, start: int) -> list[str]:
    """What stands between the bracket that opens at `start` and the one that closes it, cut at the commas between arguments."""
    depth, parts, begin, at = 0, [], start + 1, start
    while at < len(code):
        token = TOKEN.match(code, at)
        if token:
            at = token.end()
            continue
        if code[at] in "([{":
            depth += 1
        elif code[at] in ")]}":
            depth -= 1
            if depth == 0:
                return [part.strip() for part in [*parts, code[begin:at]]]
        elif code[at] == "," and depth == 1:
            parts.append(code[begin:at])
            begin = at + 1
        at += 1
    raise ValueError("a bracket is not closed")


# ---- settings ----

@dataclass
class Setting:
    path: str
    kind: str
    default: str | None
    what: str
    values: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Message:
    what: str = ""
    fields: list[tuple[str, str, str | None, str, bool]] = field(default_factory=list)  # name, type, default, what, repeated
    values: list[tuple[str, str]] = field(default_factory=list)  # of an enum


def messages_of(text: str) -> dict[str, Message]:
    """The messages and enums of a proto file that has a field a line, by name."""
    found: dict[str, Message] = {}
    stack: list[str] = []
    comment: list[str] = []
    for line in text.split("\n"):
        code, _, trailing = line.partition("//")
        code, trailing = code.strip(), trailing.strip()
        if not code:
            comment = [*comment, trailing] if trailing else []
            continue
        what = " ".join([*comment, trailing]).strip()
        comment = []
        if opened := re.match(r"(?:message|enum) (\w+) \{", code):
            stack.append(opened[1])
            found[opened[1]] = Message(what)
        elif code == "}":
            stack.pop()
        elif declared := re.match(r"(optional|repeated) (\w+) (\w+) = \d+(?: \[default = (.*)\])?;", code):
            found[stack[-1]].fields.append((declared[3], declared[2], declared[4], what, declared[1] == "repeated"))
        elif value := re.match(r"(\w+) = \d+;", code):
            found[stack[-1]].values.append((value[1], what))
    return found


def settings_of(text: str) -> list[tuple[str, str, list[Setting]]]:
    """Sections of settings: (name, what it is about, its settings). The first has the settings that are in no message."""
    messages = messages_of(text)

    def section(name: str, message: Message) -> Iterator[tuple[str, str, list[Setting]]]:
        own, inner = [], []
        for part, kind, default, what, repeated in message.fields:
            path = f"{name}.{part}" if name else part
            below = messages.get(kind)
            if below is not None and below.fields:
                inner.append((path, below))
                continue
            own.append(Setting(path, kind if not repeated else "several " + kind, default, what, below.values if below else []))
        yield name, message.what, own
        for path, below in inner:
            yield from section(path, below)

    return list(section("", messages["RefitdConfig"]))


def flags_of(code: str) -> dict[str, str]:
    """{field: flag} of the daemon's table of settings."""
    return {path: "--" + name for name, path in re.findall(r'Setting\{\s*"([^"]+)",\s*"([^"]+)"', code)}


class Ranges:
    """What the daemon's checks accept, as daemon/config.cc has it."""

    def __init__(self, code: str, header: str) -> None:
        self.constants: dict[str, int] = {}
        for name, value in re.findall(r"inline constexpr [\w:]+ (k\w+) = ([^;]+);", header):
            self.constants[name] = self.number(value)
        self.ranges: dict[str, tuple[str, str]] = {}
        code = without_comments(code)
        for match in re.finditer(r"\b(Setting|CheckRange)([({])", code):
            given = arguments(code, match.start(2))
            if not LITERAL.fullmatch(given[0]) or len(given) < 4:
                continue
            if match[1] == "Setting":
                self.ranges[joined(given[1])] = (given[3], given[4] if len(given) > 4 else "numeric_limits")
            else:
                self.ranges[joined(given[0])] = (given[2], given[3])

    def number(self, text: str) -> int:
        """The value of a constant expression; LookupError or SyntaxError where it is none."""
        text = re.sub(r"'", "", text).strip()
        text = re.sub(r"int64_t\{(\d+)\}", r"\1", text)
        text = re.sub(r"\bk\w+", lambda match: str(self.constants[match.group()]), text)
        if not re.fullmatch(r"[\d\s()+*<-]+", text):
            return -1
        return int(eval(text))  # noqa: S307: digits, brackets and four operators

    def text(self, path: str) -> str:
        if path not in self.ranges:
            return ""
        shown = []
        for limit in self.ranges[path]:
            named = re.search(r"(\w+)\.(\w+)\(\)", limit)
            if "numeric_limits" in limit:
                shown.append("")
            elif named:
                less = limit.partition(" - ")[2]
                shown.append(f"`{named[1]}.{named[2]}`" + (f" less {human(path, self.number(less))}" if less else ""))
            else:
                shown.append(human(path, self.number(limit)))
        return f"{shown[0]} or more" if not shown[1] else f"{shown[0]} to {shown[1]}"


def human(path: str, value: int) -> str:
    """A value with its unit, which the setting's name says."""
    if path.endswith("_ms"):
        for name, size in (("h", 3_600_000), ("min", 60_000), ("s", 1000)):
            if value and value % size == 0:
                return f"{value // size} {name}"
        return f"{value} ms" if value else "0"
    if path.endswith("_bytes"):
        for name, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value and value % size == 0:
                return f"{value // size} {name}"
        return f"{value} byte{'s' * (value > 1)}" if value else "0"
    return str(value)


def default_of(setting: Setting) -> str:
    if setting.default is None:
        empty = re.search(r"\bEmpty: (.+?)(?:[,;]|\.(?: |$))", setting.what)
        return empty[1] if empty else "none"
    if "Octal" in setting.what:
        return f"`0{int(setting.default):o}`"
    value = setting.default.strip('"')
    shown = human(setting.path, int(value)) if re.fullmatch(r"\d+", value) else value
    return f"`{value}`" + (f" ({shown})" if shown != value else "")


def what_of(setting: Setting, accepted: str) -> str:
    parts = [setting.what]
    if setting.values:
        parts.append("One of " + ", ".join(f"`{name}`" + (f" ({what})" if what else "") for name, what in setting.values) + ".")
    if accepted:
        parts.append(f"Accepted: {accepted}.")
    return cell(" ".join(parts).strip())


def settings_page() -> str:
    flags, ranges = flags_of(read(CONFIG_CC)), Ranges(read(CONFIG_CC), read(CONFIG_H))
    parts = [
        MADE.format("tools/reference.py", "the comments of daemon/config.proto"),
        "# Settings\n",
        "Every setting of the daemon's [file](../../daemon/config.proto), with its flag and default. A setting comes from its flag, else from its "
        "variable (`--staging-slot-bytes`: `REFITD_STAGING_SLOT_BYTES`), else from the file, else from its default; a setting without a flag is in the file "
        "alone. [Operations](../operations.md#configure) says how to check a file. Units: `_ms` milliseconds, `_bytes` bytes.\n",
    ]
    for name, what, settings in settings_of(read(CONFIG_PROTO)):
        parts.append(f"## {name or 'General'}\n")
        if name and what:
            parts.append(cell(what) + "\n")
        rows = [(f"`{s.path}`", f"`{flags[s.path]}`" if s.path in flags else "", default_of(s), what_of(s, ranges.text(s.path)))
                for s in settings]
        parts.append(table(("setting", "flag", "default", "what"), rows))
    return "\n".join(parts)


# ---- metrics ----

@dataclass
class Metric:
    name: str
    kind: str
    labels: list[str]
    what: str


def labels_of(expression: str, known: dict[str, list[str]]) -> list[str]:
    """The names of labels that an initializer gives."""
    names: list[str] = []
    for match in re.finditer(r'\{\s*"(\w+)"|"[^"]*"|\b([A-Za-z_]\w*)', expression):
        names += [match[1]] if match[1] else known.get(match[2] or "", [])
    return list(dict.fromkeys(names))


def metrics_of(code: str) -> list[Metric]:
    code = without_comments(code)
    strings = {name: joined(value) for name, value in re.findall(r"constexpr std::string_view (k\w+) = (" + LITERAL.pattern + ");", code)}
    found: dict[str, Metric] = {}
    for match in re.finditer(r"\bfamilies(?:->|\.)(Counter|Gauge|Seconds)(\()", code):
        name, help_text, labels, *_ = arguments(code, match.start(2))
        before = code[code.rfind("\nvoid Metrics::", 0, match.start()) + 1 or 0:match.start()]
        known: dict[str, list[str]] = {}
        for variable, value in re.findall(r"\b(?:const )?Labels? (\w+)(?: = |(?=\{))(\{[^;]*\});", before):
            known[variable] = labels_of("{" + value + "}", known)
        if "DeviceBuilds" in before and "build" in known:
            known["build"] = [*known["build"], "cuda"]  # one label for each kind of device that is compiled in
        metric = Metric(strings.get(name) or joined(name), {"Seconds": "histogram"}.get(match[1], match[1].lower()),
                        labels_of(labels, known), strings.get(help_text) or joined(help_text))
        found.setdefault(metric.name, metric)
    return list(found.values())


def array_of(text: str, name: str) -> list[str]:
    """The strings of a constant array, whose elements may be constants of their own."""
    found = re.search(rf"\b{name} = \{{([^}}]*)\}}", text)
    assert found, name
    constants = dict(re.findall(r'constexpr std::string_view (k\w+) = "(\w*)";', text))
    return [value for value in ((part.strip().strip('"') if '"' in part else constants[part.strip()]) for part in found[1].split(",")) if value]


def comments_of_reasons(text: str) -> list[tuple[str, str]]:
    return [(value, what) for value, what in re.findall(r'kReason\w+ = "(\w*)"; +// (.*)', text) if value]


def metrics_page() -> str:
    code, observer = without_comments(read(METRICS_CC)), read(OBSERVER_H)
    bounds = [re.sub(r"\s+", " ", found) for found in re.findall(r"k(?:Seconds|Pause)Buckets = \{([^}]*)\}", read(METRICS_H))]
    values = [
        ("`phase`", ", ".join(f"`{v}`" for v in array_of(code, "kPhaseNames")) + "; `data` ends with the last commit, so that a compiled refit moves its "
                    "bytes in `verify`"),
        ("`move`", ", ".join(f"`{v}`" for v in array_of(code, "kMoveNames"))),
        ("`broadcast`", ", ".join(f"`{v}`" for v in array_of(without_comments(observer), "kPushMethods"))),
        ("`result`", "`committed`, `aborted`; of catch-ups " + ", ".join(f"`{v}`" for v in array_of(code, "kCatchUpEndNames"))),
        ("`reason`", ", ".join(f"`{v}` ({what})" for v, what in comments_of_reasons(observer)) + "; empty: committed"),
    ]
    rows = [(f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), cell(m.what)) for m in metrics_of(read(METRICS_CC))]
    return "\n".join([
        MADE.format("tools/reference.py", "the texts in daemon/metrics.cc"),
        "# Metrics\n",
        "What `GET /metrics` of a daemon shows to Prometheus, where [`metrics.listen`](settings.md#metrics) is set. Counters count since the "
        "daemon began, or since the group was made. A series without reports is 0, and a deleted group's series are gone.\n",
        table(("metric", "kind", "labels", "what"), rows),
        "## Labels\n",
        "`group` and `engine` (an instance) are names that callers give; `daemon` and `peer` are ids of daemons; `state` is a word of "
        "[the state machines](../protocol.md#state-machines).\n",
        table(("label", "values"), values),
        f"Bounds of the histograms' buckets, seconds: {bounds[0]}; of `refitd_pause_seconds`: {bounds[1]}.",
        "",
    ])


# ---- log lines ----

PLACEHOLDER = "…"


@dataclass(frozen=True)
class LogLine:
    level: str
    text: str
    file: str


def sources() -> list[Path]:
    return [path for folder in ("daemon", "transport") for path in sorted((TREE / folder).rglob("*.cc"))
            if not re.search(r"_test\.cc$|_test_util\.cc$|/fakes/|refitctl/", str(path))]


def shown(text: str) -> str:
    return re.sub(r"\{[^{}]*\}", PLACEHOLDER, text)


def log_lines_of(code: str, file: str) -> list[LogLine]:
    """The lines that the code's calls name; a call that logs a text of elsewhere names none."""
    code = without_comments(code)
    found = []
    for match in re.finditer(r"\bLog(Debug|Info|Warning|Error)(\()|(?<=[.>])Log(\()|\bLogLine(\{)", code):
        start = next(match.start(i) for i in (2, 3, 4) if match[i])
        given = arguments(code, start)
        if match[1]:
            levels, texts = [match[1].lower()], [joined(given[0])] if LITERAL.fullmatch(given[0]) else []
        else:
            levels = [level.lower() for level in re.findall(r"LogLine::k(\w+)", given[0])]
            rest = ", ".join(given[1:])
            formats = [at for at in re.finditer(r"fmt::format\(\s*(" + LITERAL.pattern + ")", rest)]
            texts = [joined(at[1]) for at in formats] or [joined(lit.group()) for lit in list(LITERAL.finditer(rest))[:1]]
            texts = ["group {}: " + text for text in texts if levels]
        found += [LogLine(" or ".join(dict.fromkeys(levels)), shown(text), file) for text in texts if re.search(r"[a-z]{3}", shown(text).removeprefix("group …: "))]
    return found


def fragments(line: str) -> list[str]:
    """The words of a line of the notes that are no placeholder. Placeholders are letters and words in capitals, and dots."""
    return [part.strip() for part in re.split(r"\b[A-Z]+\b(?!')|\.\.\.|…", line) if len(part.strip()) > 2]


def has(text: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def notes() -> list[tuple[str, str, str]]:
    with open(TREE / LOG_NOTES, newline="") as file:
        return [(row["line"], row["level"], row["when"]) for row in csv.DictReader(file)]


def stale_notes(listed: list[tuple[str, str, str]], lines: list[LogLine], literals: list[str]) -> list[str]:
    """What is wrong with the notes: a line that no source has any more, or another level than the call's."""
    wrong = []
    for line, level, _ in listed:
        same = [at for at in lines if has(at.text, fragments(line))]
        without_group = [part for part in fragments(line.partition("group G: ")[2] or line)]
        if not same and not any(has(text, without_group) for text in literals):
            wrong.append(f"no source logs: {line}")
        elif same and not any(level in at.level for at in same):
            wrong.append(f"{line}: the level is {same[0].level}")
    return wrong


def log_page() -> str:
    codes = {path.relative_to(TREE).as_posix(): path.read_text() for path in sources()}
    lines = [line for file, code in codes.items() for line in log_lines_of(code, file)]
    literals = [shown(joined(match.group())) for code in codes.values() for match in LITERAL.finditer(without_comments(code))]
    listed = notes()
    if wrong := stale_notes(listed, lines, literals):
        raise SystemExit("\n".join(f"{LOG_NOTES}: {problem}" for problem in wrong))
    rest = sorted({line for line in lines if not any(has(line.text, fragments(note)) for note, _, _ in listed)},
                  key=lambda line: (line.file, line.text))
    return "\n".join([
        MADE.format("tools/reference.py", "docs/reference/log_lines.csv, or the calls in the source"),
        "# Log lines\n",
        "One line an event, time in UTC, to stderr (the journal) unless [`log.file`](settings.md#log) is set; control characters are "
        "escaped. With `log.format: JSON` a line has the fields `ts`, `level` and `msg`. A pipe that nobody reads holds up nobody: lines wait, then "
        "they are dropped and counted. Words in capitals stand for names and values.\n",
        table(("line", "level", "when"), [(f"`{line}`", level, cell(when)) for line, level, when in listed]),
        "## Further lines\n",
        f"What else the source logs; `{PLACEHOLDER}` stands for a value.\n",
        table(("line", "level", "source"), [(f"`{cell(line.text)}`", line.level, f"[{line.file}](../../{line.file})") for line in rest]),
    ])


# ---- commands ----

def help_of(program: str, name: str, command: list[str]) -> str:
    done = subprocess.run([name, *command, "--help"], executable=program, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip("\n")


def subcommands_of(text: str) -> list[str]:
    """The commands that a help names: words at the begin of a line, in a section of its own."""
    names, section = [], ""
    for line in text.split("\n"):
        if re.match(r"\S.*:$", line):
            section = line
        elif section not in ("Options:", "Positionals:", "Exit codes:") and (command := re.match(r"  ([a-z][a-z-]*)(?: {2,}|$)", line)):
            names.append(command[1])
    return names


def commands_page(refitd: str, refitctl: str) -> str:
    footer = re.compile(r"\n+Exit codes:\n(?: .*\n?)*\Z")

    def commands(before: list[str]) -> Iterator[str]:
        text = help_of(refitctl, "refitctl", before)
        level = "##" if not before else "###"
        shown_text = text if not before else footer.sub("", text)
        yield f"{level} {' '.join(['refitctl', *before])}\n\n```text\n{shown_text}\n```\n"
        for name in subcommands_of(text):
            yield from commands([*before, name])

    return "\n".join([
        MADE.format("tools/reference.py --commands", "the programs' help"),
        "# Commands\n",
        "The help of `refitd` and `refitctl`. Each setting of `refitd` has a flag: [settings](settings.md). What to do on an exit code: "
        "[troubleshooting](../troubleshooting.md#exit-codes).\n",
        f"## refitd\n\n```text\n{help_of(refitd, 'refitd', [])}\n```\n",
        *commands([]),
    ])


# ---- what was run with what ----

def wrong_records(records: list[dict[str, str]]) -> list[str]:
    """What keeps records from being rows of the page."""
    needed = {"kind", "name", "version", "device", "ranks", "ran", "result", "evidence"}
    return [f"{record.get('name')} {record.get('version')}: {problem}" for record in records for problem in (
        *(f"no {name}" for name in sorted(needed - set(record))), *(f"what is {name}?" for name in sorted(set(record) - needed - {"not_run"})),
        *([] if record.get("result") in RESULTS else [f"result: {record.get('result')}"]),
        *([] if record.get("kind") in KINDS else [f"kind: {record.get('kind')}"]))]


def compatibility_page() -> str:
    records = yaml.safe_load(read(RUNS))
    if wrong := wrong_records(records):
        raise SystemExit("\n".join(f"{RUNS}: {problem}" for problem in wrong))
    parts = [
        MADE.format("tools/reference.py", RUNS),
        "# Compatibility: what was run with what\n",
        "*passed*: it ran, with the result that the evidence has. *partly*: its parts ran, the whole framework did not. "
        "*not possible in this vLLM*: it ends without refitd too. *by signature*: written for it, and not run. "
        "*by source*: its source was read for where refitd can take part.\n",
    ]
    for kind, title in KINDS.items():
        rows = [(cell(r["name"]), r["version"], r["device"], cell(r["ranks"]), f"[{r['result']}](../evidence/{r['evidence']})".replace("evidence/../", ""),
                 cell(r["ran"]), cell(r.get("not_run", ""))) for r in records if r["kind"] == kind]
        parts += [f"## {title}\n", table(("name", "version", "device", "ranks", "result", "what ran", "not run"), rows)]
    return "\n".join(parts)


# ---- all ----

COMMITTED: dict[str, Callable[[], str]] = {
    f"{FOLDER}/settings.md": settings_page,
    f"{FOLDER}/metrics.md": metrics_page,
    f"{FOLDER}/log.md": log_page,
    f"{FOLDER}/compatibility.md": compatibility_page,
}


def write_or_check(pages: dict[str, str], check: bool, command: str) -> int:
    failed = 0
    for path, text in pages.items():
        target = TREE / path
        if target.exists() and target.read_text() == text:
            continue
        if check:
            print(f"{path} is not what the source says: run {command}", file=sys.stderr)
            failed = 1
        else:
            target.write_text(text)
    return failed


def main(given: list[str]) -> int:
    check = "--check" in given
    given = [word for word in given if word != "--check"]
    if given[:1] == ["--commands"] and len(given) == 3:
        return write_or_check({f"{FOLDER}/commands.md": commands_page(given[1], given[2])}, check,
                              "bazel build //daemon:refitd //daemon/refitctl && tools/reference.py --commands bazel-bin/daemon/refitd "
                              "bazel-bin/daemon/refitctl/refitctl")
    if given:
        print(__doc__)
        return 2
    return write_or_check({path: make() for path, make in COMMITTED.items()}, check, "tools/reference.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
