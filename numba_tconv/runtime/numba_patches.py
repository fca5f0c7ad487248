"""Patches of Numba, which compile kernels to the same code in less time.

What a version of Numba lacks stays as it is."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable, Iterator

from numba.core.compiler_lock import global_compiler_lock
from numba.cuda.descriptor import cuda_target

# Passes for closures, array literals and overloads that are inlined in Python's code: kernels have none.
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

    owner.get_call_type = get_call_type
    try:
        yield
    finally:
        owner.get_call_type = asked


@contextlib.contextmanager
def shortened():
    """Leaves out UNUSED passes and analyses that nobody reads. Other threads' compilations wait."""
    with (
        global_compiler_lock,
        _replaced("compiler", "CUDACompiler", "define_pipelines", _without_unused),
        _replaced("core.postproc", "PostProcessor", "run", _on_demand),
        _replaced("lowering", "Lower", "_find_singly_assigned_variable", _without_deletions),
        _replaced("utils", "", "pysignature", functools.cache),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: str, owner: str, name: str, change: Callable) -> Iterator[None]:
    """Puts ``change(original)`` in the place of ``name`` of a class ``owner`` of numba.cuda's ``module``, or of it.

    Nothing changes where something that ``change`` needs is missing."""
    changed = None
    with contextlib.suppress(ImportError, AttributeError):
        holder = importlib.import_module(f"numba.cuda.{module}")
        holder = getattr(holder, owner) if owner else holder
        original = getattr(holder, name)
        changed = change(original)
        setattr(holder, name, changed)
    try:
        yield
    finally:
        if changed:
            setattr(holder, name, original)


def _without_unused(define_pipelines):
    def define(self):
        pipelines = define_pipelines(self)
        for pipeline in pipelines:
            pipeline.passes = [step for step in pipeline.passes if step[0].__name__ not in UNUSED]
        return pipelines

    return define


def _on_demand(run):
    """Lifetimes of variables are analysed on demand, not after every pass."""
    postproc = importlib.import_module("numba.cuda.core.postproc")
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
    deletion = importlib.import_module("numba.cuda.core.ir").Del

    def find_and_drop(self):
        find(self)
        if not self.context.enable_nrt:
            alone = self._singly_assigned_vars
            for block in self.func_ir.blocks.values():
                block.body = [step for step in block.body if not (isinstance(step, deletion) and step.value in alone)]

    return find_and_drop
