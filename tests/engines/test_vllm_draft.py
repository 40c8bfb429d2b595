"""vLLM with a draft model takes the weights of both models in one update, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import vllm
from support import VLLM_ON_GPU, CheckpointTrainer, EngineFailed, EngineProcess, Sending, check_holds, following, fresh, update

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="this version of vLLM gives no draft model to backends"),
    pytest.mark.skipif(VLLM_ON_GPU, reason="compares tokens for equality"),
]


def speculating(method: str, draft: Path) -> dict[str, Any]:
    how = {"method": method, "model": str(draft), "num_speculative_tokens": 2}
    return {"speculative_config": how, "dtype": "bfloat16", "disable_log_stats": False}


def pairs(method: str, folder: Path, tmp_path: Path) -> list[tuple[Path, Path]]:
    """Two served models and their drafts. By "draft_model" the draft is the served model itself, whose every token is right."""
    served = [models.make("llama", folder, seed) for seed in (1, 2)]
    if method == "draft_model":
        return [(checkpoint, checkpoint) for checkpoint in served]
    own = method == "eagle with embeddings"
    return [(checkpoint, models.make_eagle(checkpoint, tmp_path / f"eagle-{seed}", seed, own)) for seed, checkpoint in enumerate(served)]


@pytest.mark.parametrize("method", ["eagle", "eagle with embeddings", "draft_model"])
def test_both_models_have_each_version(method: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """After each version both models have the parameters of a fresh engine that loaded both checkpoints, and the engine its tokens. A draft that equals
    the served model has all its tokens taken, at each version."""
    both = pairs(method, folder, tmp_path)
    kind = method.partition(" ")[0]
    expected = [fresh(EngineProcess, served, tmp_path, **speculating(kind, draft)) for served, draft in both]
    assert expected[0][0].differ_from(expected[1][0]), "the two checkpoints give the same tokens: the test could not fail"
    assert any(name.startswith("draft.") for name in expected[0][1][0])
    sent = [models.with_draft(served, draft, tmp_path / f"sent-{i}") for i, (served, draft) in enumerate(both)]
    trainer = CheckpointTrainer(daemon.socket, sent[0])
    try:
        with EngineProcess(both[0][0], tmp_path / "live.log", follow=following(daemon), **speculating(kind, both[0][1])) as engine:
            engine.started()
            before = engine.call("drafted")
            for version in range(1, 5):
                update(engine, trainer, version, sent[version % 2])
                check_holds(engine, expected[version % 2], version)
                proposed, taken = (now - then for now, then in zip(engine.call("drafted"), before))
                before = engine.call("drafted")
                assert proposed > 0
                assert method != "draft_model" or taken >= 0.9 * proposed, (version, proposed, taken)
            (rank,) = engine.call("status")
    finally:
        trainer.close()
    proof = rank["delivery"]["proof"]
    assert not proof["failed"] and not [name for name in proof["unproved"] if name.startswith("draft.")], proof


def test_a_trainer_without_the_draft_is_refused_by_name(folder: Path, daemon: Any, tmp_path: Path) -> None:
    (served, draft), _ = pairs("eagle", folder, tmp_path)
    trainer = CheckpointTrainer(daemon.socket, served)
    try:
        with EngineProcess(served, tmp_path / "live.log", follow=following(daemon), **speculating("eagle", draft)) as engine:
            engine.started()
            sending = Sending(trainer, 1, served)
            engine.call("poll", 10.0)
            with pytest.raises(Exception, match=r"draft\.") as caught:
                sending.result()
            print(f"the trainer: {caught.value}")
            with pytest.raises(EngineFailed, match="not one whole version"):
                engine.call("generate")
    finally:
        trainer.close()
