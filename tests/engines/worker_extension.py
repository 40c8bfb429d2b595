"""The methods that the tests add to the worker of a vLLM server (`--worker-extension-cls worker_extension.Parameters`)."""

from __future__ import annotations

from typing import Any

from engine_program import parameters_of


class Parameters:
    """Beside vLLM's Worker."""

    def refitd_parameters(self) -> dict[str, Any]:
        """The digest of each parameter and buffer."""
        return parameters_of(self)
