"""vLLM takes new weights from refitd. docs/vllm.md lists the functions of vLLM that this package replaces in its processes.

    REFITD_GROUP=policy VLLM_PLUGINS=refitd vllm serve MODEL --load-format refitd \\
        --weight-transfer-config '{"backend": "refitd"}'

vLLM calls `register` in every process through the entry point `vllm.general_plugins`. It adds the weight-transfer backend
`refitd` (`backend.py`) and the load format `refitd` (`loader.py`). The endpoint plugin `refitd` (`endpoints.py`) drives updates
from the API server and tells readiness. `lifecycle.py` is the state machine behind it; that module needs neither vLLM nor torch.

vLLM, torch and FastAPI are imported where they are used only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...serving.driver import Follower


def register() -> None:
    """Adds the backend and the load format `refitd` to vLLM in this process, and lets its engine core wake up paused; a repeated call
    changes nothing."""
    from . import versions

    versions.register_backend("refitd", f"{__name__}.backend", "RefitdBackend")
    versions.register_load_format()
    versions.let_wake_up_stay_paused()


def follow(llm: Any, settings: Mapping[str, Any] | None = None) -> Follower:
    """Attaches an offline `vllm.LLM`, whose updates then happen in `Follower.poll` and `Follower.wait`. See `driver.Follower`."""
    from .controls import follow as begin

    return begin(llm, settings)


# The backend that vLLM made in this worker's process, for frameworks whose own code in the worker is not told of it.
_backend: Callable[[], Any] = lambda: None  # noqa: E731


def set_backend(backend: Any) -> None:
    """Notes the backend. The backend calls this when vLLM makes it."""
    global _backend
    _backend = weakref.ref(backend)


def backend_here() -> Any:
    """The backend of this process's vLLM worker; None where vLLM was told of none."""
    return _backend()


__all__ = ["backend_here", "follow", "register", "set_backend"]
