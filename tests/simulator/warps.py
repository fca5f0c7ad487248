"""Meanings of a warp's instructions for the simulator, for kernels all of whose threads multiply equally often.

``played`` lets the kernels of a module run with them: products of tensor cores from the registers of
all lanes, shared and global memory by address, and copies, whose addresses and sizes are checked.
"""

import ctypes

import numpy as np

from numba_tconv.kernels.common.tensor_core.fragments import mma_a, mma_b, mma_d
from numba_tconv.ptx import f32_to_bf16, tf32_operand
from numba_tconv.ptx.simulator.meanings import address as address_of

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


def outside(array, index, used, alignment=16):
    """The bytes of a global array from ``index`` on. Raises IndexError unless ``used`` exist, aligned."""
    start, found = int(index) * array.itemsize, array.view(np.uint8)
    if (array.__array_interface__["data"][0] + start) % alignment or not 0 <= start <= start + used <= found.size:
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
    """Let the kernels of ``modules``, which all use the first, run in the simulator."""
    memory, module = Memory(), modules[0]
    # Bytes of arrays, by their addresses; threads at each named barrier, and which; numbers of a warp.
    sizes, arrived, members, offered = {}, {}, {}, {}

    def ld_global_vector(wanted, source, index):
        return tuple(outside(source, index, 16).view(np.int32).copy()) if wanted else (np.int32(0),) * 4

    def st_shared_b32(address, word):
        memory.at(address, np.int32)[0] = word

    def st_shared_u16(address, word):
        memory.at(address, np.uint16)[0] = int(word) & 0xFFFF

    def global_address(array, index):
        begin = address_of(array, 0)
        sizes[begin] = array.size * array.itemsize
        return np.int64(begin + int(index) * array.itemsize)

    def copy_at(size):
        def copy_all(address, source):
            if source % size or not any(0 <= source - begin <= sizes[begin] - size for begin in sizes):
                raise IndexError(f"{size} bytes at global address {source}")
            memory.at(address, np.uint8, size)[:] = list(ctypes.string_at(int(source), size))

        return copy_all

    def copy_to(size):
        def copy(address, source, index, used):
            target = memory.at(address, np.uint8, size)
            target[:] = 0
            target[: int(used)] = outside(source, index, int(used), size) if used else []

        return copy

    def ld_shared(count, kind):
        kind = np.dtype(str(kind))

        def load(address):
            found = memory.at(address, kind, count).copy()
            return found[0] if count == 1 else tuple(found)

        return load

    def st_shared(address, *values):
        memory.at(address, np.float32, 4)[:] = values

    def st_global_if(count):
        def store(wanted, target, index, words):
            if wanted:
                outside(target, index, 4 * count, 4 * count)[:] = np.array(words[:count], np.int32).view(np.uint8)

        return store

    def ld_shared_st_global_if(count):
        def move(wanted, target, index, address):
            words = memory.at(address, np.int32, count)
            if wanted:
                outside(target, index, 4 * count, 4 * count)[:] = words.view(np.uint8)

        return move

    def barrier_sync(number, threads):
        members.setdefault(number, set()).add(int(module.cuda.threadIdx.x))
        assert len(members[number]) <= threads, "a barrier lets threads pass before others arrive"
        arrived[number] = arrived.get(number, 0) + 1
        wanted = -(-arrived[number] // threads) * threads
        module.cuda.syncthreads()
        while arrived[number] < wanted:
            module.cuda.syncthreads()

    def redux_max(value):
        thread = int(module.cuda.threadIdx.x)
        offered[thread] = value
        module.cuda.syncthreads()
        largest = max(offered[thread // 32 * 32 + lane] for lane in range(32))
        module.cuda.syncthreads()
        return largest

    meanings = dict(
        pack_bf16=lambda low, high: np.array([f32_to_bf16(low), f32_to_bf16(high)], np.uint16).view(np.int32)[0],
        redux_max=redux_max,
        global_address=global_address,
        cp_async_to=copy_to,
        cp_async_vector=copy_at(16),
        cp_async_word=copy_at(4),
        ld_shared=ld_shared,
        st_shared=st_shared,
        st_global_if=st_global_if,
        ld_shared_st_global_if=ld_shared_st_global_if,
        barrier_sync=barrier_sync,
        shared_address=memory.shared_address,
        copy=copy_to(16),
        load_words=ld_shared(4, "int32"),
        load_rows=matrices(module, memory, 4),
        load_few_rows=matrices(module, memory, 2),
        load_columns=matrices(module, memory, 4, transposed=True),
        load_number=ld_shared(1, "float32"),
        ld_shared_u16=lambda address: np.int32(memory.at(address, np.uint16)[0]),
        ld_global_vector=ld_global_vector,
        st_global_vector=st_global_if(4),
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
    for one in modules:
        if hasattr(one, "make_kernel"):
            one.make_kernel.cache_clear()
