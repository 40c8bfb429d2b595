"""The callback in training by transformers' and TRL's own trainers: engines hold after each step what the model holds."""

import os
import re
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")

import refitd  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.integrations.transformers import RefitCallback, checkpoint_tensors  # noqa: E402
from test_examples import Running, wait_for  # noqa: E402

VOCABULARY = 48
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(intermediate_size=48, **SMALL),
    "tied": lambda: transformers.Qwen3Config(intermediate_size=48, head_dim=8, tie_word_embeddings=True, **SMALL),
    "moe": lambda: transformers.Qwen3MoeConfig(
        intermediate_size=48, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **SMALL
    ),
    "mixtral": lambda: transformers.MixtralConfig(intermediate_size=48, num_local_experts=4, **SMALL),
}


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def model_of(kind):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())


def data():
    torch.manual_seed(1)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (12, 8))]


def arguments(folder, **options):
    return transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip


class Engine(torch.nn.Module):
    """Holds a checkpoint's tensors as they are; NaN where nothing was written."""

    def __init__(self, folder, dtype):
        from safetensors.torch import load_file

        super().__init__()
        self.names = {}
        for name, tensor in load_file(f"{folder}/model.safetensors").items():
            self.names[name] = torch.nn.Parameter(torch.full(tensor.shape, torch.nan, dtype=dtype or tensor.dtype), requires_grad=False)
            self.register_parameter(name.replace(".", "-"), self.names[name])
        refitd.adopt(self)

    def tensors_unlike(self, folder):
        """The names of the tensors that differ from the checkpoint in `folder`."""
        from safetensors.torch import load_file

        saved = load_file(f"{folder}/model.safetensors")
        assert saved.keys() == self.names.keys()
        return [name for name, tensor in saved.items() if not torch.equal(tensor.to(self.names[name].dtype), self.names[name])]


class SaveEachStep(transformers.TrainerCallback):
    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_step_end(self, args, state, control, model=None, **_):
        self.steps.append(state.global_step)
        model.save_pretrained(f"{self.folder}/step{state.global_step}")


@pytest.mark.parametrize("lora", [False, True])
def test_the_examples_trainer_and_engine_say_the_same(daemon, lora):
    options = ["--lora"] if lora else []
    if lora:
        pytest.importorskip("peft")
    group = f"example-{lora}"
    engine = Running(daemon.socket, "transformers_engine.py", "--group", group, "--until", "3")
    trainer = Running(daemon.socket, "transformers_trainer.py", "--group", group, *options)
    try:
        wait_for([engine, trainer])
        said = [dict(re.findall(r"^version (\d) says (.+)$", side.text(), re.M)) for side in (engine, trainer)]
    finally:
        engine.end()
        trainer.end()
    assert sorted(said[1]) == ["0", "1", "2", "3"]
    assert said[0] == {version: said[1][version] for version in said[0]}
    assert "3" in said[0] and said[1]["0"] != said[1]["3"]


@pytest.mark.parametrize(
    "kind, dtype", [("llama", None), ("llama", torch.bfloat16), ("tied", torch.bfloat16), ("moe", None), ("mixtral", None)]
)
def test_each_step_reaches_the_engine_as_save_pretrained_writes_it(daemon, tmp_path, kind, dtype):
    model = model_of(kind)
    model.save_pretrained(tmp_path / "begin")
    engine = Engine(tmp_path / "begin", dtype)
    group = f"{kind}-{dtype}"
    steps, seen = [], []
    callback = RefitCallback(group, dtype=dtype, socket=daemon.socket, device="host")

    class Compare(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            with loop.use() as version:
                seen.append((version, engine.tensors_unlike(f"{tmp_path}/step{state.global_step}")))

    with refitd.Trainer(group, socket=daemon.socket, device="host"):
        pass  # the group is there, so that the engine attaches first
    with refitd.EngineLoop(engine, group=group, instance="a", names=engine.names, clean=False, socket=daemon.socket) as loop:
        with warnings.catch_warnings():
            warnings.simplefilter("error", refitd.StagingWarning)
            transformers.Trainer(
                model, arguments(tmp_path), train_dataset=data(), callbacks=[SaveEachStep(tmp_path, steps), callback, Compare()]
            ).train()
    assert steps == [1, 2, 3] and seen == [(1, []), (2, []), (3, [])]
    assert callback.result.version == 3 and callback.trainer is None
    assert engine.tensors_unlike(tmp_path / "begin"), "training changed nothing"


def train_on_rank(rank, world, socket, group, kind, dtype, folder, tolerate):
    """A rank of training as torchrun starts it, whose model transformers wraps in DistributedDataParallel. Returns the version of its
    last refit, or the error that ended its training; and the digest of its weights."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # required; run_ranks has made the process group
    wrapped = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            wrapped.append(type(trainer.model_wrapped))
            if rank == 0:
                model.save_pretrained(f"{folder}/step{state.global_step}")

    callback = RefitCallback(group, dtype=dtype, tolerate=tolerate, socket=socket, device="host")
    given = arguments(folder, ddp_backend="gloo")
    assert (given.process_index, given.world_size) == (rank, world)
    model = model_of(kind)
    trainer = transformers.Trainer(model, given, train_dataset=data(), callbacks=[Look(), callback])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a refit that is tolerated
            trainer.train()
        outcome = callback.result.version
    except refitd.UpdateAborted as error:
        outcome = str(error)
    finally:
        callback.close()
    assert wrapped and set(wrapped) == {torch.nn.parallel.DistributedDataParallel}
    return outcome, float(sum(parameter.double().abs().sum() for parameter in model.parameters()))


class Holder:
    """An engine that keeps a copy of each version that was committed, and refuses `refused`."""

    def __init__(self, socket, group, engine, refused=None):
        with refitd.Trainer(group, world_size=2, socket=socket, device="host"):
            pass  # the group is there, so that the engine attaches first
        self.by_version = {}
        self.refused = refused
        self.tensors = engine.names
        self.engine = refitd.Engine(group, instance="a", dirty=True, socket=socket, device="host")
        self.engine.register(engine.names)
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        for event in self.engine:
            if isinstance(event, refitd.Prepare):
                event.fail("busy") if event.version == self.refused else event.ready()
            elif isinstance(event, refitd.Committed):
                self.by_version[event.version] = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def differs(self, version, folder):
        from safetensors.torch import load_file

        held, saved = self.by_version[version], load_file(f"{folder}/model.safetensors")
        assert saved.keys() == held.keys()
        return [name for name, tensor in saved.items() if not torch.equal(tensor.to(held[name].dtype), held[name])]

    def close(self):
        self.engine.close()
        self.thread.join()


@pytest.mark.parametrize("kind, dtype", [("llama", None), ("tied", torch.bfloat16), ("moe", None)])
def test_ranks_of_data_parallel_training_refit_each_step_together(daemon, tmp_path, kind, dtype):
    model_of(kind).save_pretrained(tmp_path / "begin")
    group = f"ranks-{kind}"
    holder = Holder(daemon.socket, group, Engine(tmp_path / "begin", dtype))
    try:
        results = run_ranks(2, train_on_rank, daemon.socket, group, kind, dtype, str(tmp_path), 0)
    finally:
        holder.close()
    assert [version for version, _ in results] == [3, 3] and results[0] == results[1], "the ranks trained one model"
    assert sorted(holder.by_version) == [0, 1, 2, 3]
    for version in (0, 1, 2, 3):
        assert holder.differs(version, tmp_path / (f"step{version}" if version else "begin")) == []
    assert holder.differs(3, tmp_path / "begin"), "training changed nothing"


@pytest.mark.parametrize("tolerate", [0, 1])
def test_a_refit_that_fails_ends_or_passes_on_all_ranks_alike(daemon, tmp_path, tolerate):
    model_of("llama").save_pretrained(tmp_path / "begin")
    group = f"ranks-fail-{tolerate}"
    holder = Holder(daemon.socket, group, Engine(tmp_path / "begin", None), refused=2)
    try:
        results = run_ranks(2, train_on_rank, daemon.socket, group, "llama", None, str(tmp_path), tolerate)
    finally:
        holder.close()
    outcomes = [outcome for outcome, _ in results]
    assert outcomes == [3, 3] if tolerate else all("busy" in outcome for outcome in outcomes)
    assert sorted(holder.by_version) == ([0, 1, 3] if tolerate else [0, 1])


def test_every_second_step_and_the_end_are_refitted(daemon, tmp_path):
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, None)
    versions = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            versions.append(callback.result and callback.result.version)

    callback = RefitCallback("every", every=2, at_begin=False, socket=daemon.socket, device="host")
    with refitd.Trainer("every", socket=daemon.socket, device="host"):
        pass
    with refitd.EngineLoop(engine, group="every", instance="a", names=engine.names, socket=daemon.socket) as loop:
        transformers.Trainer(model, arguments(tmp_path), train_dataset=data(), callbacks=[callback, Look()]).train()
        assert versions == [None, 2, 2] and loop.wait(3, 60) == 3


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("on_older, version", [("next", 11), ("refuse", None), ("replace", 7)])
def test_a_training_that_resumes_behind_the_groups_version(daemon, tmp_path, on_older, version):
    """By default it goes on with the group's next version, and its step is noted."""
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    engine, group = Engine(tmp_path, None), f"resumed-{on_older}"
    with refitd.Trainer(group, socket=daemon.socket, device="host"):
        pass

    def begin(step):
        callback = RefitCallback(group, on_older=on_older, socket=daemon.socket, device="host")
        try:
            callback.on_train_begin(arguments(tmp_path), transformers.TrainerState(global_step=step), None, model=model)
            return callback.result.version
        finally:
            callback.close()

    with refitd.EngineLoop(engine, group=group, instance="a", names=engine.names, socket=daemon.socket) as loop:
        assert begin(10) == 10 and loop.wait(10, 60) == 10
        if version is None:
            with pytest.raises(refitd.FailedPrecondition, match="version"):
                begin(7)
            return
        assert begin(7) == version
    assert f"update to version {version}: step 7" in daemon.read_log()


def test_a_refit_that_fails_ends_training_unless_it_is_tolerated(daemon, tmp_path):
    engine_region = refitd.empty((4,), "float32", like="torch")

    def run(group, tolerate):
        with refitd.Trainer(group, socket=daemon.socket, device="host"):
            pass
        def serve():
            for event in engine:
                if isinstance(event, refitd.Prepare):
                    event.fail("busy") if event.version == 2 else event.ready()

        engine = refitd.Engine(group, instance="a", socket=daemon.socket, device="host")
        engine.register({"w": engine_region})
        thread = threading.Thread(target=serve)
        thread.start()
        source = refitd.empty((4,), "float32", like="torch")
        callback = RefitCallback(
            group, tolerate=tolerate, shards=lambda model: {"w": source}, socket=daemon.socket, device="host"
        )
        try:
            transformers.Trainer(model_of("llama"), arguments(tmp_path), train_dataset=data(), callbacks=[callback]).train()
            return callback.result.version
        finally:
            callback.close()
            engine.close()
            thread.join()

    with pytest.raises(refitd.UpdateAborted, match="busy"):
        run("fails", 0)
    with pytest.warns(UserWarning, match="version 2 was not installed"):
        assert run("tolerated", 1) == 3


def test_models_without_a_checkpoint_in_place_are_refused_by_name():
    model = model_of("moe")
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.mlp.experts.gate_up_proj"):
            parameter.data.zero_()
    with pytest.raises(refitd.Unimplemented, match="layers.1.mlp.experts.0.gate_proj.weight.* equal to several") as raised:
        checkpoint_tensors(model)
    assert raised.value.culprit == "tensor 'model.layers.1.mlp.experts.0.gate_proj.weight'"
    with pytest.raises(refitd.InvalidArgument, match="every is 0"):
        RefitCallback("g", every=0)


def test_grpo_of_trl_refits_each_step(daemon, tmp_path):
    trl = pytest.importorskip("trl", reason="in the environment 2.11.0-trainers")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    model = model_of("llama")
    model.save_pretrained(tmp_path / "begin")
    engine = Engine(tmp_path / "begin", None)
    callback = RefitCallback("grpo", socket=daemon.socket, device="host")
    options = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
        learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False,
    )  # fmt: skip
    with refitd.Trainer("grpo", socket=daemon.socket, device="host"):
        pass
    with refitd.EngineLoop(engine, group="grpo", instance="a", names=engine.names, clean=False, socket=daemon.socket) as loop:
        trl.GRPOTrainer(
            model=model, args=options, processing_class=tokenizer, callbacks=[callback],
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"] * 4}),
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        ).train()  # fmt: skip
        assert loop.wait(2, 60) == 2
    model.save_pretrained(tmp_path / "end")
    assert engine.tensors_unlike(tmp_path / "end") == [] and engine.tensors_unlike(tmp_path / "begin")


def test_a_callback_that_was_added_after_training_began_says_so():
    with pytest.raises(refitd.FailedPrecondition, match="after training began"):
        RefitCallback("policy").on_step_end(None, transformers.TrainerState(global_step=1), None)
