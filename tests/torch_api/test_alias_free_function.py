"""``alias_free_activation``, its layer, and both in ``convert`` and ``freeze``, on the CPU."""

from contextvars import ContextVar

import pytest
import torch
from torch import nn

from numba_tconv import AliasFreeActivation, alias_free_activation, convert, freeze
from numba_tconv.torch_api import alias_free_operators as ops
from numba_tconv.torch_api.alias_free import tensors_of
from tests.published_activations import Activation1d, Snake, TorchActivation1d, taps

from .test_routed import Dispatched

C = 3
X = torch.randn(2, C, 9, generator=torch.Generator().manual_seed(0))
GOOD = dict(
    x=X, alpha=torch.full((C,), 0.3), beta=torch.full((C,), 0.4), up_filter=taps(12, 1), down_filter=taps(12, 2)
)


def call(**others):
    arguments = GOOD | others
    return alias_free_activation(arguments.pop("x"), arguments.pop("alpha"), **arguments)


FORMS = {
    "SnakeBeta": (lambda: Snake(C), {}),
    "Snake": (lambda: Snake(C, beta=False), {}),
    "SnakeBeta, linear": (lambda: Snake(C, log_scale=False), {"log_scale": False}),
    "Snake, linear": (lambda: Snake(C, log_scale=False, beta=False), {"log_scale": False}),
    "SiLU": (nn.SiLU, {"activation": "silu"}),
    "leaky ReLU": (nn.LeakyReLU, {"activation": "leaky_relu"}),
    "ELU": (nn.ELU, {"activation": "elu"}),
    "GELU": (nn.GELU, {"activation": "gelu"}),
    "identity": (nn.Identity, {"activation": "identity"}),
}
forms = pytest.mark.parametrize("form", FORMS)
SIZES = [(2, 2, 12, 12), (1, 2, 4, 7), (3, 2, 9, 8), (4, 1, 32, 1), (2, 4, 5, 32)]


@forms
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 9])
def test_it_is_what_was_published(form, sizes, length):
    make, named = FORMS[form]
    module, x = Activation1d(make(), *sizes).double(), X[..., :length].double()
    alpha, beta, up_filter, down_filter = tensors_of(module)
    y = alias_free_activation(
        *(x, alpha, beta),
        up_filter=up_filter,
        down_filter=down_filter,
        up_ratio=sizes[0],
        down_ratio=sizes[1],
        **named,
    )
    torch.testing.assert_close(y, module(x), rtol=0, atol=1e-14)
    assert y.shape[-1] == -(-length * sizes[0] // sizes[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_shapes_and_dtypes(dtype):
    given = {name: one.to(dtype) for name, one in GOOD.items()}
    up, down, alpha, beta = (given[name].reshape(-1) for name in ("up_filter", "down_filter", "alpha", "beta"))
    expected = ops.composed(given["x"], up, down, alpha, beta, 2, 2, True, "snake")
    assert torch.equal(call(**given), expected)
    assert expected.dtype == dtype
    assert torch.equal(call(**given | {"up_filter": up, "down_filter": down}), expected)
    assert torch.equal(call(**given | {"alpha": alpha.view(1, C, 1), "beta": beta.view(C, 1)}), expected)
    assert torch.equal(call(**given | {"x": given["x"][0]}), expected[0])
    assert torch.equal(call(**given | {"x": given["x"].transpose(0, 2).contiguous().transpose(0, 2)}), expected)
    assert call(**given | {"x": given["x"][:0]}).shape == (0, C, 9)


def test_gradients_and_torch_func():
    tensors = [GOOD[name].double().requires_grad_() for name in ("x", "alpha", "beta")]
    filters = {name: GOOD[name].double() for name in ("up_filter", "down_filter")}

    def function(x, alpha, beta):
        return alias_free_activation(x[..., :3], alpha, beta, **filters)

    before = ops.as_on_a_gpu.set(True)
    try:
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
        many = torch.func.vmap(function, (0, None, None))(*tensors)
        torch.testing.assert_close(many, function(*tensors))
    finally:
        ops.as_on_a_gpu.reset(before)


BAD = {
    "a filter of 33 taps": ({"up_filter": taps(33)}, RuntimeError, "up_filter must have from 2 to 32 taps, got 33"),
    "a longer down filter": ({"down_filter": taps(40)}, RuntimeError, "down_filter must have from 1 to 32 taps"),
    "a filter below the ratio": ({"up_filter": taps(1)}, RuntimeError, "up_filter must have from 2 to 32 taps, got 1"),
    "an empty filter": ({"down_filter": torch.empty(0)}, RuntimeError, "down_filter must have from 1 to 32 taps"),
    "a filter a channel": ({"up_filter": taps(12).expand(C, 1, 12)}, RuntimeError, "up_filter must have one dim"),
    "a filter without dimensions": ({"up_filter": torch.tensor(1.0)}, RuntimeError, "up_filter must have one dim"),
    "no filter": ({"up_filter": None}, TypeError, "up_filter must be a Tensor, not NoneType"),
    "ratio 0": ({"up_ratio": 0}, RuntimeError, "up_ratio must be from 1 to 4, got 0"),
    "ratio -1": ({"down_ratio": -1}, RuntimeError, "down_ratio must be from 1 to 4, got -1"),
    "ratio 5": ({"down_ratio": 5}, RuntimeError, "down_ratio must be from 1 to 4, got 5"),
    "a real ratio": ({"up_ratio": 2.0}, TypeError, "up_ratio must be an int, not float"),
    "a true ratio": ({"down_ratio": True}, TypeError, "down_ratio must be an int, not bool"),
    "log_scale by number": ({"log_scale": 1}, TypeError, "log_scale must be a bool, not int"),
    "too few alphas": ({"alpha": torch.ones(C - 1)}, RuntimeError, "alpha must have shape (3,), got (2,)"),
    "too many betas": ({"beta": torch.ones(1, C + 1, 1)}, RuntimeError, "beta must have shape (3,), got (4,)"),
    "alphas in a square": ({"alpha": torch.ones(C, C)}, RuntimeError, "alpha must have one dimension"),
    "an alpha of another dtype": ({"alpha": torch.ones(C).half()}, RuntimeError, "alpha must have the dtype of x"),
    "a filter of another dtype": ({"down_filter": taps(12).double()}, RuntimeError, "down_filter must have the dtype"),
    "a beta elsewhere": ({"beta": torch.ones(C, device="meta")}, RuntimeError, "beta must be on the device of x, cpu"),
    "no alpha": ({"alpha": None}, TypeError, "alpha must be a Tensor: 'snake' needs it"),
    "alpha of a pointwise one": ({"activation": "silu"}, TypeError, "alpha must be None: 'silu' has no parameters"),
    "integers": ({"x": X.int()}, NotImplementedError, "not torch.int32"),
    "complex numbers": ({"x": X.to(torch.complex64)}, NotImplementedError, "not torch.complex64"),
    "a sparse x": ({"x": X.to_sparse()}, RuntimeError, "x must be a dense tensor, got layout torch.sparse_coo"),
    "a sparse alpha": ({"alpha": torch.ones(C).to_sparse()}, RuntimeError, "alpha must be a dense tensor"),
    "no samples": ({"x": X[..., :0]}, RuntimeError, "x must have at least one sample, got shape (2, 3, 0)"),
    "no channels": ({"x": X[:, :0]}, RuntimeError, "of one channel or more, got shape (2, 0, 9)"),
    "one dimension": ({"x": X[0, 0]}, RuntimeError, "x must be (N, C, L) or (C, L)"),
    "four dimensions": ({"x": X[None]}, RuntimeError, "x must be (N, C, L) or (C, L)"),
    "an unknown activation": ({"activation": "relu"}, ValueError, "unknown activation 'relu': there are snake, silu, "),
    "an activation by class": ({"activation": nn.SiLU}, TypeError, "activation must be a string, not type"),
    "a list": ({"x": [[1.0]]}, TypeError, "x must be a Tensor, not list"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_call_is_refused_before_anything_is_computed(what, monkeypatch):
    given, error, text = BAD[what]
    monkeypatch.setattr(torch.nn.functional, "pad", lambda *_, **__: pytest.fail("it was computed"))
    with pytest.raises(error) as caught:
        call(**given)
    assert text in str(caught.value)


def test_tensors_with_a_torch_function_receive_it():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func, args, kwargs

    func, args, kwargs = call(alpha=torch.ones(C).as_subclass(Own), up_ratio=3)
    assert func is alias_free_activation
    assert len(args) == 3
    assert kwargs["up_ratio"] == 3
    assert kwargs.keys() == {"up_filter", "down_filter", "up_ratio", "down_ratio", "log_scale", "activation"}


@pytest.mark.parametrize("name", GOOD)
def test_torch_computes_an_operand_that_knows_its_operators_alone(monkeypatch, name):
    monkeypatch.setattr(ops, "as_on_a_gpu", ContextVar("as_on_a_gpu", default=True))
    assert torch.equal(call(**{name: Dispatched(GOOD[name])}), call())


# The layer


@pytest.mark.parametrize("log_scale", [True, False])
@pytest.mark.parametrize("beta", [True, False])
def test_the_layer_loads_nvidias_checkpoints_and_back(log_scale, beta):
    theirs, ours = Activation1d(Snake(C, log_scale, beta)), AliasFreeActivation(C, log_scale=log_scale, beta=beta)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(X), theirs(X))
    Activation1d(Snake(C, log_scale, beta)).load_state_dict(ours.state_dict())


@pytest.mark.parametrize("log_scale", [True, False])
def test_the_layer_begins_with_scales_of_one(log_scale):
    parameters = AliasFreeActivation(C, log_scale=log_scale).act
    assert [*parameters] == ["alpha", "beta"]
    assert all(torch.equal(one.exp() if log_scale else one, torch.ones(C)) for one in parameters.values())


def test_the_layer_loads_a_checkpoint_without_filters():
    theirs, ours = TorchActivation1d(Snake(C)), AliasFreeActivation(C)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.act.alpha, theirs.act.alpha)
    with pytest.raises(RuntimeError, match=r"act\.alpha"):
        ours.load_state_dict({})


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_made_without_memory_loads_a_checkpoint_without_filters(assign):
    sizes = dict(up_ratio=4, up_kernel_size=16)
    wanted, empty = AliasFreeActivation(C, **sizes), AliasFreeActivation(C, **sizes, device="meta")
    if not assign:
        empty.to_empty(device="cpu")
    state = {name: one for name, one in wanted.state_dict().items() if "filter" not in name}
    empty.load_state_dict(state, assign=assign)
    torch.testing.assert_close(dict(empty.state_dict()), dict(wanted.state_dict()), rtol=0, atol=0)


def test_each_filter_has_its_own_size():
    layer = AliasFreeActivation(C, up_kernel_size=9, down_kernel_size=8)
    assert (layer.upsample.filter.shape, layer.downsample.lowpass.filter.shape) == ((1, 1, 9), (1, 1, 8))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_its_filters_are_those_of_the_family(ratio):
    transformers = pytest.importorskip("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    for size in (6 * ratio, 7 * ratio, 5 * ratio):
        layer = AliasFreeActivation(C, ratio, ratio, size, size)
        expected = transformers.kaiser_sinc_filter1d(0.5 / ratio, 0.6 / ratio, size)
        torch.testing.assert_close(layer.upsample.filter, expected, rtol=0, atol=1e-7)
        assert layer.upsample.filter.sum() == pytest.approx(1)
    constant = AliasFreeActivation(C, ratio, ratio, 6 * ratio, 6 * ratio, activation="identity", dtype=torch.float64)
    torch.testing.assert_close(constant(torch.ones(1, C, 20).double())[..., 8:12], torch.ones(1, C, 4).double(),
                               rtol=0, atol=0.02)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"up_ratio": 5}, RuntimeError, "ratio must be from 1 to 4"),
        ({"up_kernel_size": 33}, RuntimeError, "kernel_size must be from 1 to 32"),
        ({"down_kernel_size": 2.0}, TypeError, "kernel_size must be an int"),
        ({"activation": "relu"}, ValueError, "unknown activation 'relu'"),
        ({"log_scale": None}, TypeError, "log_scale must be a bool"),
        ({"channels": 0}, RuntimeError, "of one channel or more"),
        ({"channels": (2, 3)}, TypeError, "ints"),
        ({"channels": None, "activation": "silu"}, TypeError, "ints"),
        ({"dtype": torch.float8_e4m3fn}, NotImplementedError, "takes .*, not torch.float8_e4m3fn"),
        ({"dtype": torch.int64, "activation": "silu"}, NotImplementedError, "takes .*, not torch.int64"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_called_is_not_made(given, error, text):
    with pytest.raises(error, match=text):
        AliasFreeActivation(**{"channels": C} | given)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_layer_refuses_what_the_function_refuses(frozen):
    layer = AliasFreeActivation(C).eval()
    if frozen:
        freeze(layer)
    with pytest.raises(TypeError, match="x must be a Tensor, not list"):
        layer([[1.0]])


def test_the_layer_in_other_dtypes_and_forms():
    layer = AliasFreeActivation(C, dtype=torch.bfloat16)
    assert {one.dtype for one in (*layer.parameters(), *layer.buffers())} == {torch.bfloat16}
    assert layer(X.bfloat16()).dtype == torch.bfloat16
    assert not list(AliasFreeActivation(C, activation="elu").parameters())
    assert "up_ratio=2, down_ratio=2, log_scale=True, activation='snake'" in repr(layer)


def test_a_frozen_layer_has_the_same_outputs_under_autocast():
    """Its exponentials would be rounded to 16 bits."""
    layer = AliasFreeActivation(C).eval().requires_grad_(False)
    for one in layer.parameters():
        one.uniform_(-1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(X)
        freeze(layer)
        assert torch.equal(layer(X), expected)
    assert layer._frozen is not None


class Limited(Snake):
    """The published function of numbers above its least alone."""

    def forward(self, x):
        limited = Snake(C, self.alpha_logscale)
        limited.alpha, limited.beta = (nn.Parameter(one.clamp(min=0.1)) for one in (self.alpha, self.beta))
        return limited(x)


@pytest.mark.parametrize("log_scale", [True, False])
def test_an_activation_of_limited_numbers_is_left_by_convert(log_scale):
    """A checkpoint may have others than those that it was compared with."""
    report = convert(Activation1d(Limited(C, log_scale)))
    assert report.activations == 0
    assert "it computes something else" in report.left[""]
