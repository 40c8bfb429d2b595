"""The load format `refitd`: an engine starts with random weights, reads no checkpoint, and gets its first version from refitd.

While vLLM loads, this format also gathers the evidence of `evidence.py`: it knows the moment between loading and post-processing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from . import evidence


@lru_cache(maxsize=1)
def loader_class() -> Any:
    """vLLM's loader of random weights, with the evidence."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RefitdModelLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            self._before = [(layer, evidence.Snapshot.of(layer)) for layer in model.modules()]

        def load_model(self, vllm_config: Any, *arguments: Any, **options: Any) -> Any:
            model = super().load_model(vllm_config, *arguments, **options)
            found = {id(layer): evidence.changes(layer, before) for layer, before in self._before}
            # By module, and not by name: names of wrapped models differ from those of the loaded one.
            object.__setattr__(model, evidence.ATTRIBUTE, found)
            object.__setattr__(model, evidence.CONFIGURATION, vllm_config)
            del self._before
            return model

    return RefitdModelLoader
