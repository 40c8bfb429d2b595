#!/usr/bin/python3
"""Makes a virtual environment with PyTorch for the tests of client/python, and prints the path of its interpreter.

usage: tools/torch_env.py [--version X.Y.Z] [--python INTERPRETER]

The packages are those of tools/torch/X.Y.Z.txt, pinned with hashes. PyPI's PyTorch for Linux depends on 3 GB of NVIDIA's
libraries, of which a machine without a GPU calls nothing but loads everything. The lists leave out the large libraries;
this program compiles a stand-in for each, which has the names that PyTorch's libraries look up when they are loaded and
ends the process if a function of it is called. So an environment takes 1.5 GB, but can't use a GPU.

An environment lies in ~/.cache/refitd (or $REFITD_TORCH_ENVIRONMENTS) under the hash of all that it was made from, and
is made once.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
LISTS = TOOLS / "torch"
NEWEST = "2.15.0"  # tested by default; tools/torch has the others that are supported

# The lists leave these out: the libraries' names up to ".so", and what the names of their functions begin with.
LEFT_OUT = {
    "libcublas": "cublas",
    "libcublasLt": "cublasLt",
    "libcudnn": "cudnn",
    "libcufft": "cufft",
    "libcurand": "curand",
    "libcusolver": "cusolver",
    "libcusparse": "cusparse",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libnvrtc": "nvrtc",
    "libnvshmem_host": "nvshmem",
}


def environments() -> Path:
    if folder := os.environ.get("REFITD_TORCH_ENVIRONMENTS"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "refitd"


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def libraries_missing(torch_libraries: Path) -> set[str]:
    """The sonames that PyTorch's libraries need and the lists leave out."""
    needed = set()
    for library in torch_libraries.glob("lib*.so*"):
        needed.update(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", library)))
    return {soname for soname in needed if soname.split(".so")[0] in LEFT_OUT}


def names_looked_up(torch_libraries: Path) -> dict[str, str]:
    """The names that PyTorch's libraries take from others, with the version of each or ""."""
    names = {}
    for library in torch_libraries.glob("lib*.so*"):
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            names[name] = version.lstrip("@")
    return names


def compile_stand_in(soname: str, names: dict[str, str], folder: Path) -> None:
    prefix = LEFT_OUT[soname.split(".so")[0]]
    mine = {name: version for name, version in names.items() if name.startswith(prefix)}
    source = folder / f"{soname}.stand-in.c"
    source.write_text("#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in sorted(mine)))
    versions = folder / f"{soname}.stand-in.map"
    nodes = sorted(set(mine.values()) - {""})
    versions.write_text(
        "".join(
            f"{node} {{ global: {' '.join(f'{name};' for name in sorted(mine) if mine[name] == node)} }};\n"
            for node in nodes
        )
    )
    version_flags = [f"-Wl,--version-script={versions}"] if nodes else []
    run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", *version_flags, "-o", folder / soname, source)
    source.unlink()
    versions.unlink()


def make(folder: Path, requirements: Path, interpreter: str) -> None:
    run(interpreter, "-m", "venv", folder)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-cache-dir"]
    run(*pip, "--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", requirements)
    torch_libraries = next(folder.glob("lib/python*/site-packages/torch/lib"))
    names = names_looked_up(torch_libraries)
    for soname in sorted(libraries_missing(torch_libraries)):
        compile_stand_in(soname, names, torch_libraries)
    run(folder / "bin/python", "-c", "import torch; torch.ones(2, 2) @ torch.ones(2, 2)")


def interpreter_of(version: str, python: str) -> Path:
    """The environment's interpreter; the environment is made if it is not there."""
    requirements = LISTS / f"{version}.txt"
    if not requirements.exists():
        known = ", ".join(sorted(path.stem for path in LISTS.glob("*.txt")))
        raise SystemExit(f"no list of packages for PyTorch {version}; there are {known}")
    about_python = run(python, "-c", "import sys; print(sys.version, sys.executable)")
    made_from = hashlib.sha256()
    for part in (requirements.read_bytes(), Path(__file__).read_bytes(), about_python.encode()):
        made_from.update(hashlib.sha256(part).digest())
    root = environments()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"torch-{version}-{made_from.hexdigest()[:12]}"
    if (folder / "complete").exists():
        return folder / "bin/python"
    with locked(root / "torch.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"making {folder}", file=sys.stderr, flush=True)
            make(folder, requirements, python)
            (folder / "complete").touch()
    return folder / "bin/python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--version", default=NEWEST, help="of PyTorch (%(default)s)")
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter to make it for (%(default)s)")
    arguments = parser.parse_args()
    print(interpreter_of(arguments.version, arguments.python))


if __name__ == "__main__":
    main()
