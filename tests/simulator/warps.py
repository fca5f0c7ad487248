"""Meanings of a warp's instructions for the simulator, for kernels all of whose threads multiply equally often.

``played`` lets the kernels of a module run with them: products of tensor cores from the registers of
all lanes, shared memory by address, and copies of 16 bytes, whose addresses and sizes are checked.
"""

import numpy as np

from numba_tconv.kernels.common.tensor_core.fragments import mma_a, mma_b, mma_d
from numba_tconv.ptx import tf32_operand

FULL = 0xFFFFFFFF


class Memory:
    """The dynamic shared memory of the block that runs, by address."""

    def shared_address(self, shared, index):
        self.bytes = shared.view(np.uint8)
        return int(index) * shared.itemsize

    def at(self, address, kind, count=1):
        size = np.dtype(kind).itemsize * count
        if address < 0 or address + size > self.bytes.size or address % size:
            raise IndexError(f"{size} bytes at shared address {address}")
        return self.bytes[int(address) :][:size].view(kind)


def outside(array, index, used):
    """The bytes of a global array from ``index`` on. Raises IndexError unless ``used`` of them exist, at 16 bytes."""
    start, found = int(index) * array.itemsize, array.view(np.uint8)
    if (array.__array_interface__["data"][0] + start) % 16 or not 0 <= start <= start + used <= found.size:
        raise IndexError(f"{used} bytes at {start} of {found.size}")
    return found[start:][:used]


def numbers(kind, word):
    """The elements of an operand's register."""
    bits = np.array([word], np.int32)
    if kind == "tf32":
        return (bits & np.int32(-0x2000)).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def products(module, kind):
    """mma.sync in ``kind``."""
    halves, table, found = 1 if kind == "tf32" else 2, {}, {}

    def product(acc, at, a, a_at, b0, b1):
        thread = int(module.cuda.threadIdx.x)
        lane, warp = thread % 32, thread // 32
        table[thread] = [numbers(kind, a[a_at + i]) for i in range(4)], [numbers(kind, b0), numbers(kind, b1)]
        module.cuda.syncthreads()
        if warp not in found:
            left, right = np.zeros((16, 8 * halves)), np.zeros((8 * halves, 8))
            for other in range(32):
                a_registers, b_registers = table[32 * warp + other]
                for h in range(halves):
                    for i in range(4):
                        left[mma_a(other, i, h, halves)] = a_registers[i][h]
                    for i in range(2):
                        right[mma_b(other, i, h, halves)] = b_registers[i][h]
            found[warp] = (left @ right).astype(np.float32)
        for i in range(4):
            acc[at + i] += found[warp][mma_d(lane, i)]
        module.cuda.syncthreads()
        found.pop(warp, None)

    return product


def matrices(module, memory, count, transposed=False):
    """ldmatrix of ``count`` matrices."""
    addresses = {}

    def load(address):
        thread = int(module.cuda.threadIdx.x)
        lane, warp = thread % 32, thread // 32
        addresses[thread] = address
        module.cuda.syncthreads()
        words = []
        for m in range(count):
            matrix = np.stack([memory.at(addresses[32 * warp + 8 * m + r], np.uint16, 8) for r in range(8)])
            matrix = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.int32)
            words.append(matrix[lane // 4, lane % 4])
        module.cuda.syncthreads()
        return tuple(words)

    return load


def prmt(a, b, selector):
    parts = np.array([a, b], np.int32).view(np.uint8)
    return np.array([parts[selector >> 4 * z & 7] for z in range(4)], np.uint8).view(np.int32)[0]


def put_tf32(values, at, value):
    values[at] = tf32_operand(value)


def played(modules, monkeypatch, fake_cuda):
    """Let the kernels of ``modules``, the first of which makes them, run in the simulator."""
    memory, module = Memory(), modules[0]

    def copy(address, source, index, used):
        memory.at(address, np.uint8, 16)[:] = 0
        memory.at(address, np.uint8, 16)[: int(used)] = outside(source, index, int(used)) if used else []

    def load_words(address):
        return tuple(memory.at(address, np.int32, 4).copy())

    def ld_global_vector(wanted, source, index):
        return tuple(outside(source, index, 16).view(np.int32).copy()) if wanted else (np.int32(0),) * 4

    def st_global_vector(wanted, target, index, words):
        if wanted:
            outside(target, index, 16)[:] = np.array(words, np.int32).view(np.uint8)

    def st_shared_b32(address, word):
        memory.at(address, np.int32)[0] = word

    def st_shared_u16(address, word):
        memory.at(address, np.uint16)[0] = int(word) & 0xFFFF

    meanings = dict(
        shared_address=memory.shared_address,
        copy=copy,
        load_words=load_words,
        load_rows=matrices(module, memory, 4),
        load_few_rows=matrices(module, memory, 2),
        load_columns=matrices(module, memory, 4, transposed=True),
        load_number=lambda address: memory.at(address, np.float32)[0],
        ld_shared_u16=lambda address: np.int32(memory.at(address, np.uint16)[0]),
        ld_global_vector=ld_global_vector,
        st_global_vector=st_global_vector,
        st_shared_b32=st_shared_b32,
        st_shared_u16=st_shared_u16,
        prmt=prmt,
        put_tf32=put_tf32,
        mma=lambda kind: products(module, kind),
    )
    for one in modules:
        for name in meanings.keys() & vars(one).keys():
            monkeypatch.setattr(one, name, meanings[name])
    # A warp's index is the same in all its lanes.
    monkeypatch.setattr(fake_cuda, "shfl_sync", lambda cuda, members, value, lane: value, raising=False)
    module.make_kernel.cache_clear()
