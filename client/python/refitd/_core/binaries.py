"""Finds the compiled parts of refitd, and runs the two programs among them.

Each part is looked for in this order: the file that its environment variable names, the file that this package carries
(a wheel does, a checkout does not), and the system's own.

| part         | environment variable | in the package       | of the system                        |
|--------------|----------------------|----------------------|--------------------------------------|
| librefit.so  | REFIT_LIBRARY        | _bin/librefit.so     | whatever the dynamic loader finds    |
| refitd       | REFITD_BINARY        | _bin/refitd          | the first program of the name on PATH |
| refitctl     | REFITCTL_BINARY      | _bin/refitctl        | the first program of the name on PATH |

The package's commands `refitd` and `refitctl` are scripts that call `run_refitd` and `run_refitctl`. Those replace the
process by the program, so that its process id, signals, exit code and arguments are the caller's own.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

_IN_PACKAGE = Path(__file__).parents[1] / "_bin"
_LIBRARY = "librefit.so"
_ELF_MAGIC = b"\x7fELF"
# A shell exits with this status for a command that it does not find.
_NOT_FOUND = 127


def library() -> str:
    """Returns what `ctypes.CDLL` loads: a path, or the plain name where only the system's loader can tell.

    Raises FileNotFoundError where REFIT_LIBRARY names no file.
    """
    return _overridden("REFIT_LIBRARY") or _carried(_LIBRARY) or _LIBRARY


def daemon() -> str:
    """The path of the program `refitd`. Raises FileNotFoundError where there is none."""
    return _program("refitd", "REFITD_BINARY")


def refitctl() -> str:
    """The path of the program `refitctl`. Raises FileNotFoundError where there is none."""
    return _program("refitctl", "REFITCTL_BINARY")


def run_refitd() -> NoReturn:
    """The command `refitd`: becomes the daemon, with this process's arguments."""
    _become("refitd", "REFITD_BINARY")


def run_refitctl() -> NoReturn:
    """The command `refitctl`: becomes the program, with this process's arguments."""
    _become("refitctl", "REFITCTL_BINARY")


def _overridden(variable: str) -> str | None:
    path = os.environ.get(variable)
    if path and not os.path.isfile(path):
        raise FileNotFoundError(f"{variable} names no file: {path}")
    return path or None


def _carried(name: str) -> str | None:
    path = _IN_PACKAGE / name
    return str(path) if path.is_file() else None


def _on_path(name: str) -> str | None:
    """The first program of this name on PATH. Scripts are passed over, since this package's own command is a script of that name."""
    for folder in os.get_exec_path():
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and _is_elf(path):
            return path
    return None


def _is_elf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_ELF_MAGIC)) == _ELF_MAGIC
    except OSError:
        return False


def _program(name: str, variable: str) -> str:
    path = _overridden(variable) or _carried(name) or _on_path(name)
    if path is None:
        raise FileNotFoundError(
            f"no program {name}: {variable} is not set, this package carries none ({_IN_PACKAGE}), and PATH has none"
        )
    return path


def _become(name: str, variable: str) -> NoReturn:
    try:
        path = _program(name, variable)
        # Python ignores these two signals, and a program inherits what is ignored.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # The daemon looks for NCCL among the packages of the environment that this variable names.
        if sys.prefix != sys.base_prefix:
            os.environ.setdefault("VIRTUAL_ENV", sys.prefix)
        os.execv(path, [name, *sys.argv[1:]])
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(_NOT_FOUND)
