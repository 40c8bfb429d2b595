"""PEFT's models: merged into the weights on the way, sharded or not, and adapters as a group of their own."""

import threading

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="in the environment 2.11.0-trainers")
transformers = pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")

from ranks_util import run_ranks  # noqa: E402
from test_lora import by_the_book  # noqa: E402

import refitd  # noqa: E402
from refitd.integrations import lora  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import FailedPrecondition, InvalidArgument, Unimplemented  # noqa: E402
from refitd.layout import TensorSpec  # noqa: E402
from refitd.integrations.transformers import RefitCallback, checkpoint_tensors  # noqa: E402

SECONDS = 600  # only what hangs reaches it
VOCABULARY = 48
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
)  # fmt: skip
CONFIGS = {
    "dense": lambda: transformers.Qwen3Config(intermediate_size=48, head_dim=8, tie_word_embeddings=False, **SMALL),
    "moe": lambda: transformers.Qwen3MoeConfig(
        intermediate_size=48, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **SMALL
    ),
}
TOKENS = torch.arange(3, 27).reshape(2, 12)


def base_of(kind="dense", dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)


def peft_of(base, seed=5, **options):
    """A model of PEFT's whose adapters are not the identity, as they are at first."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "o_proj"], **options})
    return with_random_adapters(peft.get_peft_model(base, config), seed)


def with_random_adapters(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def layers_of(model):
    return {n: m for n, m in model.get_base_model().named_modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")}


def expected_of(model, dtype=None):
    """The checkpoint's tensors with the active adapters merged, by names: full tensors, by the operations that refitd.integrations.lora states."""
    layers = layers_of(model)
    found = {}
    for name, tensor in model.get_base_model().state_dict().items():
        path = name.removesuffix(".base_layer.weight")
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if path in layers:
            layer = layers[path]
            terms = []
            for adapter in (name for name in layer.active_adapters if name in layer.scaling):
                embedding = adapter in layer.lora_embedding_A
                b = layer.lora_embedding_B[adapter] if embedding else layer.lora_B[adapter].weight
                a = layer.lora_embedding_A[adapter] if embedding else layer.lora_A[adapter].weight
                b, a = (m.detach().full_tensor() if hasattr(m, "full_tensor") else m.detach() for m in (b, a))
                terms.append((a.t(), b.t(), layer.scaling[adapter]) if embedding else (b, a, layer.scaling[adapter]))
            found[f"{path}.weight"] = by_the_book(tensor, terms, dtype or tensor.dtype)
        elif "lora_" not in name and "original_module" not in name:
            found[name.replace("modules_to_save.default.", "")] = tensor.to(dtype or tensor.dtype)
    return found


class Engine(torch.nn.Module):
    """Holds tensors by their names; NaN where nothing was written."""

    def __init__(self, shapes, dtype):
        super().__init__()
        self.names = {n: torch.nn.Parameter(torch.full(s, torch.nan, dtype=dtype), requires_grad=False) for n, s in shapes.items()}
        for name, parameter in self.names.items():
            self.register_parameter(name.replace(".", "-"), parameter)
        refitd.adopt(self)

    def differs(self, expected):
        """The names of the tensors that are not those of `expected`."""
        assert expected.keys() == self.names.keys()
        return [name for name, tensor in expected.items() if not torch.equal(tensor, self.names[name])]


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def trainer_of(group, daemon):
    return refitd.Trainer(group, socket=daemon.socket, device="host")


MODELS = {
    "linear": {},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "trained whole": {"modules_to_save": ["lm_head"]},
    "rank-stabilized": {"use_rslora": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", MODELS)
def test_engines_get_the_merged_weights_under_the_models_own_names(daemon, which, dtype):
    model = peft_of(base_of(), **MODELS[which])
    expected = expected_of(model, dtype)
    engine = Engine({name: tensor.shape for name, tensor in expected.items()}, dtype)
    refitd.adopt(model)
    group = f"{which}-{dtype}".replace(" ", "-")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with trainer_of(group, daemon) as trainer:
        trainer.register(lora.merged(model), dtype=dtype)
        with refitd.EngineLoop(engine, group=group, instance="a", names=engine.names, clean=False, socket=daemon.socket) as loop:
            trainer.refit(1)
            loop.wait(1, SECONDS)
            assert engine.differs(expected) == []
            with_random_adapters(model, 6)
            trainer.refit(2)
            loop.wait(2, SECONDS)
            assert engine.differs(expected_of(model, dtype)) == [] and engine.differs(expected) != []
    with_random_adapters(model, 5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "the trainer's model changed"
    # PEFT's own merge sums in an order of its library's choice: the same but for roundings.
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(expected[name], tensor.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_two_active_adapters_are_both_merged_in_their_order():
    model = peft_of(base_of())
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with_random_adapters(model, 7)
    tensors = lora.merged(model)
    merged = {n for n, t in tensors.items() if isinstance(t, lora.Added)}
    assert merged == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qkvo"}
    from layout_util import assemble

    found = assemble([refitd.layout.shards.collect(tensors, world_size=1)])
    expected = expected_of(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- what trains them ----


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_callback_refits_a_model_of_pefts_at_each_step(daemon, tmp_path, kind):
    model = peft_of(base_of(kind))
    group = f"callback-{kind}"
    seen = []

    def expected():
        tensors = expected_of(model, torch.bfloat16)
        for name in [n for n in tensors if ".experts." in n]:  # fused in the model, apart in the checkpoint
            fused = tensors.pop(name)
            for expert, one in enumerate(fused):
                parts = zip(("gate", "up"), one.chunk(2)) if "gate_up" in name else (("down", one),)
                for part, tensor in parts:
                    tensors[f"{name.rsplit('.', 1)[0]}.{expert}.{part}_proj.weight"] = tensor
        return tensors

    engine = Engine({name: tensor.shape for name, tensor in expected().items()}, torch.bfloat16)
    callback = RefitCallback(group, dtype=torch.bfloat16, socket=daemon.socket, device="host")

    class Compare(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            with loop.use() as version:
                seen.append((version, engine.differs(expected())))

    torch.manual_seed(1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (12, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with trainer_of(group, daemon):
        pass  # the group is there, so that the engine attaches first
    with refitd.EngineLoop(engine, group=group, instance="a", names=engine.names, clean=False, socket=daemon.socket) as loop:
        begin = expected()
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback, Compare()]).train()
    assert seen == [(1, []), (2, [])] and engine.differs(begin)


def train_sharded(rank, world, socket):
    """FSDP2 shards base and adapters; two steps, each refitted. Returns what merges of full tensors give."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    model = peft_of(base_of())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    expected = []
    with refitd.Trainer("fsdp2", rank=rank, world_size=world, socket=socket, device="host") as trainer:
        trainer.register(checkpoint_tensors(model), dtype=torch.bfloat16)
        for version in (1, 2):
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(expected_of(model, torch.bfloat16))
            trainer.refit(version, duration_seconds=SECONDS)
    return expected


def test_fsdp2_shards_are_merged_where_they_are(daemon):
    names = expected_of(peft_of(base_of()), torch.bfloat16)
    engine = Engine({name: tensor.shape for name, tensor in names.items()}, torch.bfloat16)
    loops = []

    def attach():
        options = dict(clean=False, socket=daemon.socket, connect=refitd.Connect(wait_seconds=SECONDS))
        loops.append(refitd.EngineLoop(engine, group="fsdp2", instance="a", names=engine.names, **options))

    attaching = threading.Thread(target=attach)
    attaching.start()
    first, second = run_ranks(2, train_sharded, daemon.socket)
    attaching.join()
    with loops[0] as loop:
        assert loop.wait(2, SECONDS) == 2
    assert engine.differs(second[1]) == [] and engine.differs(second[0])
    assert all(torch.equal(first[1][name], tensor) for name, tensor in second[1].items())


# ---- adapters as a group of their own ----


def test_an_engine_computes_with_adapters_that_come_as_a_group_of_their_own(daemon):
    options = {"target_modules": ["q_proj", "embed_tokens", "down_proj"], "modules_to_save": ["lm_head"]}
    trained, served = peft_of(base_of(), 5, **options).eval(), peft_of(base_of(), 9, **options).eval()
    assert not torch.equal(trained(TOKENS).logits, served(TOKENS).logits)
    refitd.adopt(trained)
    tensors = lora.adapters(trained)
    saved = peft.get_peft_model_state_dict(trained, save_embedding_layers=False)
    assert {name for name in tensors if not name.endswith("lora_scaling")} == saved.keys()
    with trainer_of("adapter", daemon) as trainer:
        trainer.register(tensors)
        with lora.AdapterLoop(served, group="adapter", instance="a", socket=daemon.socket) as loop:
            for version, scale in ((1, 1.0), (2, 3.0)):
                with_random_adapters(trained, version)
                for layer in layers_of(trained).values():
                    layer.scaling["default"] *= scale
                result = trainer.refit(version)
                loop.wait(version, SECONDS)
                with loop.use() as used, torch.no_grad():
                    assert used == version and torch.equal(trained(TOKENS).logits, served(TOKENS).logits)
    moved = sum(tensor.numel() * 4 for tensor in saved.values()) + 4 * len(layers_of(trained))
    assert result.bytes == moved, "the adapter alone"


def test_adapters_of_one_group_arrive_under_the_names_that_the_base_model_gives(daemon):
    """An engine that knows the base model, ranks and target modules alone receives both adapters, and PEFT's configuration of each."""
    trained = peft_of(base_of(), 5)
    trained.add_adapter("bob", peft.LoraConfig(r=2, lora_alpha=6, target_modules=["down_proj"]))
    with_random_adapters(trained, 6)
    refitd.adopt(trained)
    base = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in base_of().state_dict().items()]
    wanted = {
        "default/": lora.Matrices(lora.specs_of(base, 4, ["q_proj", "v_proj", "o_proj"], "float32")),
        "bob/": lora.Matrices(lora.specs_of(base, 2, r".*\.down_proj", "float32")),
    }
    tensors = lora.adapters(trained, ["default", "bob"])
    assert tensors.keys() == {name for prefix, matrices in wanted.items() for name in matrices.named(prefix)}
    with trainer_of("both", daemon) as trainer:
        trainer.register(tensors)
        with lora.Receiver(wanted, group="both", instance="a", socket=daemon.socket) as receiver:
            trainer.refit(1)
            receiver.wait(1, SECONDS)
            with receiver.use():
                for prefix, matrices in wanted.items():
                    for name, held in matrices.tensors.items():
                        assert torch.equal(held, tensors[prefix + name]), name
            assert receiver.arrived == 1
    for prefix, alpha, rank in (("default/", 6, 4), ("bob/", 6, 2)):
        config = wanted[prefix].config()
        assert (config["r"], config["lora_alpha"], "alpha_pattern" in config) == (rank, alpha, False)


def test_an_adapter_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgument, match="no adapter 'other'"):
        lora.adapters(peft_of(base_of()), "other")


# ---- what is no sum of weight and product ----


@pytest.mark.parametrize(
    "options, message",
    [
        ({"use_dora": True}, "module 'model.layers.0.self_attn.q_proj': adapter 'default' is a variant"),
        ({"lora_bias": True}, "adapter 'default' has a bias"),
        ({"trainable_token_indices": [1, 2]}, "module 'model.embed_tokens' has trained single tokens"),
    ],
)
def test_other_methods_are_refused_with_the_modules_name(options, message):
    base = base_of()
    if "lora_bias" in options:
        for layer in base.model.layers:
            layer.self_attn.q_proj = torch.nn.Linear(32, 32)
    model = peft_of(base, **{"target_modules": ["q_proj"], **options})
    with pytest.raises(Unimplemented, match=message):
        lora.merged(model)


def test_parameters_of_fused_experts_are_refused():
    model = peft_of(base_of("moe"), target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(Unimplemented, match="module 'model.layers.0.mlp.experts' adapts the single parameter 'down_proj'"):
        lora.merged(model)


def test_convolutions_are_refused():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"]), model)
    with pytest.raises(Unimplemented, match="module '0' is a Conv2d: its weight is no matrix"):
        lora.merged(model)


def test_other_tuners_are_refused():
    model = peft.get_peft_model(base_of(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(Unimplemented, match="not LoRA's"):
        lora.merged(model)


def test_adapters_that_are_merged_already_are_refused():
    model = peft_of(base_of())
    model.merge_adapter()
    with pytest.raises(FailedPrecondition, match="merged already"):
        lora.merged(model)
