"""verl's workers for tests, on machines without a GPU: what Ray's processes import. See verl_cpu."""

import asyncio
import os

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica


class Adapter(BaseRollout):
    """Keeps what it is given, and fails after `fail_after` tensors, if that is set, in the way of `fail`."""

    replica_rank = 0

    def __init__(self, config, model_config):
        super().__init__(config, model_config, device_mesh=None)
        self.held, self.fail_after, self.fail = {}, None, None

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, wire_format="named_tensors", **options):
        assert wire_format == "named_tensors"
        self.held = {}
        async for name, tensor in weights:
            self.held[name] = tensor  # kept, as verl's adapter of SGLang does
            if len(self.held) == self.fail_after:
                if self.fail == "exit":
                    os._exit(1)
                raise RuntimeError("the adapter failed")


class Rollout(CheckpointEngineWorker):
    """`server_adapter`: as above, or with `real` the one that verl's registry has."""

    def __init__(self, rollout_config, model_config, real=False):
        adapter = None if real else Adapter(rollout_config, model_config)
        super().__init__(rollout_config, model_config, adapter)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self):
        return self.server_adapter.held

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_next(self, after, how):
        self.server_adapter.fail_after, self.server_adapter.fail = after, how


class Actor(ActorRolloutRefWorker):
    """verl's own actor. It would ask for a second backend beside gloo."""

    def __init__(self, *arguments, **options):
        torch.distributed.init_process_group("gloo")
        super().__init__(*arguments, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed):
        """Puts other values into the parameters, as a step of training would."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                parameter.to_local().normal_(std=0.1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_by_verl(self):
        """The tensors that verl's own checkpoint engine for one process delivers, to an adapter like that of the rollouts."""
        own = CheckpointEngineRegistry.new("naive", bucket_size=0)
        own.send_weights(self.actor.engine.get_per_tensor_param()[0])
        return {name: tensor.clone() for name, tensor in own.receive_weights()}


class Replica(RolloutReplica):
    """One rollout worker. Notes what the manager asks for."""

    def __init__(self, worker, **options):
        super().__init__(**options)
        self.workers, self.asked = [worker], []

    async def abort_all_requests(self, reject_request=False):
        self.asked.append("abort")

    async def release_kv_cache(self):
        self.asked.append("release")

    async def resume_kv_cache(self):
        self.asked.append("restore")

    async def resume_generation(self):
        self.asked.append("resume")

    async def launch_servers(self):
        raise NotImplementedError

    def get_ray_class_with_init_args(self):
        raise NotImplementedError


@ray.remote
class Server:
    """Stands for vLLM's engine, which verl's adapter calls. The model's parameters are `held`: refitd writes them in place, or verl's own
    receiver fills them from the buckets of verl's own sender."""

    def __init__(self, specs, bucket_path):
        import refitd

        self.held = {name: refitd.empty(shape, dtype, like="torch") for name, (shape, dtype) in specs.items()}
        self.rank, self.bucket_path, self.calls, self.steps = None, bucket_path, [], None

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(method)
        await asyncio.to_thread(getattr(self, method), *args, **(kwargs or {}))

    def update_weights_from_ipc(self, use_shm):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        def load(weights, is_last):
            for name, tensor in weights:
                self.held[name].copy_(tensor)

        receiver = BucketedWeightReceiver(zmq_handle=self.bucket_path, device=torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(load)

    def init_weight_transfer_engine(self, init_info):
        from refitd.serving.rank import Rank
        from refitd.serving import Settings
        from support import delivery_of

        self.dirty = init_info.pop("dirty")
        settings = Settings.of(init_info).checked()
        if self.rank is None:
            self.rank = Rank(torch.device("cpu"), client="test", clean=False, decide=lambda _: delivery_of(self.held), process=lambda _: None)
        self.rank.attach(settings, settings.instance, 0, 1, dirty=self.dirty)

    def start_weight_update(self):
        pass

    def update_weights(self, update_info):
        try:
            self.rank.take(None, update_info["wait_seconds"])
        finally:
            assert update_info["detach"]
            self.rank.detach()

    def finish_weight_update(self):
        pass

    async def clear_kv_cache(self):
        self.calls.append("clear_kv_cache")

    async def set_global_steps(self, steps):
        self.steps = steps

    def state(self):
        version = None if self.rank is None else self.rank.version
        return self.held, self.calls, self.steps, version
