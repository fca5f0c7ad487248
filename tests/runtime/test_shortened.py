"""What is left out of a kernel's compilation. That kernels stay the same: test_call_types.py and `make same-code`."""

import collections
import threading

import pytest

from numba_tconv.ptx import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, types
from numba.cuda import compiler, lowering, utils
from numba.cuda.core import analysis, compiler_machinery, postproc

from numba_tconv.runtime import numba_patches
from numba_tconv.runtime.numba_patches import UNUSED, shortened

PATCHED = (
    (compiler.CUDACompiler, "define_pipelines"),
    (postproc.PostProcessor, "run"),
    (lowering.Lower, "_find_singly_assigned_variable"),
    (utils, "pysignature"),
)


def doubled(values):
    value = values[0]
    values[1] = value + value


def compiled():
    return cuda.compile_ptx(doubled, (types.float32[::1],), cc=(9, 0))[0]


@pytest.fixture
def counted(monkeypatch):
    """How often a compilation did what, as a function of it."""
    done = collections.Counter()

    def count(owner, name, label):
        original = getattr(owner, name)

        def counting(*arguments, **options):
            done[label(*arguments)] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    count(compiler_machinery.PassManager, "_runPass", lambda manager, index, step, state: type(step).__name__)
    count(analysis, "compute_use_defs", lambda blocks: "lifetimes")
    count(lowering.CUDALower, "delvar", lambda lower, name: "deletions")

    def of(compilation):
        done.clear()
        compilation()
        return dict(done)

    return of


def test_only_what_no_kernel_needs_is_left_out(counted):
    plain = counted(compiled)
    with shortened():
        short = counted(compiled)
    assert set(plain) - set(short) == UNUSED | {"deletions"}
    assert plain.pop("lifetimes") > 2
    assert short.pop("lifetimes") == 1  # before code is generated
    assert short.items() <= plain.items()


def test_a_variable_in_memory_is_deleted(counted):
    def summed(values):
        total = values[0]
        for step in range(values.size):
            total += values[step]
        values[0] = total

    with shortened():
        done = counted(lambda: cuda.compile_ptx(summed, (types.float32[::1],), cc=(9, 0)))
    assert done["deletions"] > 0


def test_kernels_with_closures_compile_as_ever(counted):
    def of_closure(values):
        def scaled(value):
            return value * values[1]

        values[0] = scaled(values[0])

    def compile_it():
        cuda.compile_ptx(of_closure, (types.float32[::1],), cc=(9, 0))

    plain = counted(compile_it)
    with shortened():
        assert plain.keys() - counted(compile_it).keys() == {"deletions"}


def test_it_ends_with_what_it_surrounds():
    before = [getattr(owner, name) for owner, name in PATCHED]

    def fail():
        with shortened():
            assert all(getattr(owner, name) is not own for (owner, name), own in zip(PATCHED, before, strict=True))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [getattr(owner, name) for owner, name in PATCHED] == before


def test_versions_that_it_does_not_know_compile_as_ever(monkeypatch):
    before = [getattr(owner, name) for owner, name in PATCHED]
    monkeypatch.setattr(numba_patches.numba_cuda, "__version__", "0.31.0")
    with shortened():
        assert [getattr(owner, name) for owner, name in PATCHED] == before


def test_another_threads_compilation_waits():
    other = threading.Thread(target=compiled)
    with shortened():
        other.start()
        other.join(0.5)
        assert other.is_alive()
    other.join()
