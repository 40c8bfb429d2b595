"""Reads what `refitd --validate` prints into nested dicts of lists of strings: {"listen": [{"tcp": ["..."]}]}."""

import re
import subprocess

REFITD = "daemon/refitd"
SECONDS = 20  # the time that the binary has to check a file

_TOKEN = re.compile(r'\s*(?:(\w+)\s*(\{|:)|(\}))')
_VALUE = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[\w.+-]+)')


def parse(text):
    """Parses text as the printer writes it: one field after the other, without comments or lists in brackets."""
    stack = [{}]
    at = 0
    while text[at:].strip():
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError("neither field nor brace at: %r" % text[at:at + 40])
        at = token.end()
        name, kind, closing = token.groups()
        if closing:
            stack.pop()
        elif kind == "{":
            inner = {}
            stack[-1].setdefault(name, []).append(inner)
            stack.append(inner)
        else:
            value = _VALUE.match(text, at)
            at = value.end()
            stack[-1].setdefault(name, []).append(value.group(1).strip('"'))
    if len(stack) != 1:
        raise ValueError("unbalanced braces")
    return stack[0]


def validate(path, variables=None):
    """The settings in force with the file at `path`, and these variables. Raises AssertionError with refitd's own words, also for a warning."""
    done = subprocess.run(
        [REFITD, "--config", path, "--validate"], env=variables or {}, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise AssertionError("refitd --validate ended with %d: %s" % (done.returncode, done.stderr))
    if done.stderr:
        raise AssertionError(done.stderr)
    return parse(done.stdout)


def get(settings, path, default=None):
    """The last value at a path such as "listen.unix_path"."""
    *folders, name = path.split(".")
    for folder in folders:
        settings = settings.get(folder, [{}])[-1]
    return settings.get(name, [default])[-1]
