"""refitd._core.native against client/refit.h and refit_python.h, by the C compiler."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from refitd import engine, trainer
from refitd._core import native
from refitd.layout.memory import DTYPES
from refitd import errors

# The C headers lie in the checkout, or where the test runner put them.
HEADER = Path(os.environ.get("REFIT_HEADER", Path(__file__).resolve().parents[2] / "refit.h"))
HEADERS = (HEADER, HEADER.with_name("refit_python.h"))
ARGUMENTS = {  # ctypes' type: what C's type may look like
    ctypes.c_int32: {"int32_t", "int", "refit_status"},
    ctypes.c_int64: {"int64_t"},
    ctypes.c_uint64: {"uint64_t"},
    ctypes.c_char_p: {"constchar*", "constvoid*"},
    None: {"void"},
}


def headers_text():
    return "".join(re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S) for header in HEADERS)


def prototypes():
    """Name, result and argument types of each function that the headers declare, without blanks."""
    text = headers_text()
    for result, name, arguments in re.findall(r"^([a-z_0-9 ]+?\*?) ?(refit_\w+)\(([^;{]*)\);", text, flags=re.M | re.S):
        kinds = [re.sub(r"\w+$", "", argument.strip()).replace(" ", "") for argument in arguments.replace("\n", " ").split(",")]
        yield name, result.replace(" ", ""), [] if arguments.strip() == "void" else kinds


class AbiTest(unittest.TestCase):
    def test_functions_that_are_declared_are_of_the_headers(self):
        self.assertLessEqual(set(native.FUNCTIONS) | set(native.LOCKED_FUNCTIONS), {name for name, _, _ in prototypes()})
        self.assertFalse(set(native.FUNCTIONS) & set(native.LOCKED_FUNCTIONS))
        for library, functions in ((native.library(), native.FUNCTIONS), (native.locked_library(), native.LOCKED_FUNCTIONS)):
            for name in functions:
                self.assertTrue(hasattr(library, name), name)

    def test_functions_take_and_give_what_the_header_says(self):
        functions = native.FUNCTIONS | native.LOCKED_FUNCTIONS
        for name, result, arguments in prototypes():
            if name not in functions:
                continue  # this package does without it
            declared_result, declared = functions[name]
            self.assertEqual(len(arguments), len(declared), name)
            for c, python in [(result, declared_result), *zip(arguments, declared)]:
                if python in ARGUMENTS:
                    self.assertIn(c, ARGUMENTS[python], f"{name}: {python}")
                elif hasattr(python, "_type_") and hasattr(python._type_, "_fields_"):
                    self.assertEqual(c.removeprefix("const"), python._type_.__name__ + "*", name)
                else:  # c_void_p and pointers to scalars
                    self.assertTrue(c.endswith("*") or c == "refit_done", f"{name}: {c}, {python}")

    @unittest.skipUnless(shutil.which("cc"), "no C compiler")
    def test_structures_and_constants_are_laid_out_as_the_compiler_lays_them_out(self):
        lines = ['#include "client/refit_python.h"', "#define SAME(a, b) _Static_assert((a) == (b), #a)"]
        for structure in native.STRUCTURES:
            name = structure.__name__
            lines.append(f"SAME(sizeof({name}), {ctypes.sizeof(structure)});")
            for field, *_ in structure._fields_:
                lines.append(f"SAME(offsetof({name}, {field}), {getattr(structure, field).offset});")
                lines.append(f"SAME(sizeof((({name}*)0)->{field}), {getattr(structure, field).size});")
        for name in ("WHOLE", "CUDA_IPC_HANDLE_BYTES"):
            lines.append(f"SAME(REFIT_{name}, {getattr(native, name)});")
        lines += [f"SAME(REFIT_{name}, {value});" for name, value in vars(native).items() if name.startswith(("EVENT_", "WEIGHTS_"))]
        lines += [f"SAME(REFIT_ROLE_{(role or 'unknown').upper()}, {i});" for i, role in enumerate(errors.ROLES)]
        lines += [f"SAME(REFIT_{dtype.name.upper()}, {dtype.code});" for dtype in DTYPES.values()]
        lines += [f"SAME(REFIT_{status.name}, {status.value});" for status in errors.Status]
        lines += [f"SAME(REFIT_WEIGHTS_{weights.name}, {weights.value});" for weights in engine.Weights]
        lines += [f"SAME(REFIT_UPDATE_{name.upper()}, {i});" for i, name in enumerate(trainer.OUTCOMES)]
        lines += [f"SAME(REFIT_DELIVERY_{name.upper()}, {i});" for name, i in native.DELIVERIES.items()]
        lines += [f"SAME(REFIT_BROADCAST_{name.upper()}, {i});" for name, i in native.BROADCASTS.items()]
        derived = native.DERIVED_KINDS | native.DERIVED_ROLES
        lines += [f"SAME(REFIT_DERIVED_{name.upper()}, {i});" for name, i in derived.items()]
        lines += [f"SAME(REFIT_VERIFICATION_{(name or 'default').upper()}, {i});" for name, i in trainer.VERIFICATIONS.items()]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "same.c"
            source.write_text("\n".join(lines) + "\n")
            command = ["cc", "-std=c11", "-Wall", "-Werror", "-fsyntax-only", f"-I{HEADER.parents[1]}", str(source)]
            compiled = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(compiled.returncode, 0, compiled.stderr)

    def test_structures_that_are_declared_are_compared(self):
        declared = {name for name, value in vars(native).items() if isinstance(value, type) and issubclass(value, ctypes.Structure)}
        self.assertEqual(declared, {structure.__name__ for structure in native.STRUCTURES})


if __name__ == "__main__":
    unittest.main()
