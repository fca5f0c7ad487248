"""One kernel after the other on a stream: the second may begin before the first has ended (Kernel.prepare).

The simulator runs them one after the other, so there they mean nothing; of code for GPUs below compute capability 9.0,
which have no such launches, runtime/kernel.py leaves them out.
"""

from __future__ import annotations

from .core import word

griddepcontrol_launch_dependents = word("griddepcontrol.launch_dependents;", meaning=lambda: None)
griddepcontrol_launch_dependents.__doc__ = (
    """(): once every block has said so, or ended, blocks of the next kernel begin where there is room for them."""
)

griddepcontrol_wait = word("griddepcontrol.wait;", meaning=lambda: None)
griddepcontrol_wait.__doc__ = """(): returns when the kernel before has ended, and what it wrote is seen."""
