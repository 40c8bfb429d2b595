"""How boxes on a GPU are cut at the driver's allocations, against every element's address. Needs no GPU: the driver is made up."""

import random
import unittest
from contextlib import nullcontext
from unittest import mock

import refitd
from refitd.layout import cuda

UUID = "GPU-1"


class MadeUpDriver:
    """Allocations side by side, as an expandable segment has them."""

    def __init__(self, base, sizes, legacy=False):
        self.allocations = []
        for nbytes in sizes:
            self.allocations.append(cuda.Allocation(base, nbytes, legacy))
            base += nbytes
        self.asked = 0

    def current(self, index):
        return nullcontext()

    def allocation(self, pointer):
        self.asked += 1
        for found in self.allocations:
            if found.base <= pointer < found.base + found.nbytes:
                return found
        raise refitd.FailedPrecondition(f"no memory at {pointer:#x}")


class Resolver(cuda.CudaResolver):
    def __init__(self, itemsize):
        super().__init__("trainer rank 0", "trainer", None, UUID, [itemsize], {})

    def _new_region(self, allocation):
        return allocation  # stands for its region


def addresses(offset, extent, strides, first, itemsize):
    """Address of each element by its index in the tensor."""
    found = {(): first}
    for at, n, stride in zip(offset, extent, strides):
        found = {index + (at + i,): address + i * stride * itemsize for index, address in found.items() for i in range(n)}
    return found


class CutTest(unittest.TestCase):
    def cut(self, driver, box, itemsize):
        with mock.patch.object(cuda, "driver", lambda: driver):
            return Resolver(itemsize).pieces(box, "tensor 'w'")

    def test_every_element_is_in_one_piece_within_one_allocation_at_its_own_address(self):
        for seed in range(300):
            rng = random.Random(seed)
            itemsize = rng.choice((1, 2, 4, 8))
            rank = rng.randint(0, 4)
            extent = tuple(rng.randint(1, 6) for _ in range(rank))
            strides, step = [0] * rank, 1
            for dim in rng.sample(range(rank), rank):  # dimensions in any order in memory, with gaps
                strides[dim] = step
                step *= extent[dim] + rng.choice((0, 0, 1, 3))
            offset = tuple(rng.randint(0, 3) for _ in range(rank))
            nbytes = (1 + sum((n - 1) * s for n, s in zip(extent, strides))) * itemsize
            base = 8192
            lead = rng.randint(0, 10) * itemsize
            sizes = []
            while sum(sizes) < lead + nbytes:
                sizes.append(rng.randint(1, 40) * 8)
            memory = refitd.CudaMemory(UUID, base + lead, nbytes)
            box = refitd.Box(0, offset, extent, tuple(strides), memory)
            pieces = self.cut(MadeUpDriver(base, sizes), box, itemsize)
            got = {}
            for piece in pieces:
                for index, at in addresses(piece.offset, piece.extent, piece.strides, piece.byte_offset, itemsize).items():
                    self.assertNotIn(index, got, seed)
                    self.assertTrue(0 <= at and at + itemsize <= piece.region.nbytes, (seed, piece))
                    got[index] = piece.region.base + at
            self.assertEqual(got, addresses(offset, extent, strides, base + lead, itemsize), seed)

    def test_a_box_in_one_allocation_stays_one_piece_and_the_driver_is_asked_once(self):
        driver = MadeUpDriver(4096, [1 << 20], legacy=True)
        memory = refitd.CudaMemory(UUID, 4096 + 512, 1024)
        resolver = Resolver(4)
        with mock.patch.object(cuda, "driver", lambda: driver):
            for _ in range(3):
                (piece,) = resolver.pieces(refitd.Box(0, (0, 0), (16, 16), (16, 1), memory), "tensor 'w'")
        self.assertEqual((piece.byte_offset, piece.extent, driver.asked), (512, (16, 16), 1))

    def test_rows_of_an_expandable_segment_are_cut_into_few_pieces(self):
        driver = MadeUpDriver(1 << 21, [1 << 21] * 8)
        memory = refitd.CudaMemory(UUID, (1 << 21) + 512, 5 << 20)
        pieces = self.cut(driver, refitd.Box(0, (0, 0), (1280, 2048), (2048, 1), memory), 2)
        self.assertLessEqual(len(pieces), 3 + 2 * 2)

    def test_what_is_wrong_names_the_tensor(self):
        good = MadeUpDriver(4096, [4096], legacy=True)
        for memory, message in (
            (refitd.CudaMemory("GPU-2", 4096, 64), "tensor 'w' of trainer rank 0 is on GPU-2, but the trainer attached with device GPU-1"),
            (refitd.CudaMemory(UUID, 1 << 30, 64), "tensor 'w' of trainer rank 0: no memory"),
            (refitd.CudaMemory(UUID, 8192 - 32, 64), "tensor 'w' of trainer rank 0: bytes .* beyond the block"),
        ):
            with self.assertRaisesRegex(refitd.Error, message) as caught:
                self.cut(good, refitd.Box(0, (0,), (64,), (1,), memory), 1)
            self.assertEqual(caught.exception.culprit, "tensor 'w'")

    def test_without_a_driver_the_error_names_the_library(self):
        with mock.patch.dict("os.environ", REFITD_CUDA_LIBRARY="/nonexistent/libcuda.so"):
            with self.assertRaisesRegex(refitd.Unavailable, "/nonexistent/libcuda.so"):
                cuda.Driver()


if __name__ == "__main__":
    unittest.main()
