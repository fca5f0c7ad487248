"""Patches of Numba, which compile kernels to the same code in less time."""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable
from unittest import mock

import numba_cuda
from numba.core.compiler_lock import global_compiler_lock
from numba.cuda.descriptor import cuda_target

KNOWN = "0.30."  # versions of numba-cuda that ``shortened`` knows
# Passes for closures, array expressions and overloads that are inlined in Python's code: this package's have none.
UNUSED = {"InlineClosureLikes", "NopythonRewrites", "InlineOverloads"}


@contextlib.contextmanager
def remembered_call_types():
    """While one thread compiles, infer functions' result types once, not at each call."""
    cuda_target.typing_context.refresh()  # needed in a new process
    kind = type(cuda_target.typing_context.resolve_value_type(operator.add))
    owner = next(base for base in kind.__mro__ if "get_call_type" in vars(base))
    asked, known = owner.get_call_type, {}

    def get_call_type(self, context, args, kws):
        key = self, context, tuple(args), tuple(sorted(kws.items()))
        signature = known.get(key)
        if signature is None:
            signature = known[key] = asked(self, context, args, kws)
        return signature

    with mock.patch.object(owner, "get_call_type", get_call_type):
        yield


@contextlib.contextmanager
def shortened():
    """Leaves out UNUSED passes and analyses that nobody reads. Other threads' compilations wait."""
    if not numba_cuda.__version__.startswith(KNOWN):
        yield
        return
    with global_compiler_lock, contextlib.ExitStack() as replaced:
        for holder, name, change in _changes():
            replaced.enter_context(mock.patch.object(holder, name, change(getattr(holder, name))))
        yield


def _changes() -> list[tuple[object, str, Callable]]:
    from numba.cuda import compiler, lowering, utils
    from numba.cuda.core import postproc

    return [
        (compiler.CUDACompiler, "define_pipelines", _without_unused),
        (postproc.PostProcessor, "run", _on_demand),
        (lowering.Lower, "_find_singly_assigned_variable", _without_deletions),
        (utils, "pysignature", functools.cache),
    ]


def _without_unused(define_pipelines):
    def define(self):
        pipelines = define_pipelines(self)
        if any(map(inspect.iscode, self.state.func_id.code.co_consts)):  # it has a closure
            return pipelines
        for pipeline in pipelines:
            pipeline.passes = [step for step in pipeline.passes if step[0].__name__ not in UNUSED]
        return pipelines

    return define


def _on_demand(run):
    """Lifetimes of variables are analysed on demand, not after every pass."""
    from numba.cuda.core import postproc

    canonical, lifetime = postproc.transforms.canonicalize_cfg, postproc.VariableLifetime

    def run_on_demand(self, emit_dels=False, **options):
        if emit_dels or self.func_ir.is_generator:
            return run(self, emit_dels, **options)
        self.func_ir.blocks = canonical(self.func_ir.blocks)
        self.func_ir.variable_lifetime = lifetime(self.func_ir.blocks)
        self.func_ir.generator_info = None

    return run_on_demand


def _without_deletions(find):
    """Deleting a variable without memory does nothing, as there are no reference counts."""
    from numba.cuda.core.ir import Del

    def find_and_drop(self):
        find(self)
        if not self.context.enable_nrt:
            alone = self._singly_assigned_vars
            for block in self.func_ir.blocks.values():
                block.body = [step for step in block.body if not (isinstance(step, Del) and step.value in alone)]

    return find_and_drop
