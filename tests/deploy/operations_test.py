"""docs/operations.md names every setting with its default, and every exit code; the chart takes every setting; docs/security.md begins as it must."""

import json
import re
import unittest

PAGE = "docs/operations.md"
SECURITY = "docs/security.md"
CONFIG = "daemon/config.proto"
CHART_SCHEMA = "deploy/helm/refitd/values.schema.json"
# The chart decides these by values of its own.
OF_THE_CHART = r"(listen|tls|rule|metrics)\..*|allowed_[ug]ids|daemon_id|peers\.(listen|identity|interface)|data\.port"
EXIT_CODES = {"refitd": "daemon/config.h", "refitctl": "daemon/refitctl/exit_code.h"}
# Defaults that the file's schema can't say.
BY_HAND = {
    "listen.unix_mode": "0660",  # octal
    "listen.tcp": "none",
    "allowed_uids": "the daemon's own user, root",
    "allowed_gids": "none",
    "rule.who": "none",
    "rule.role": "none",
    "rule.group": "none",
    "audit.file": "none",
    "log.file": "stderr",
    "metrics.listen": "off",
    "daemon_id": "the host's name",
    "peers.advertise": "none",
    "peers.listen": "none",
    "peers.identity": "none",
    "tls.certificate": "none",
    "tls.key": "none",
    "tls.roots": "none",
    "cuda.nccl_library": "searched for",
}


def settings_of_schema(text):
    """{"listen.unix_path": default or None} from a proto file of nested messages, one field a line."""
    messages, stack = {}, []
    for line in text.split("\n"):
        line = line.split("//")[0].strip()
        opened = re.match(r"(message|enum) (\w+) \{", line)
        if opened:
            stack.append(opened.group(2))
            if opened.group(1) == "message":
                messages[opened.group(2)] = []
        elif line == "}":
            stack.pop()
        field = re.match(r"(optional|repeated) (\w+) (\w+) = \d+( \[default = (.*)\])?;", line)
        if field:
            messages[stack[-1]].append((field.group(3), field.group(2), field.group(5)))

    def walk(message, prefix):
        for name, kind, default in messages[message]:
            if kind in messages:
                yield from walk(kind, prefix + name + ".")
            else:
                yield prefix + name, default.strip('"') if default else None

    return dict(walk("RefitdConfig", ""))


def rows(page, heading):
    """The cells of the first table after a line that begins with `heading`."""
    lines = page.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    table = []
    for line in lines[start:]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif table:
            break
    return table


class OperationsTest(unittest.TestCase):
    def setUp(self):
        with open(PAGE) as file:
            self.page = file.read()

    def test_every_setting_is_there_with_its_default(self):
        with open(CONFIG) as file:
            schema = settings_of_schema(file.read())
        self.assertIn("limits.max_duration_ms", schema)
        told = {row[0].strip("`"): row[1].strip("`") for row in rows(self.page, "| setting | default |")[2:]}
        self.assertEqual(told, {name: BY_HAND.get(name, default) for name, default in schema.items()})

    def test_the_chart_takes_every_setting(self):
        with open(CONFIG) as file:
            schema = settings_of_schema(file.read())
        with open(CHART_SCHEMA) as file:
            values = json.load(file)["definitions"]["settings"]

        def names(properties, prefix):
            for name, each in properties.items():
                yield from names(each["properties"], prefix + name + ".") if "properties" in each else [prefix + name]

        self.assertEqual(set(names(values["properties"], "")), {name for name in schema if not re.fullmatch(OF_THE_CHART, name)})

    def test_every_exit_code_is_there(self):
        for program, header in EXIT_CODES.items():
            with open(header) as file:
                codes = re.findall(r"kExit\w+ = (\d+)", file.read())
            told = [row[0] for row in rows(self.page, "| %s | meaning |" % program)[2:]]
            self.assertEqual(told, codes, program)

    def test_tables_are_whole(self):
        for name in (PAGE, SECURITY):
            with open(name) as file:
                lines = file.read().split("\n")
            for i, line in enumerate(lines):
                if line.startswith("|") and lines[i - 1].startswith("|"):
                    cells = [len(re.findall(r"(?<!\\)\|", row)) for row in (lines[i - 1], line)]
                    self.assertEqual(cells[0], cells[1], "%s:%d" % (name, i + 1))


class SecurityTest(unittest.TestCase):
    def test_it_says_first_which_bytes_are_in_the_clear(self):
        with open(SECURITY) as file:
            first = file.read().split("\n")[1]
        self.assertRegex(first, r"host memory is encrypted .* GPU memory \(NCCL\) is not")


if __name__ == "__main__":
    unittest.main()
