"""The calls to vLLM around an update, in their order, on an engine that notes them."""

import asyncio
import logging
import os
import sys
import unittest
from types import ModuleType, SimpleNamespace
from unittest import mock

from refitd.errors import FailedPrecondition, InvalidArgument
from refitd.integrations.vllm import versions
from refitd.integrations.vllm.versions import check_backend
from refitd.integrations.vllm import ServerControls, check_api_servers
from refitd.serving import Settings


class Engine:
    """Notes the calls in the order in which they are sent; answers come only when `answers` is set."""

    def __init__(self):
        self.calls, self.answers = [], asyncio.Event()
        self.engine_core = SimpleNamespace(pause_scheduler_async=lambda mode, clear_cache: self._call("pause", mode, clear_cache))

    async def _call(self, *what):
        self.calls.append(what)
        await self.answers.wait()
        return True

    def pause_generation(self, mode, clear_cache):
        return self._call("pause_generation", mode, clear_cache)

    def resume_generation(self):
        return self._call("resume")

    def finish_weight_update(self):
        return self._call("finish")

    def shutdown_weight_transfer_engine(self):
        return self._call("shutdown")


class Labels(Engine):
    """An engine that labels tokens with their version."""

    def update_weight_version(self, version):
        return self._call("label", version)


async def sent_at_once(engine, call):
    """Makes the call, and returns what it sends before anything is answered."""
    task = asyncio.ensure_future(call)
    for _ in range(10):
        await asyncio.sleep(0)
    sent = list(engine.calls)
    assert not task.done()
    engine.answers.set()
    await task
    assert engine.calls == sent
    return sent


class Calls(unittest.TestCase):
    def run_with(self, kind, use):
        async def run():
            engine = kind()
            controls = ServerControls(engine, asyncio.get_running_loop())
            return await sent_at_once(engine, use(engine, controls))

        return asyncio.run(run())

    def resumed(self, engine, controls):
        controls._unfinished = 7
        return controls._resume()

    def test_the_update_ends_and_has_its_label_before_the_engine_resumes(self):
        self.assertEqual(self.run_with(Labels, self.resumed), [("finish",), ("label", "7"), ("resume",)])
        self.assertEqual(self.run_with(Engine, self.resumed), [("finish",), ("resume",)])

    def test_without_an_update_there_is_nothing_to_end(self):
        self.assertEqual(self.run_with(Labels, lambda engine, controls: controls._resume()), [("resume",)])

    def test_an_update_that_no_resumption_follows_ends_before_the_ranks_detach(self):
        def detached(engine, controls):
            controls._unfinished = 7
            return controls._unregister()

        self.assertEqual(self.run_with(Labels, detached), [("finish",), ("label", "7"), ("shutdown",)])

    def test_an_engine_core_that_wakes_up_stays_paused_where_that_is_asked_for(self):
        class Core:
            def __init__(self):
                self.calls = []

            def resume_scheduler(self):
                self.calls.append("resume")

            def wake_up(self, tags=None):
                self.calls.append(tags)
                self.resume_scheduler()
                return True

        modules = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core")}
        modules["vllm.v1.engine.core"].EngineCore = Core
        with mock.patch.dict(sys.modules, modules):
            versions.let_wake_up_stay_paused()
            versions.let_wake_up_stay_paused()
        core = Core()
        self.assertTrue(core.wake_up([versions.STAY_PAUSED]))
        self.assertEqual(core.calls, [None])
        core.wake_up([versions.STAY_PAUSED, "weights"])
        self.assertEqual(core.calls, [None, ["weights"]])
        core.wake_up()
        self.assertEqual(core.calls, [None, ["weights"], None, "resume"])

    def test_an_engine_core_that_does_not_know_how_to_wake_up_paused_is_told(self):
        versions.check_awake(True)
        versions.check_awake(None)
        with self.assertRaisesRegex(FailedPrecondition, "VLLM_PLUGINS"):
            versions.check_awake(False)

    def test_a_pause_goes_past_the_sleep_of_pause_generation(self):
        self.assertEqual(self.run_with(Engine, lambda engine, controls: versions.pause(engine, "keep")), [("pause", "keep", False)])

        def without_core(engine, controls):
            engine.engine_core = None
            return versions.pause(engine, "wait")

        self.assertEqual(self.run_with(Engine, without_core), [("pause_generation", "wait", False)])

    def test_requests_between_two_updates_have_one_salt_and_their_own_is_a_part_of_it(self):
        sent = []
        client = SimpleNamespace(add_request=lambda request: sent.append(request.cache_salt), add_request_async=lambda request: sent.append(request.cache_salt))
        salts = versions.Salts(client)
        for send, own in ((client.add_request, None), (client.add_request_async, None), (client.add_request, "own")):
            send(SimpleNamespace(cache_salt=own))
        self.assertEqual(sent[0], sent[1])
        self.assertEqual(sent[2], f"{sent[0]}own")
        salts.renew()
        client.add_request(SimpleNamespace(cache_salt=None))
        self.assertNotIn(sent[3], sent[:3])

    def test_two_engines_have_no_salt_in_common(self):
        sent = []
        for _ in range(2):
            client = SimpleNamespace(add_request=lambda request: sent.append(request.cache_salt))
            versions.Salts(client)
            client.add_request(SimpleNamespace(cache_salt=None))
        self.assertNotEqual(*sent)

    def test_salts_are_renewed_before_the_ranks_take_a_version(self):
        class Refits(Engine):
            def __init__(self):
                super().__init__()
                self.answers.set()
                self.engine_core.add_request_async = lambda request: self.calls.append(("add", request.cache_salt))

            def start_weight_update(self):
                return self._call("start")

            def update_weights(self, request):
                self.engine_core.add_request_async(SimpleNamespace(cache_salt=None))
                return self._call("update")

            def reset_encoder_cache(self):
                return self._call("encoder")

        async def run():
            engine = Refits()
            controls = ServerControls(engine, asyncio.get_running_loop(), "version")
            engine.engine_core.add_request_async(SimpleNamespace(cache_salt=None))
            with mock.patch.dict(sys.modules, {"vllm.distributed.weight_transfer.base": SimpleNamespace(WeightTransferUpdateRequest=SimpleNamespace)}):
                await controls._write(1, False)
            return engine.calls

        calls = asyncio.run(run())
        self.assertEqual([name for name, *_ in calls], ["add", "encoder", "add", "start", "update"])
        self.assertNotEqual(calls[0][1], calls[2][1])

    def test_a_server_of_several_api_server_processes_is_refused(self):
        for parallel in (SimpleNamespace(), SimpleNamespace(_api_process_count=1)):
            check_api_servers(SimpleNamespace(parallel_config=parallel))
        with self.assertRaisesRegex(FailedPrecondition, "--api-server-count 1"):
            check_api_servers(SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=2)))

    def test_speculative_decoding_with_weights_of_its_own_is_told(self):
        for method, found in ((None, None), ("ngram", None), ("suffix", None), ("eagle3", "eagle3"), ("draft_model", "draft_model")):
            config = SimpleNamespace(speculative_config=method and SimpleNamespace(method=method))
            self.assertEqual(versions.draft_of(config), found)

    def test_experts_that_are_moved_after_registration_are_refused_by_name(self):
        transfer = SimpleNamespace(backend="refitd")
        stay = SimpleNamespace(enable_eplb=False, eplb_config=SimpleNamespace(num_redundant_experts=0))
        check_backend(SimpleNamespace(parallel_config=stay, weight_transfer_config=transfer))
        for name, parallel in (
            ("enable_eplb", SimpleNamespace(enable_eplb=True)),
            ("num_redundant_experts", SimpleNamespace(enable_eplb=False, eplb_config=SimpleNamespace(num_redundant_experts=2))),
        ):
            with self.assertRaisesRegex(FailedPrecondition, name) as caught:
                check_backend(SimpleNamespace(parallel_config=parallel, weight_transfer_config=transfer))
            self.assertEqual(caught.exception.culprit, name)

    def test_a_cache_by_version_with_a_kv_connector_is_refused_by_name(self):
        config = SimpleNamespace(parallel_config=SimpleNamespace(), weight_transfer_config=SimpleNamespace(backend="refitd"), kv_transfer_config=object())
        check_backend(config, "reset")
        with self.assertRaisesRegex(FailedPrecondition, "kv_transfer_config") as caught:
            check_backend(config, "version")
        self.assertEqual(caught.exception.culprit, "cache")
        check_backend(SimpleNamespace(**{**vars(config), "kv_transfer_config": None}), "version")

    def test_a_draft_that_one_stage_alone_has_is_refused(self):
        transfer, stages = SimpleNamespace(backend="refitd"), SimpleNamespace(pipeline_parallel_size=2)
        with self.assertRaisesRegex(FailedPrecondition, "pipeline_parallel_size 2") as caught:
            check_backend(SimpleNamespace(parallel_config=stages, weight_transfer_config=transfer, speculative_config=SimpleNamespace(method="eagle")))
        self.assertEqual(caught.exception.culprit, "speculative_config")
        check_backend(SimpleNamespace(parallel_config=stages, weight_transfer_config=transfer, speculative_config=SimpleNamespace(method="ngram")))


class ServerSettings(unittest.TestCase):
    """Settings that contradict each other."""

    def test_a_restart_needs_an_arena_and_no_proof_with_random_weights(self):
        for arena in ("device", "host"):
            self.assertTrue(Settings.of({"restore": "on", "arena": arena}, {}).restores)
        for other in ({}, {"arena": "device", "proof": "require"}):
            with self.assertRaisesRegex(InvalidArgument, "restore") as caught:
                Settings.of({"restore": "on", **other}, {})
            self.assertEqual(caught.exception.culprit, "restore")

    def test_a_server_without_a_name_leaves_nothing_that_no_other_could_take(self):
        environment = {"REFITD_GROUP": "g", "REFITD_ARENA": "device", "REFITD_RESTORE": "on"}
        for instance, restores in (("", False), ("a", True)):
            with mock.patch.dict(os.environ, {**environment, "REFITD_INSTANCE": instance}):
                self.assertEqual(Settings.of_server(logging.getLogger()).restores, restores)


if __name__ == "__main__":
    unittest.main()
