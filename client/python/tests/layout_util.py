"""Reading a layout back as the daemon would: the elements of each box, from the memory that it names."""

import ctypes
from math import prod

import torch

from refitd._core.tensors import source_of
from refitd.layout.memory import FilledMemory, HostBytes, HostMemory, torch_dtype


class Reader:
    """Reads the boxes of a layout. FilledMemory is filled on first use, as a refit would do."""

    def __init__(self, layout):
        self._layout = layout
        self._rooms = {}

    def _bytes_of(self, memory):
        if isinstance(memory, HostMemory):
            return torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.pointer), dtype=torch.uint8)
        assert isinstance(memory, FilledMemory)
        if memory not in self._rooms:
            room = bytearray(memory.nbytes)
            memory.fill(memoryview(room))
            self._rooms[memory] = torch.frombuffer(room, dtype=torch.uint8)
        return self._rooms[memory]

    def view(self, box):
        """A view of the box's elements in their memory."""
        dtype = torch_dtype(self._layout.tensors[box.tensor_index].dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(box.extent, box.strides))
        data = self._bytes_of(box.memory)[box.byte_offset : box.byte_offset + span * dtype.itemsize]
        return data.view(dtype).as_strided(box.extent, box.strides)


class Pushes(list):
    """Stands for an update: collects (name, first element, elements, shape). It copies each push in two ranges, as an update that fills
    two slots does."""

    def push(self, name, tensor, *, shape, start):
        source = source_of(name, tensor)
        assert 0 <= start <= start + source.elements <= prod(shape)
        dtype = torch_dtype(source.dtype.name)
        elements = torch.empty(source.elements, dtype=dtype)
        half = source.elements // 3
        for first, count in ((0, half), (half, source.elements - half)):
            room = elements[first : first + count]
            if count:
                source.copy(HostBytes(room.data_ptr(), count * dtype.itemsize, room), first, count)
        self.append((name, start, elements, tuple(shape)))


def pushed_by(layout):
    """Has a rank push, and returns (name, first element, elements) of each push."""
    update = Pushes()
    layout.pushed.push(update)
    return [pushed[:3] for pushed in update]


def assemble(layouts):
    """The global tensors that the layouts of all ranks make together, by name.

    Every element must be supplied; those that several boxes supply must agree, and pushed ones come once.
    """
    whole, filled, pushed = {}, {}, {}

    def put(spec, index, values):
        if spec.name not in whole:
            whole[spec.name] = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))
            filled[spec.name] = torch.zeros(spec.shape, dtype=torch.bool)
        assert values.dtype == whole[spec.name].dtype
        seen = filled[spec.name][index]
        assert torch.equal(torch.where(seen, values, whole[spec.name][index]), whole[spec.name][index])
        whole[spec.name][index] = values
        filled[spec.name][index] = True

    for layout in layouts:
        reader = Reader(layout)
        for box in layout.boxes:
            index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent))
            put(layout.tensors[box.tensor_index], index, reader.view(box))
        if layout.pushed is None:
            continue
        update = Pushes()
        layout.pushed.push(update)
        by_name = {spec.name: spec for spec in layout.tensors}
        names = {layout.tensors[i].name for i in layout.pushed.indices}
        for name, start, values, shape in update:
            spec = by_name[name]
            assert name in names and spec.shape == shape
            flat = pushed.setdefault(name, torch.zeros(prod(shape), dtype=torch.int))
            flat[start : start + len(values)] += 1
            assert (flat <= 1).all(), f"{name} was pushed twice"
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=values.dtype)
                filled[name] = torch.zeros(shape, dtype=torch.bool)
            assert values.dtype == torch_dtype(spec.dtype)
            whole[name].view(-1)[start : start + len(values)] = values
            filled[name].view(-1)[start : start + len(values)] = True
    for name, seen in filled.items():
        assert seen.all(), f"{name} lacks elements"
    return whole
