"""Calls of ``alias_free_activation`` found by one look-up, on the CPU in place of a GPU."""

import pytest
import torch

from numba_tconv import AliasFreeActivation, alias_free_activation, freeze
from numba_tconv.torch_api import alias_free_operators as ops
from numba_tconv.torch_api.alias_free import tensors_of

C = 3
X = torch.randn(2, C, 9, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def made(monkeypatch):
    """Sizes of the calls that were made ready; they compute by torch's operators."""
    found = []

    def ready(sizes, strides, dtype, index, activation, log_scale):
        def compute(x, up_filter, down_filter, alpha, beta):
            alpha, beta = (alpha.reshape(-1), beta.reshape(-1)) if activation == "snake" else (None, None)
            filters = up_filter.reshape(-1), down_filter.reshape(-1)
            with torch.no_grad():
                return ops.composed(x, *filters, alpha, beta, *sizes[-2:], log_scale, activation)

        found.append((sizes, strides, dtype, activation, log_scale))
        return compute

    monkeypatch.setattr(ops, "computes_on", lambda index: True)
    monkeypatch.setattr(ops, "ready", ready)
    ops.remembered.cache_clear()
    yield found
    ops.remembered.cache_clear()


def layer(**others):
    torch.manual_seed(3)
    made = AliasFreeActivation(C, **others).eval()
    for one in made.parameters():
        one.data.uniform_(0.2, 0.9)
    return made


FORMS = {
    "SnakeBeta": {},
    "Snake": {"beta": False},
    "linear": {"log_scale": False},
    "SiLU": {"activation": "silu"},
    "other sizes": {"up_ratio": 3, "down_ratio": 1, "up_kernel_size": 9, "down_kernel_size": 8},
    "SiLU of other sizes": {"activation": "silu", "up_kernel_size": 9, "down_kernel_size": 8},
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_made_ready_once(made, form, frozen):
    one = layer(**FORMS[form])
    with torch.autograd.profiler.profile(), torch.no_grad():  # a profiler sees the operator
        expected = one(X)
    assert not made
    if frozen:
        freeze(one)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(one(X), expected)
    assert len(made) == 1


def test_training_is_recorded_with_the_same_gradients(made):
    one = layer()
    one(X.requires_grad_()).square().sum().backward()
    found = [X.grad, *(p.grad for p in one.parameters())]
    assert len(made) == 1
    alpha, beta, *filters = tensors_of(one)
    y = ops.composed(X, *(f.reshape(-1) for f in filters), alpha, beta, 2, 2, True, "snake")
    expected = torch.autograd.grad(y.square().sum(), [X, alpha, beta])
    X.requires_grad_(False).grad = None
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", ["x", "alpha", "beta"])
def test_one_gradient_alone_is_recorded(made, name):
    alpha, beta, up, down = (tensor.detach() for tensor in tensors_of(layer()))
    given = {"x": X, "alpha": alpha, "beta": beta, "up_filter": up, "down_filter": down}
    given[name] = given[name].clone().requires_grad_()
    (found,) = torch.autograd.grad(alias_free_activation(**given).square().sum(), given[name])
    x, alpha, beta, *filters = given.values()
    y = ops.composed(x, *(f.reshape(-1) for f in filters), alpha, beta, 2, 2, True, "snake")
    torch.testing.assert_close(found, *torch.autograd.grad(y.square().sum(), given[name]))
    assert len(made) == 1


OTHER = {
    "length": lambda g: g | {"x": X[..., :5].contiguous()},
    "strides": lambda g: g | {"x": torch.nn.functional.pad(X, (0, 1))[..., :-1]},
    "no log scale": lambda g: g | {"log_scale": False},
    "tied": lambda g: g | {"beta": None},
    "other taps": lambda g: g | {"down_filter": g["down_filter"][..., :7].contiguous()},
}


@torch.no_grad()
@pytest.mark.parametrize("what", OTHER)
def test_other_calls_are_made_ready_for_themselves(made, what):
    alpha, beta, up, down = tensors_of(layer())
    given = {"x": X, "alpha": alpha, "beta": beta, "up_filter": up, "down_filter": down}
    alias_free_activation(**given)
    given = OTHER[what](given)
    y = alias_free_activation(**given)
    assert len(made) == 2
    with torch.autograd.profiler.profile():
        torch.testing.assert_close(y, alias_free_activation(**given))


CHECKED = {
    "True for a ratio": {"up_ratio": True},
    "1.0 for a ratio": {"up_ratio": 2.0},
    "1 for log_scale": {"log_scale": 1},
    "an alpha of another size": {"alpha": torch.zeros(C + 1)},
    "a beta of another dtype": {"beta": torch.zeros(C).double()},
    "two dimensions": {"alpha": torch.zeros(C, C)},
    "an unknown activation": {"activation": "tanh"},
    "parameters of silu": {"activation": "silu"},
    "a filter too long": {"up_filter": torch.zeros(40)},
    "no alpha": {"alpha": None},
    "no samples": {"x": X[..., :0]},
}


@torch.no_grad()
@pytest.mark.parametrize("what", CHECKED)
def test_a_bad_call_is_checked_after_a_good_one_like_it(made, what):
    alpha, beta, up, down = tensors_of(layer())
    given = {"x": X, "alpha": alpha, "beta": beta, "up_filter": up, "down_filter": down, "up_ratio": 1}
    alias_free_activation(**given)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        alias_free_activation(**given | CHECKED[what])
    assert len(made) == 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["x", "alpha", "beta", "up_filter", "down_filter"])
def test_a_negation_not_yet_done_is_the_operators(made, monkeypatch, name):
    alpha, beta, up, down = tensors_of(layer())
    given = {"x": X, "alpha": alpha, "beta": beta, "up_filter": up, "down_filter": down}
    expected = alias_free_activation(**given)
    with monkeypatch.context() as patches:
        patches.setattr(ops, "remembered", lambda *_: pytest.fail("found by a look-up"))
        found = alias_free_activation(**given | {name: torch._neg_view(-given[name])})
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_an_alpha_that_is_not_contiguous_is_checked(made):
    alpha, beta, up, down = tensors_of(layer())
    spread = alpha.repeat_interleave(2)[::2]
    y = alias_free_activation(X, spread, beta, up_filter=up, down_filter=down)
    assert not made
    torch.testing.assert_close(y, alias_free_activation(X, alpha, beta, up_filter=up, down_filter=down))
