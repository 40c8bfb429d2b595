"""The load format `refitd`: an engine starts with random weights, reads no checkpoint, and gets its first version from refitd.

While vLLM loads, this format also gathers the evidence of `evidence.py`: it knows the moment between loading and post-processing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...serving import evidence


@lru_cache(maxsize=1)
def loader_class() -> Any:
    """vLLM's loader of random weights, with the evidence."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from .versions import is_attention

    class RefitdModelLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            # A checkpoint leaves as they are the buffers that it does not have, and the parameters that attention layers have for scales.
            kept = [tensor for layer in model.modules() for tensor in layer._buffers.values()]
            kept += [tensor for layer in model.modules() if is_attention(layer) for tensor in layer._parameters.values()]
            values = [(tensor, tensor.detach().clone()) for tensor in kept if tensor is not None]
            super().load_weights(model, model_config)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
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
