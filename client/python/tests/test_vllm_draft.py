"""The model that vLLM serves and its draft: which tensors are whose."""

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from refitd.integrations.vllm import draft  # noqa: E402
from refitd.layout import TensorSpec  # noqa: E402


class Served(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4, 2)


def specs(*names):
    return [TensorSpec(name, "float32", (4, 2)) for name in names]


def speculation(model, method="eagle"):
    return SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=model), target_model_config=SimpleNamespace(model="served"))


@pytest.mark.parametrize(
    "of_draft, kept", [(specs("model.layers.0.weight"), False), (specs("embed_tokens.weight"), True)]
)
def test_a_manifest_of_the_served_model_alone_does_not_say_what_the_draft_has(monkeypatch, of_draft, kept):
    manifests = {"manifest": specs("model.embed_tokens.weight"), "draft": of_draft}
    monkeypatch.setattr(draft, "read_manifest", manifests.__getitem__)
    model = Served()
    model.has_own_embed_tokens = False
    draft.keep_own_parts(model, "manifest", speculation("draft"))
    assert model.has_own_embed_tokens == kept


def test_the_draft_in_the_served_models_checkpoint_has_its_names(monkeypatch):
    monkeypatch.setattr(draft, "read_manifest", {"served": specs("embed_tokens.weight")}.__getitem__)
    model = Served()
    model.has_own_embed_tokens = False
    draft.keep_own_parts(model, None, speculation("served", "mtp"))
    assert model.has_own_embed_tokens


def test_shared_parts_of_a_model_with_many_tensors_are_found_at_once():
    served = Served()
    of_draft = torch.nn.Module()
    of_draft.embed_tokens = served.embed_tokens
    many = [f"layers.{i}.weight" for i in range(6_000)]
    listed = specs("embed_tokens.weight", "draft.embed_tokens.weight", *many, *(f"draft.{name}" for name in many))
    begin = time.process_time()
    assert draft.WithDraft(served, of_draft, listed).tied_names == {"draft.embed_tokens.weight": "embed_tokens.weight"}
    assert time.process_time() - begin < 5, "all pairs of tensors were compared"
