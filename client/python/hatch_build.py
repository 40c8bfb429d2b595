"""Puts the compiled parts into the wheel.

The environment's REFITD_WHEEL_PARTS names a folder: its `bin` (librefit.so, refitd, refitctl) becomes refitd/_bin, its
`licenses` becomes refitd/_licenses. `tools/wheel` makes that folder. An editable install (`pip install -e`) takes none:
there the environment says where the compiled parts are (refitd/_core/native.py).
"""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = "REFITD_WHEEL_PARTS"


class CompiledParts(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "editable":
            return
        parts = os.environ.get(PARTS)
        if not parts:
            raise RuntimeError(f"a wheel without the compiled parts is of no use: call tools/wheel, which sets {PARTS}")
        # No extension module is in it, so that one wheel serves every Python; the programs are of this machine's kind.
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
        build_data["force_include"][os.path.join(parts, "bin")] = "refitd/_bin"
        build_data["force_include"][os.path.join(parts, "licenses")] = "refitd/_licenses"
