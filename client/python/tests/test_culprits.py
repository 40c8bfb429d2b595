"""Culprits have one form wherever they are raised: the kind, then the name in quotes (docs/python.md)."""

import ast
import re
import tempfile
import unittest
from pathlib import Path

import refitd
from refitd.serving import delivery
from refitd.serving import read_manifest

PACKAGE = Path(refitd.__file__).parent
# A formatted culprit begins with one of these. Names of arguments, options and files stand alone, as plain expressions.
FORM = re.compile(r"(tensor|parameter|module|adapter) '|(trainer|engine|actor) rank |process ")


class CulpritsTest(unittest.TestCase):
    def test_a_formatted_culprit_begins_with_its_kind(self):
        found = 0
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.keyword) and node.arg == "culprit" and isinstance(node.value, ast.JoinedStr):
                    found += 1
                    first = node.value.values[0]
                    text = first.value if isinstance(first, ast.Constant) else ""
                    if ast.unparse(node.value) != "f\"{kind} '{first}'\"":
                        self.assertRegex(text, FORM, f"{path.name}:{node.value.lineno}")
        self.assertGreater(found, 20)

    def test_a_message_that_quotes_a_tensor_or_parameter_has_no_bare_name_as_its_culprit(self):
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.JoinedStr):
                    continue
                quoted = re.search(r"(tensor|parameter|module) '\{(.+?)\}'", ast.unparse(node.args[0]))
                for keyword in node.keywords:
                    if quoted and keyword.arg == "culprit":
                        self.assertNotEqual(ast.unparse(keyword.value), quoted.group(2), f"{path.name}:{node.lineno}")

    def test_engines_name_tensors_and_parameters_as_everybody_does(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "json"
            path.write_text('{"w": 7}')
            with self.assertRaises(refitd.InvalidArgument) as caught:
                read_manifest(str(path))
            self.assertEqual(caught.exception.culprit, "tensor 'w'")
        for arguments, culprit in (({}, "parameter 'w'"), ({"kind": "tensor"}, "tensor 'w'")):
            with self.assertRaises(refitd.FailedPrecondition) as caught:
                delivery._refuse({"w": "is lost"}, "of them", **arguments)
            self.assertEqual(caught.exception.culprit, culprit)


if __name__ == "__main__":
    unittest.main()
