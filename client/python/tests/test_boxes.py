"""Boxes of ranges and of strided views, against the elements themselves."""

import random
from math import prod

import pytest

numpy = pytest.importorskip("numpy")

from refitd.layout import NotBoxes, first_overlap, range_boxes, row_major, view_boxes  # noqa: E402


def random_shape(rng, most_dims=4, most=5):
    return tuple(rng.randint(1, most) for _ in range(rng.randint(1, most_dims)))


def elements(shape, offset, extent):
    """The row-major indices of a box, flattened."""
    index = numpy.arange(prod(shape)).reshape(shape)
    return index[tuple(slice(o, o + e) for o, e in zip(offset, extent))].reshape(-1)


@pytest.mark.parametrize("seed", range(300))
def test_boxes_of_a_range_are_its_elements_in_order(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    start = rng.randint(0, prod(shape))
    count = rng.randint(0, prod(shape) - start)
    boxes = range_boxes(shape, start, count)
    found = [index for box in boxes for index in elements(shape, *box)]
    assert found == list(range(start, start + count))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_scalar_is_a_range_of_one():
    assert range_boxes((), 0, 1) == [((), ())]
    assert range_boxes((), 0, 0) == []


def test_a_range_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 7\)"):
        range_boxes((2, 3), 3, 4)


def random_view(rng, array):
    """A view of `array` by a few random operations that loaders use."""
    for _ in range(rng.randint(0, 4)):
        if array.ndim == 0:
            return array
        dim = rng.randrange(array.ndim)
        n = array.shape[dim]
        operation = rng.choice(["narrow", "select", "transpose", "split", "merge", "unsqueeze", "step"])
        if operation == "narrow":
            begin = rng.randint(0, n - 1)
            array = numpy.moveaxis(numpy.moveaxis(array, dim, 0)[begin : rng.randint(begin + 1, n)], 0, dim)
        elif operation == "select" and array.ndim > 1:
            array = numpy.moveaxis(array, dim, 0)[rng.randrange(n)]
        elif operation == "transpose":
            array = array.swapaxes(dim, rng.randrange(array.ndim))
        elif operation == "split" and n % 2 == 0:
            array = reshaped(array, array.shape[:dim] + (2, n // 2) + array.shape[dim + 1 :])
        elif operation == "merge" and dim:
            array = reshaped(array, array.shape[: dim - 1] + (-1,) + array.shape[dim + 1 :])
        elif operation == "unsqueeze":
            array = numpy.expand_dims(array, dim)
        elif operation == "step" and rng.random() < 0.3:
            array = numpy.moveaxis(numpy.moveaxis(array, dim, 0)[rng.randrange(2) : n : 2], 0, dim)
        if array.size == 0:
            return array
    return array


def reshaped(array, shape):
    """A view of the array with this shape; the unchanged array where there can be no such view."""
    view = array.view()
    try:
        if -1 in shape:
            shape = tuple(array.size // -prod(shape) if n == -1 else n for n in shape)
        view.shape = shape
    except AttributeError:
        return array
    return view


def check_view(seed):
    """True if the boxes of a random view copy what the view copies; False if they were refused."""
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4)))
    whole = numpy.arange(prod(shape)).reshape(shape)
    view = random_view(rng, whole)
    # The other memory has the view's shape, with its dimensions in any order and gaps between them.
    order = rng.sample(range(view.ndim), view.ndim)
    room = numpy.full([view.shape[d] + rng.randint(0, 2) for d in order], -1)
    inside = tuple(slice(0, view.shape[d]) for d in order)
    other = room[inside].transpose(numpy.argsort(order))
    expected = room.copy()
    expected[inside] = view.transpose(order)
    offset = (view.ctypes.data - whole.ctypes.data) // 8 if view.size else 0
    strides = [s // 8 for s in view.strides]
    try:
        boxes = view_boxes(shape, offset, view.shape, strides, [s // 8 for s in other.strides])
    except NotBoxes as error:
        assert "crosses rows" in str(error), (seed, error)
        return False
    flat = room.reshape(-1)
    for box in boxes:
        for index in numpy.ndindex(*box.extent):
            at = box.first + sum(i * s for i, s in zip(index, box.strides))
            assert flat[at] == -1, seed
            flat[at] = whole[tuple(o + i for o, i in zip(box.offset, index))]
    assert (room == expected).all(), seed
    return True


def test_boxes_of_a_view_copy_what_the_view_copies():
    # A flattened matrix of which every second element is taken is the kind that is refused.
    refused = [seed for seed in range(4000) if not check_view(seed)]
    assert len(refused) < 20


def test_usual_views_are_one_box():
    # The second expert's gate of [2, 4, 3], transposed.
    (box,) = view_boxes((2, 4, 3), 12, (3, 2), (1, 3), (2, 1))
    assert (box.offset, box.extent, box.strides[1:], box.first) == ((1, 0, 0), (1, 2, 3), (1, 2), 0)
    # A flattened matrix.
    assert view_boxes((4, 3), 0, (12,), (1,), (1,)) == [((0, 0), (4, 3), (3, 1), 0)]


def test_interleaved_heads_are_a_box_each():
    # [groups 2, heads 3, dim 2] rows of a [12, 5] matrix, of each group the first 2 heads.
    boxes = view_boxes((12, 5), 0, (2, 4, 5), (30, 5, 1), (20, 5, 1))
    assert [(box.offset, box.extent, box.first) for box in boxes] == [((0, 0), (4, 5), 0), ((6, 0), (4, 5), 20)]


@pytest.mark.parametrize(
    ("sizes", "strides", "offset", "why"),
    [
        ((2, 6), (0, 1), 0, "expanded"),
        ((3, 3), (1, 1), 0, "repeats"),
        ((2, 5), (7, 1), 0, "multiple|crosses"),
        ((4,), (4,), 0, "crosses|multiple"),
    ],
)
def test_what_is_no_box_is_refused_with_the_reason(sizes, strides, offset, why):
    with pytest.raises(NotBoxes, match=why):
        view_boxes((6, 3), offset, sizes, strides, row_major(sizes))


def test_too_many_boxes_are_refused():
    with pytest.raises(NotBoxes, match="more than 256 boxes"):
        view_boxes((1000, 2), 0, (500, 2), (4, 1), (2, 1))


@pytest.mark.parametrize("seed", range(300))
def test_an_overlap_is_found_where_there_is_one(seed):
    rng = random.Random(seed)
    shape = random_shape(rng, most_dims=3)
    boxes = []
    for _ in range(rng.randint(1, 4)):
        offset = tuple(rng.randint(0, n - 1) for n in shape)
        boxes.append((offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset))))
    counts = numpy.zeros(prod(shape), int)
    for box in boxes:
        counts[elements(shape, *box)] += 1
    assert (first_overlap(boxes) is not None) == bool((counts > 1).any())
