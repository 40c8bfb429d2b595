"""A place for generated stubs: the modules that protoc makes of proto/refitd/v1 have this package's name.

This package has none of them. `import refitd.v1.trainer_pb2` finds those in a folder refitd/v1 beside any entry of sys.path,
as PYTHONPATH had it when this package was imported.
"""

from __future__ import annotations

import os
import sys

__path__ = [*__path__, *(os.path.join(entry or ".", "refitd", "v1") for entry in sys.path)]
