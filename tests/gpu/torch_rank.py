"""A trainer whose weights are torch's, made of the generated stub and ctypes over libcuda: nothing of refitd's clients.

  python3 torch_rank.py --socket PATH --mode regions|inline|regions-expandable|refit-expandable [--device N]

Modes: regions (legacy IPC handles registered once, buckets name them), inline (handles in the bucket, keyed by GPU UUID),
regions-expandable and refit-expandable (descriptors of expandable segments over the descriptor socket; run with
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; the last registers its layout once and calls Refit). Answers
`update VERSION` with a JSON line. Tensors and values are those of gpu_rank --model tensors:12:31000002."""

import argparse
import ctypes
import json
import os
import queue
import socket
import struct
import sys

import grpc
import torch
from refitd.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2

TENSORS = 12
ELEMENTS = 31_000_002 // 2  # bfloat16, one dimension
SEED = 1
SECONDS = 60
MASK = (1 << 64) - 1

# cuda.h
POSIX_DESCRIPTOR = 1
LEGACY_CAPABLE = 10

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result != 0:
        raise RuntimeError("%s: error %d" % (name, result))


# ---- values: tests/gpu/values.h and Layout's TensorHash, in Python and on the GPU ----


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def tensor_hash(name, shape):
    text = name.encode()
    h = 0xCBF29CE484222325
    for byte in text:
        h = ((h ^ byte) * 0x100000001B3) & MASK
    for number in [len(text), types_pb2.DTYPE_BFLOAT16, len(shape), *shape]:
        h = mix(((h ^ number) + 0x9E3779B97F4A7C15) & MASK)
    return h


def salt(version):
    return mix(mix((SEED + 0x9E3779B97F4A7C15) & MASK) ^ ((version * 0xD1342543DE82EF95) & MASK))


def signed(x):
    return x - (1 << 64) if x >> 63 else x


def shifted(x, bits):
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def values(name, version, device):
    x = torch.arange(ELEMENTS, dtype=torch.int64, device=device) * signed(0x9E3779B97F4A7C15)
    x += signed(tensor_hash(name, [ELEMENTS]) ^ salt(version))
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    x ^= shifted(x, 31)
    return (x >> 48).to(torch.int16)  # keeps the bits


# ---- memory ----


def allocation_of(address):
    """Base and bytes of the driver's allocation: one of cudaMalloc, or one mapped handle of an expandable segment."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def legacy_capable(address):
    answer = ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(answer), LEGACY_CAPABLE, ctypes.c_uint64(address))
    return bool(answer.value)


def ipc_handle(base):
    handle = (ctypes.c_char * 64)()
    call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
    return handle.raw


def descriptor_of(base):
    handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
    call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(base))
    try:
        call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, POSIX_DESCRIPTOR, ctypes.c_uint64(0))
    finally:
        call("cuMemRelease", handle)
    return descriptor.value


class Trainer:
    def __init__(self, options):
        self.expandable = options.mode.endswith("expandable")
        self.mode = options.mode.split("-")[0]
        self.device = torch.device("cuda", options.device)
        torch.cuda.set_device(self.device)
        self.uuid = "GPU-%s" % torch.cuda.get_device_properties(self.device).uuid
        self.names = ["tensor.%d" % i for i in range(TENSORS)]
        self.weights = {n: torch.empty(ELEMENTS, dtype=torch.bfloat16, device=self.device) for n in self.names}
        first = self.weights[self.names[0]].data_ptr()
        if legacy_capable(first) == self.expandable:
            raise RuntimeError("expandable segments wanted: %s, legacy IPC: %s" % (self.expandable, legacy_capable(first)))
        self.attach(options.socket)
        self.regions = {}  # base: id
        if self.mode != "inline":
            for name in self.names:
                for _, _, address in self.parts(name):
                    self.region(address)
        self.generation = 0

    def attach(self, path):
        self.stub = trainer_pb2_grpc.TrainerStub(grpc.insecure_channel("unix:" + path))
        self.outgoing = queue.Queue()
        hello = trainer_pb2.TrainerHello(
            protocol=types_pb2.PROTOCOL_VERSION_1,
            group="gpu",
            spec=types_pb2.GroupSpec(trainer_ranks=1, min_instances=1),
            rank=0,
            world_size=1,
            device=types_pb2.Device(name=self.uuid),
            client="torch_rank",
        )
        self.outgoing.put(trainer_pb2.TrainerMessage(hello=hello))
        self.events = self.stub.Attach(iter(self.outgoing.get, None), timeout=3600)
        welcome = next(self.events).welcome
        self.lease = welcome.lease
        self.descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptors.settimeout(SECONDS)
        self.descriptors.connect(welcome.descriptor_socket)

    def parts(self, name):
        """First element, elements and address of each run of a tensor that lies in one allocation."""
        address, left, start = self.weights[name].data_ptr(), ELEMENTS, 0
        while left:
            base, size = allocation_of(address)
            count = min(left, (base + size - address) // 2)
            yield start, count, address
            address, left, start = address + 2 * count, left - count, start + count

    def region(self, address):
        """The region that has this address, which is registered when first asked for, and the offset in it."""
        base, size = allocation_of(address)
        if base not in self.regions:
            self.regions[base] = self.send_descriptor(base, size) if self.expandable else self.send_handle(base, size)
        return types_pb2.RegionRef(region_id=self.regions[base], byte_offset=address - base)

    def send_handle(self, base, size):
        handle = types_pb2.CudaIpcHandle(gpu_uuid=self.uuid, handle=ipc_handle(base), bytes=size)
        request = types_pb2.RegisterRegionRequest(lease=self.lease, cuda_ipc=handle)
        return self.stub.RegisterRegion(request, timeout=SECONDS).region_id

    def send_descriptor(self, base, size):
        """Registers a region over the descriptor socket (docs/descriptor_socket.md): request kind 1, region kind 2."""
        request = struct.pack("<IIII16sqQ16x", 0x44465252, 1, 1, 2, self.lease.token, size, 0)
        descriptor = descriptor_of(base)
        try:
            socket.send_fds(self.descriptors, [request], [descriptor])
        finally:
            os.close(descriptor)
        reply = self.descriptors.recv(256)
        _, _, code, _, region, _, _, message = struct.unpack("<IIIIQqq216s", reply)
        if code != 0:
            raise RuntimeError("descriptor socket: %d %s" % (code, message.split(b"\0")[0].decode()))
        return region

    def fill(self, version):
        for name in self.names:
            self.weights[name].view(torch.int16).copy_(values(name, version, self.device))
        torch.cuda.synchronize()

    def buckets(self):
        """The model's buckets. The k-th has the k-th parts of all tensors, since names are unique within a bucket."""
        parts = {name: list(self.parts(name)) for name in self.names}
        for k in range(max(map(len, parts.values()))):
            bucket = types_pb2.Bucket(seq=k)
            for name in self.names:
                if k >= len(parts[name]):
                    continue
                start, count, address = parts[name][k]
                bucket.names.append(name)
                bucket.dtypes.append(types_pb2.DTYPE_BFLOAT16)
                bucket.shapes.add(dims=[ELEMENTS])
                bucket.starts.append(start)
                bucket.sizes.append(count)
                if self.mode == "inline":
                    base, _ = allocation_of(address)
                    bucket.cuda_ipc.handles.add(
                        gpu_uuid=self.uuid, handle=ipc_handle(base), byte_offset=address - base, bytes=2 * count)
                else:
                    bucket.regions.refs.append(self.region(address))
            yield bucket

    def push(self, version):
        self.stub.Begin(trainer_pb2.BeginRequest(lease=self.lease, version=version), timeout=SECONDS)
        count = 0
        for bucket in self.buckets():
            self.stub.PushBucket(
                trainer_pb2.PushBucketRequest(lease=self.lease, version=version, bucket=bucket), timeout=SECONDS)
            count += 1
        return self.stub.Commit(
            trainer_pb2.CommitRequest(lease=self.lease, version=version, bucket_count=count), timeout=SECONDS)

    def register(self):
        self.generation += 1
        chunk = types_pb2.LayoutChunk(lease=self.lease, binding_generation=self.generation, last=True)
        for index, name in enumerate(self.names):
            chunk.names.append(name)
            chunk.dtypes.append(types_pb2.DTYPE_BFLOAT16)
            chunk.shapes.add(dims=[ELEMENTS])
            for start, count, address in self.parts(name):
                ref = self.region(address)
                chunk.piece_tensor.append(index)
                chunk.piece_boxes.extend([start, count])
                chunk.piece_region.append(ref.region_id)
                chunk.piece_byte_offset.append(ref.byte_offset)
        self.stub.RegisterLayout(iter([chunk]), timeout=SECONDS)

    def refit(self, version):
        if self.generation == 0:
            self.register()
        return self.stub.Refit(
            trainer_pb2.RefitRequest(lease=self.lease, version=version, binding_generation=self.generation),
            timeout=SECONDS)

    def update(self, version):
        self.fill(version)
        answer = self.refit(version) if self.mode == "refit" else self.push(version)
        # The source may be overwritten only now: the answer says that it is no longer read.
        for weights in self.weights.values():
            weights.fill_(-1)
        return {"event": "update", "ok": all(i.committed for i in answer.instances), "seconds": answer.seconds}

    def close(self):
        self.outgoing.put(trainer_pb2.TrainerMessage(detach=trainer_pb2.TrainerDetach()))
        self.outgoing.put(None)
        for _ in self.events:  # the memory is mapped until the daemon ends the lease
            pass


def attempt(event, action):
    try:
        line = action()
    except Exception as error:
        line = {"event": event, "ok": False, "error": repr(error)[:2000]}
    print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--mode", required=True,
                        choices=["regions", "inline", "regions-expandable", "refit-expandable"])
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    made = []

    def start():
        made.append(Trainer(options))
        return {"event": "ready", "ok": True}

    attempt("ready", start)
    if not made:
        return 1
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            break
        attempt(words[0], lambda: made[0].update(int(words[1])))
    made[0].close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
