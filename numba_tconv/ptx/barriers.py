"""bar.sync, mbarriers in shared memory, and a warpgroup's registers.

An mbarrier's phase ends when all threads have arrived and all announced bytes have landed."""

from numba import types

from .core import word

i32 = types.int32

mbarrier_init = word("mbarrier.init.shared::cta.b64 [$0], $1;", i32, i32)
mbarrier_init.__doc__ = """(barrier, count): ``count`` arrivals end a phase."""

mbarrier_arrive = word("mbarrier.arrive.shared::cta.b64 _, [$0];", i32)
mbarrier_arrive.__doc__ = """(barrier): one arrival; what this thread wrote before is seen by those that wait."""

mbarrier_arrive_expect_tx = word("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", i32, i32)
mbarrier_arrive_expect_tx.__doc__ = """(barrier, bytes): one arrival, and the phase waits for ``bytes`` more to land."""

mbarrier_expect_tx = word("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", i32, i32)
mbarrier_expect_tx.__doc__ = """(barrier, bytes): the phase waits for ``bytes`` more to land; no arrival."""

mbarrier_await_copies = word("cp.async.mbarrier.arrive.shared::cta.b64 [$0];", i32)
mbarrier_await_copies.__doc__ = """(barrier): the phase lasts until this thread's cp.async have landed; no arrival."""

mbarrier_wait = word(
    "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@!done bra again;\n}",
    i32,
    i32,
)
mbarrier_wait.__doc__ = """(barrier, parity): returns when the phase of ``parity`` (0, 1, 0, ... from the start) ends.

There is no hint of how long to sleep: with one k6 is slower."""

fence_mbarrier_init = word("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;")
fence_mbarrier_init.__doc__ = """(): the mbarriers initialised by this thread exist for the copy engine too."""

barrier_sync = word("bar.sync $0, $1;", i32, i32)
barrier_sync.__doc__ = """(barrier, threads): a barrier of ``threads`` threads; 0 is that of syncthreads."""


def setmaxnreg(registers, grow):
    """(): each thread of the warpgroup gets ``registers``, a multiple of 8; ``grow`` if that is more."""
    return word(f"setmaxnreg.{'inc' if grow else 'dec'}.sync.aligned.u32 {registers};")
