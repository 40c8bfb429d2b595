"""Memory that can be exported takes the place of memory that can't, as vLLM's sleep mode has. Needs no GPU: the driver is made up."""

import ctypes
import os
import sys
import threading
import types
import unittest
from unittest import mock

import refitd
from refitd.integrations.vllm import versions as sleep_memory
from refitd.layout import devices, cuda

SIZE = 2 << 20
POSIX_DESCRIPTOR = 1


class MadeUpDriver(cuda.Driver):
    """The driver's virtual memory: handles of memory, and addresses beneath which it is mapped. `fails_at`: the number of the call that fails."""

    def __init__(self):
        self._lock, self._contexts = threading.Lock(), {0: ctypes.c_void_p()}
        self.memories = {}  # by handle: bytes, whether it can be exported
        self.ranges = {}  # by address: size, handle or None, whether the device may use it
        self.calls = []
        self.fails_at = None
        self.last_handle = 100

    def create(self, exportable, content=b""):
        self.last_handle += 1
        self.memories[self.last_handle] = [content.ljust(SIZE, b"?"), exportable]
        return self.last_handle

    def mapped(self, base, handle):
        self.ranges[base] = [SIZE, handle, True]

    def content(self, base):
        size, handle, usable = self.ranges[base]
        assert usable
        return self.memories[handle][0].rstrip(b"?")

    def _call(self, name, *arguments):
        values = [getattr(a, "_obj", a) for a in arguments]
        if self.fails_at == len(self.calls):
            self.calls.append(name)
            raise refitd.FailedPrecondition(f"{name}: out of memory")
        self.calls.append(name)
        getattr(self, f"_{name}")(*values)

    def _cuCtxPushCurrent_v2(self, context):
        pass

    _cuCtxPopCurrent_v2 = _cuCtxPushCurrent_v2

    def _cuCtxSynchronize(self):
        pass

    def _cuInit(self, flags):
        assert flags.value == 0

    def _cuDeviceGet(self, device, index):
        device.value = index.value

    def _cuDeviceGetUuid_v2(self, raw, device):
        raw[:] = range(device.value, device.value + 16)

    def _cuMemCreate(self, handle, size, wanted, flags):
        assert (size.value, wanted.type, wanted.location.type, wanted.location.id) == (SIZE, 1, 1, 0)
        handle.value = self.create(wanted.handle_types == POSIX_DESCRIPTOR)

    def _cuMemAddressReserve(self, address, size, alignment, wish, flags):
        address.value = max(self.ranges, default=0) + SIZE
        self.ranges[address.value] = [size.value, None, False]

    def _cuMemAddressFree(self, address, size):
        assert self.ranges.pop(address.value) == [size.value, None, False]

    def _cuMemMap(self, address, size, offset, handle, flags):
        found = self.ranges[address.value]
        assert found == [size.value, None, False] and handle.value in self.memories
        found[1] = handle.value

    def _cuMemUnmap(self, address, size):
        found = self.ranges[address.value]
        assert found[0] == size.value and found[1] is not None
        found[1:] = [None, False]

    def _cuMemSetAccess(self, address, size, access, count):
        assert (access.location.type, access.location.id, access.flags, count.value) == (1, 0, 3, 1)
        assert self.ranges[address.value][1] is not None
        self.ranges[address.value][2] = True

    def _cuMemcpyDtoD_v2(self, to, source, size):
        (_, into, may_write), (_, of, may_read) = self.ranges[to.value], self.ranges[source.value]
        assert may_write and may_read and size.value == SIZE
        self.memories[into][0] = self.memories[of][0]

    def _cuMemRelease(self, handle):
        assert all(found[1] != handle.value for found in self.ranges.values()), "it is mapped"
        del self.memories[handle.value]

    def export(self, base):
        if not self.memories[self.ranges[base][1]][1]:
            raise refitd.FailedPrecondition("cuMemExportToShareableHandle: invalid argument")
        return os.open(os.devnull, os.O_RDONLY)


class MakeExportableTest(unittest.TestCase):
    base = 1 << 30

    def setUp(self):
        self.driver = MadeUpDriver()
        self.handle = self.driver.create(False, b"weights")
        self.driver.mapped(self.base, self.handle)

    def test_address_and_bytes_stay_and_the_old_memory_goes(self):
        self.assertFalse(self.driver.exports(self.base))
        made = self.driver.make_exportable(0, self.base, SIZE, self.handle)
        self.assertTrue(self.driver.exports(self.base))
        self.assertEqual(self.driver.content(self.base), b"weights")
        self.assertEqual((list(self.driver.memories), list(self.driver.ranges)), ([made], [self.base]))

    def test_whatever_call_fails_the_old_memory_is_in_its_place(self):
        self.driver.make_exportable(0, self.base, SIZE, self.handle)
        calls = list(self.driver.calls)
        # Calls that give back what a call before took do not fail.
        gives_back = [i for i, name in enumerate(calls) if name in ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")]
        failed = 0
        for number in range(len(calls)):
            self.setUp()
            if number in gives_back and calls[number + 1 : number + 2] != ["cuMemMap"]:  # but for the one that unmaps the old memory
                continue
            self.driver.fails_at = number
            with self.assertRaises(refitd.FailedPrecondition, msg=calls[number]):
                self.driver.make_exportable(0, self.base, SIZE, self.handle)
            self.assertEqual(self.driver.content(self.base), b"weights", calls[number])
            self.assertEqual((list(self.driver.memories), list(self.driver.ranges)), ([self.handle], [self.base]), calls[number])
            failed += 1
        self.assertEqual(failed, 9, calls)

    def test_old_memory_that_is_not_released_does_not_keep_the_new_from_its_place(self):
        self.driver.fails_at = 11
        made = self.driver.make_exportable(0, self.base, SIZE, self.handle)
        self.assertEqual(self.driver.calls[11:], ["cuMemRelease"])
        self.assertEqual(self.driver.ranges, {self.base: [SIZE, made, True]})


class SleepModeTest(unittest.TestCase):
    """The allocations of vLLM's allocator, as its module has them."""

    def setUp(self):
        self.driver = MadeUpDriver()
        self.kept = []
        self.entries = {}
        allocator = types.SimpleNamespace(pointer_to_data=self.entries)
        module = types.SimpleNamespace(CuMemAllocator=types.SimpleNamespace(instance=allocator))
        for patch in (mock.patch.dict(sys.modules, {"vllm.device_allocator.cumem": module}), mock.patch.object(cuda, "driver", lambda: self.driver)):
            patch.start()
            self.addCleanup(patch.stop)

    def allocate(self, base, tag, exportable=False, asleep=False, **more):
        handle = ctypes.c_uint64(self.driver.create(exportable, tag.encode()))
        self.kept.append(handle)
        if not asleep:
            self.driver.mapped(base, handle.value)
        where = ctypes.addressof(handle)
        self.entries[base] = types.SimpleNamespace(handle=(0, SIZE, base, where), tag=tag, is_asleep=asleep, **more)
        return handle

    def test_weights_become_exportable_and_vllm_knows_the_new_handles(self):
        weights = [self.allocate(base << 30, "weights") for base in (1, 2)]
        ready = self.allocate(3 << 30, "weights", exportable=True)
        cache = self.allocate(4 << 30, "kv_cache")
        sleeping = self.allocate(5 << 30, "weights", asleep=True)
        before = [handle.value for handle in (*weights, ready, cache, sleeping)]
        self.assertEqual(sleep_memory.make_exportable("cuda"), 2 * SIZE)
        for base, handle in zip((1 << 30, 2 << 30), weights):
            self.assertEqual((self.driver.ranges[base][1], self.driver.content(base)), (handle.value, b"weights"))
            self.assertTrue(self.driver.exports(base))
        self.assertEqual([handle.value for handle in (ready, cache, sleeping)], before[2:])
        self.assertNotIn(before[0], self.driver.memories)
        self.assertEqual(sleep_memory.make_exportable("cuda"), 0)

    def test_a_failure_leaves_the_handle_that_is_in_place(self):
        handle = self.allocate(1 << 30, "weights")
        before = handle.value
        self.driver.fails_at = len(self.driver.calls) + 1
        with self.assertRaises(refitd.FailedPrecondition):
            sleep_memory.make_exportable("cuda")
        self.assertEqual((handle.value, self.driver.ranges[1 << 30][1]), (before, before))

    def test_nothing_is_done_without_sleep_mode(self):
        sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.instance = None
        self.assertEqual(sleep_memory.make_exportable("cuda"), 0)
        self.assertEqual(sleep_memory.make_exportable("cpu"), 0)
        self.assertEqual(self.driver.calls, [])


class AnyOfTest(unittest.TestCase):
    """The device that a rank names which holds nothing."""

    def test_the_host_a_gpu_that_torch_does_not_use_and_a_kind_that_there_is_not(self):
        self.assertEqual(devices.any_of("cpu"), "host")
        with mock.patch.object(cuda, "driver", MadeUpDriver), mock.patch.object(cuda.KIND, "current", lambda used: None):
            self.assertEqual(devices.any_of("cuda"), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")
            blind = MadeUpDriver()
            blind.fails_at = 1
            with mock.patch.object(cuda, "driver", lambda: blind), self.assertRaisesRegex(refitd.FailedPrecondition, "sees no GPU.*cuDeviceGet"):
                devices.any_of("cuda")
        with mock.patch.object(cuda.KIND, "current", lambda used: "GPU-1"):
            self.assertEqual(devices.any_of("cuda"), "GPU-1")
        with self.assertRaisesRegex(refitd.InvalidArgument, "device type 'xpu': 'cpu' and 'cuda' are possible"):
            devices.any_of("xpu")


if __name__ == "__main__":
    unittest.main()
