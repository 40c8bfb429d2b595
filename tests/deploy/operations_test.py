"""docs/troubleshooting.md names every exit code; docs/security.md begins as it must; tables are whole."""

import re
import unittest

PAGE = "docs/troubleshooting.md"
OPERATIONS = "docs/operations.md"
SECURITY = "docs/security.md"
EXIT_CODES = {"refitd": "daemon/config.h", "refitctl": "daemon/refitctl/exit_code.h"}


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

    def test_every_exit_code_is_there(self):
        for program, header in EXIT_CODES.items():
            with open(header) as file:
                codes = re.findall(r"kExit\w+ = (\d+)", file.read())
            told = [row[0] for row in rows(self.page, "| %s | meaning |" % program)[2:]]
            self.assertEqual(told, codes, program)

    def test_tables_are_whole(self):
        for name in (PAGE, OPERATIONS, SECURITY):
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
