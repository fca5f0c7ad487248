"""Types of calls, remembered while a kernel is compiled.

Numba works out what a call or an operator returns at each of its places, and there two or three times: thousands of
times in a kernel, of a few hundred kinds. With this, six kernels of k6 take 0.71 to 0.91 times as long to compile to
PTX (9 to 13 s before), three of k5 0.77 to 0.97, and two of k4 0.85 and 0.90 (two slow processors, scripts).
"""

from __future__ import annotations

import contextlib
import operator

from numba.cuda.descriptor import cuda_target


@contextlib.contextmanager
def remembered_call_types():
    """Meanwhile, what a function returns for arguments of some types is asked of Numba once. Errors are not kept.

    For one thread at a time that compiles for a GPU.
    """
    cuda_target.typing_context.refresh()  # of a process that has compiled nothing
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
