"""Forward proof: whether a module computes with the memory that is written (refitd.serving.proof). Needs torch, and no daemon but where said."""

import copy
import tempfile
import unittest
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional as F

import refitd
from refitd.errors import FailedPrecondition
from refitd.layout import shards
from refitd.layout.memory import digest
from refitd.serving import proof
from support import DaemonTest

HIDDEN, WIDE, VOCABULARY, EXPERTS, CHOSEN = 16, 24, 200, 8, 2


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Experts(nn.Module):
    """Fused experts, as transformers' from version 5 on."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) * 0.2)

    def weights(self, e):
        return self.up[e], self.down[e]

    def forward(self, x, index, share):
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, place = torch.where(index == e)
            up, down = self.weights(e)
            out.index_add_(0, token, share[token, place, None] * F.linear(F.silu(F.linear(x[token], up)), down))
        return out


class Mixture(nn.Module):
    def __init__(self, experts=Experts):
        super().__init__()
        self.top_k = CHOSEN
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.bias = nn.Parameter(torch.zeros(EXPERTS))  # by which experts are chosen, and not mixed
        self.experts = experts()

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        index = (scores + self.bias).topk(CHOSEN).indices
        return self.experts(x, index, scores.gather(1, index))


class Layer(nn.Module):
    def __init__(self, mlp=None):
        super().__init__()
        self.norm = Norm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = mlp or nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.SiLU(), nn.Linear(WIDE, HIDDEN))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.softmax(q @ k.T, -1) @ v)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, *mlps, tied=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(mlp() if mlp else None) for mlp in mlps or (None, None))
        self.norm = Norm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Keeps(nn.Linear):
    """A linear layer that computes with a copy of its weight in another dtype, made at its first forward, by what `key` says."""

    def key(self):
        return None

    def forward(self, x):
        if getattr(self, "kept", (0, 0))[0] != (self.key(),):
            self.kept = (self.key(),), self.weight.detach().double()
        return F.linear(x.double(), self.kept[1]).to(x.dtype)


class KeepsByAddress(Keeps):
    def key(self):
        return self.weight.data_ptr()


class KeepsByVersion(Keeps):
    def key(self):
        return self.weight.data_ptr(), self.weight._version


class KeepsOneExpert(Experts):
    def weights(self, e):
        if e != 5:
            return super().weights(e)
        if not hasattr(self, "kept"):
            self.kept = [t.detach().clone() for t in super().weights(5)]
        return self.kept


def ids(count=proof.TOKENS):
    return proof.token_ids(VOCABULARY, count, "cpu")


def prove(model, names=None, **options):
    names = names or [name for name, _ in model.named_parameters()]
    return proof.Prover(model, proof.Probe(lambda: model(ids()), **options), names).perturb()


class Perturbation(unittest.TestCase):
    def test_every_parameter_of_plain_layers_is_proved_and_put_back(self):
        for model in (Model(), Model(None, Mixture), Model(Mixture, Mixture).to(torch.bfloat16), Model(tied=True)):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            found = prove(model)
            self.assertEqual((found.failed, found.unproved), ({}, {}))
            self.assertEqual(set(found.proved) | {"head.weight"}, set(before) | {"head.weight"})
            self.assertTrue(all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()))

    def test_a_copy_made_at_the_first_forward_is_declared_direct(self):
        for kind, fails in ((Keeps, True), (KeepsByAddress, True), (KeepsByVersion, False)):
            model = Model()
            model.layers[1].out = kind(HIDDEN, HIDDEN, bias=False)
            found = prove(model)
            self.assertEqual(set(found.failed), {"layers.1.out.weight"} if fails else set(), kind)
            if fails:
                with self.assertRaisesRegex(FailedPrecondition, "layers.1.out.weight.*is not read") as caught:
                    found.check(require=False)
                self.assertEqual(caught.exception.culprit, "parameter 'layers.1.out.weight'")

    def test_a_tied_head_with_a_copy_of_its_own_is_declared_direct(self):
        model = Model(tied=True)
        model.head = Keeps(HIDDEN, VOCABULARY, bias=False)
        model.head.weight = model.embed.weight
        self.assertEqual(set(prove(model).failed), {"head.weight"})

    def test_one_expert_with_a_copy_is_declared_direct(self):
        found = prove(Model(None, lambda: Mixture(KeepsOneExpert)))
        self.assertEqual(set(found.failed), {"layers.1.mlp.experts.up", "layers.1.mlp.experts.down"})
        self.assertRegex(found.failed["layers.1.mlp.experts.up"], "of experts 5 is not read")

    def test_experts_that_are_modules_of_their_own_all_get_tokens(self):
        class Lists(nn.ModuleList):
            def __init__(self):
                super().__init__(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))

        class Block(Mixture):
            def forward(self, x):
                index = self.gate(x).topk(CHOSEN).indices
                out = torch.zeros_like(x)
                for e, expert in enumerate(self.experts):
                    token, _ = torch.where(index == e)
                    if len(token):
                        out.index_add_(0, token, expert(x[token]))
                return out

        model = Model(lambda: Block(Lists))
        with torch.no_grad():
            model.layers[0].mlp.gate.weight[1:] = 0  # by itself most experts get no token
        found = prove(model, [name for name, _ in model.named_parameters() if "mlp.bias" not in name])
        self.assertEqual((found.failed, found.unproved), ({}, {}))

    def test_what_nothing_reads_or_nothing_runs_is_named(self):
        model = Model()
        model.layers[0].unread = nn.Parameter(torch.ones(3))
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        found = prove(model, ["layers.0.unread", "steps", "norm.weight"])
        self.assertEqual((found.proved, set(found.failed), set(found.unproved)), (["norm.weight"], {"layers.0.unread"}, {"steps"}))
        with self.assertRaisesRegex(FailedPrecondition, "1 parameters are unproved: 'steps'"):
            proof.Proof(unproved=found.unproved).check(require=True)
        broken = proof.Prover(model, proof.Probe(lambda: 1 / 0), ["norm.weight"]).perturb()
        self.assertRegex(broken.unproved["norm.weight"], "ZeroDivisionError")

    def test_another_way_of_running_the_model_reads_a_copy(self):
        """Compiled code and captured graphs may read other memory than the model's own code: what is not shown to read all is unproved by name."""
        model = Model()
        kept = copy.deepcopy(model)
        kept.embed, kept.norm = model.embed, model.norm  # all else is a copy
        names = [name for name, _ in model.named_parameters()]
        ways = {"same code": lambda: model(ids()), "code with a copy": lambda: kept(ids()), "broken": lambda: 1 / 0}
        found = proof.Prover(model, proof.Probe(lambda: model(ids()), ways=ways, not_run={"graphs": "are not replayed"}), names).perturb()
        self.assertEqual((found.proved, found.ways, found.failed), (sorted(names), ["same code"], {}))
        self.assertEqual(set(found.unproved), {"code with a copy", "broken", "graphs"})
        self.assertRegex(found.unproved["code with a copy"], "shows nothing of [0-9]+ parameters, such as 'head.weight'")
        with self.assertRaisesRegex(FailedPrecondition, "are unproved: 'graphs' are not replayed"):
            found.check(require=True)

    def test_what_layers_change_in_an_argument_is_as_it_was_at_each_run(self):
        """A batch that layers hand on to each other, as SGLang's, is kept as each layer got it."""

        class Batch:
            residual = None

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
                self.scale = nn.Parameter(torch.ones(HIDDEN))

            def forward(self, x, batch):
                before, batch.residual = batch.residual, x
                return self.inner(x) * self.scale + (0 if before is None else before)

        class Stack(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(Layer() for _ in range(3))

            def forward(self, x):
                batch = Batch()
                for layer in self.layers:
                    x = layer(x, batch)
                return x

        model, x = Stack(), torch.randn(proof.TOKENS, HIDDEN)
        probe = proof.Probe(lambda: model(x), keep=copy.copy)
        prover = proof.Prover(model, probe, [name for name, _ in model.named_parameters()])
        self.assertIsNot(prover._got[id(model.layers[1])][0][1].residual, prover._got[id(model.layers[2])][0][1].residual)
        found = prover.perturb()
        self.assertEqual((len(found.proved), found.failed, found.unproved), (6, {}, {}))
        self.assertIsNotNone(prover._got[id(model.layers[1])][0][1].residual)

    def test_one_rank_after_the_other_changes_its_shard(self):
        """A sum over ranks changes with any rank's shard: another rank's must not stand for this one's."""
        model = Model()
        runs = []
        handle = model.layers[0].out.register_forward_hook(lambda *_: runs.append(model.layers[0].out.weight.sum().item()))
        found = proof.Prover(model, proof.Probe(lambda: model(ids()), turn=(1, 3)), ["layers.0.out.weight"]).perturb()
        handle.remove()
        self.assertEqual(found.proved, ["layers.0.out.weight"])
        self.assertEqual(len(runs), 1 + 2 + 3)  # of the whole model, twice for the noise, one for each rank
        self.assertEqual([value != runs[0] for value in runs], [False, False, False, False, True, False])

    def test_the_work_grows_with_layers_and_not_with_parameters_times_forwards(self):
        count = []
        for layers in (2, 4, 8):
            model = Model(*[None] * layers)
            runs = [0]
            handles = [m.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1)) for m in model.modules() if not list(m.children())]
            prove(model)
            count.append(runs[0])
        self.assertLess(count[2] - count[1], 2.2 * (count[1] - count[0]))

    def test_digests_tell_swaps_and_changes(self):
        tensor = torch.arange(1001, dtype=torch.int32).view(7, 143)
        found = {digest(tensor)}
        for change in (lambda t: t.flip(0), lambda t: t.flip(1), lambda t: t.roll(2, 1), lambda t: t + (t == 1000), lambda t: t[:, 1:]):
            found.add(digest(change(tensor.clone())))
        self.assertEqual(len(found), 6)
        self.assertEqual(digest(tensor), digest(tensor.t().contiguous().t()))

    def test_a_word_and_its_complement_have_different_digests(self):
        for word in (0, 1, 1 << 40, -(1 << 62), 0x0123456789ABCDEF):
            tensor = torch.tensor([7, word, 7], dtype=torch.int64)
            self.assertNotEqual(digest(tensor), digest(tensor ^ torch.tensor([0, -1, 0])), word)
        zeros = torch.zeros(64, dtype=torch.uint8)
        self.assertNotEqual(digest(zeros), digest(~zeros))


class Deliveries(unittest.TestCase):
    def both(self, model, load, names=None):
        specs = [refitd.TensorSpec(name, "float32", tuple(t.shape)) for name, t in model.state_dict().items()]
        layout = shards.collect(model, rank=0)
        prover = proof.Prover(model, proof.Probe(lambda: model(ids())), names or [spec.name for spec in specs])
        prover.perturb()
        for seed in (1, 2):
            proof.deliver(layout.tensors, layout.boxes, lambda spec: proof.values(spec, seed, "cpu"))
        ours = prover.states()
        load({spec.name: proof.values(spec, 2, "cpu") for spec in specs})
        prover.compare_deliveries(ours, prover.states())
        return prover.proof

    def test_both_deliveries_compute_the_same(self):
        model = Model(None, Mixture)
        found = self.both(model, model.load_state_dict)
        self.assertEqual((found.failed, found.unproved), ({}, {}))

    def test_a_kernel_that_reads_another_format_of_the_same_geometry_is_declared_direct(self):
        """As experts that are repacked in place, with shape, strides and dtype as they were: any write changes the output, and only the
        engine's own loader writes what the kernel reads."""

        class Repacked(nn.Linear):
            def forward(self, x):
                return F.linear(x, self.weight.flip(0))

        model = Model()
        model.layers[0].out = Repacked(HIDDEN, HIDDEN, bias=False)

        def load(tensors):
            tensors["layers.0.out.weight"] = tensors["layers.0.out.weight"].flip(0)
            model.load_state_dict(tensors)

        found = self.both(model, load)
        self.assertEqual(set(found.failed), {"layers.0.out"})


class Loops(DaemonTest):
    """refitd.EngineLoop with a proof."""

    def loop(self, model, **options):
        self.trainer(rank=0, world_size=1)
        made = refitd.EngineLoop(model, group=self.group, instance="a", socket=self.daemon.socket, **options)
        self.addCleanup(made.close)
        return made

    def test_a_model_with_a_copy_of_its_own_is_served_and_stale(self):
        model = Model()
        model.layers[0].out = Keeps(HIDDEN, HIDDEN, bias=False)
        with self.assertRaisesRegex(FailedPrecondition, "'layers.0.out.weight'"):
            self.loop(model, probe=lambda: model(ids()))

    def test_a_model_that_is_proved_is_served(self):
        model = Model(None, Mixture)
        loop = self.loop(model, probe=lambda: model(ids()), proof="require")
        self.assertEqual(len(loop.proof.proved), len(model.state_dict()))

    def test_a_model_that_is_not_run_is_unproved_by_name(self):
        loop = self.loop(Model())
        self.assertEqual(set(loop.proof.unproved), set(loop._model.state_dict()))

    def test_an_unproved_model_is_refused_where_a_proof_is_required(self):
        with self.assertRaisesRegex(FailedPrecondition, "unproved: 'embed.weight'"):
            self.loop(Model(), proof="require")


class Logits(unittest.TestCase):
    def test_engines_that_compute_otherwise_after_a_commit_go_on(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = Model(), Model()
            for version in range(6):
                proof.compare_logits(folder, f"g-0of1-cpu-7-{version}", lambda: first(ids()))
                proof.compare_logits(folder, f"g-0of1-cpu-7-{version}", lambda: second(ids()))
            with torch.no_grad():
                second.layers[0].norm.weight[3] += 0.01
            with self.assertRaises(refitd.DataLoss):
                proof.compare_logits(folder, "g-0of1-cpu-7-5", lambda: second(ids()))
            self.assertLessEqual(len(list(Path(folder).iterdir())), proof.KEPT_LOGITS)


if __name__ == "__main__":
    unittest.main()
