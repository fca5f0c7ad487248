"""The kernels of a rung, by the names of its steps."""


def step_of(rung, config, problem, name="main"):
    """The step that is called ``name``, of contiguous tensors on an H200."""
    (step,) = [step for step in rung.steps(config, problem) if step.name == name]
    return step
