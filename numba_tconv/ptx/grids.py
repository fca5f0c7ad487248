"""Early launches: a kernel may begin before the previous one has ended (Kernel.prepare).

runtime/kernel.py removes these instructions below sm_90."""

from .core import word

griddepcontrol_launch_dependents = word("griddepcontrol.launch_dependents;", meaning=lambda: None)
griddepcontrol_launch_dependents.__doc__ = (
    """(): once every block has said so, or ended, blocks of the next kernel begin where there is room for them."""
)

griddepcontrol_wait = word("griddepcontrol.wait;", meaning=lambda: None)
griddepcontrol_wait.__doc__ = """(): returns when the kernel before has ended, and what it wrote is seen."""
