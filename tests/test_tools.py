"""torch's tools on a converted model: fx, export, ONNX, AOTInductor, TorchScript, fusion of batch norms.

CPU tensors count as a GPU's, so that the tools meet the operators.
"""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim

import numba_tconv
from numba_tconv import ConvTranspose1d, convert, routed
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import operators as ops

SIZES = ({0: Dim("batch", min=1, max=64), 2: Dim("length", min=2, max=4096)},)


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    monkeypatch.setattr(functional, "_ours", lambda *_: True)


@pytest.fixture
def model():
    """Two transposed convolutions, one with groups and a dilation."""
    model = nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=1),
        nn.ConvTranspose1d(6, 4, 8, stride=4, padding=2, output_padding=1),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose1d(4, 4, 4, stride=2, padding=1, groups=4, bias=False, dilation=2),
    )
    assert int(convert(model)) == 2
    return model.eval()


def inputs(batch=2, length=7):
    return torch.randn(batch, 4, length)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_symbolic_trace(model):
    traced = torch.fx.symbolic_trace(model)
    assert targets(traced.graph).count(numba_tconv.conv_transpose1d) == 2
    for x in (inputs(), inputs(3, 11)):
        assert torch.equal(traced(x), model(x))


def test_a_tensor_with_a_function_of_its_own_is_given_ours():
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func, args, kwargs

    x, w = torch.randn(1, 2, 3), torch.randn(2, 1, 3).as_subclass(Named)
    func, args, kwargs = numba_tconv.conv_transpose1d(x, w, stride=2, variant="k1_gather")
    assert func is numba_tconv.conv_transpose1d
    assert args[0] is x
    assert args[1] is w
    assert args[2:] == (None, 2, 0, 0, 1, 1)
    assert kwargs == dict(variant="k1_gather", precision=None)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_has_torchs_operator_and_is_ours_within_routed(model, strict):
    exported = torch.export.export(model, (inputs(),), dynamic_shapes=SIZES, strict=strict)
    assert targets(exported.graph).count(torch.ops.aten.conv_transpose1d.default) == 2
    decomposed = targets(exported.run_decompositions().graph)
    assert decomposed.count(torch.ops.aten.convolution.default) == 3
    assert not any("numba_tconv" in str(target) for target in decomposed)
    x = inputs(3, 11)
    program = exported.module()
    torch.testing.assert_close(program(x), model(x))
    with torch.profiler.profile() as profile, routed():
        assert torch.equal(program(x), model(x))
    assert "numba_tconv::conv_transpose1d" in {event.name for event in profile.events()}


def test_what_was_named_is_exported_as_it_is():
    layer = ConvTranspose1d(4, 2, 4, precision="tf32x3")
    exported = torch.export.export(layer, (inputs(),))
    assert targets(exported.graph) == [ops.conv_transpose1d]
    assert "tf32x3" in exported.graph.find_nodes(op="call_function", target=ops.conv_transpose1d)[0].args


def test_onnx(model, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (inputs(),), file, dynamo=True, dynamic_shapes=SIZES, verbose=False)
    nodes = onnx.load(file).graph.node
    assert [node.op_type for node in nodes].count("ConvTranspose") == 2
    assert {node.domain for node in nodes} == {""}
    session = runtime.InferenceSession(file)
    for x in (inputs(), inputs(3, 11)):
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x))


LOAD = """
import sys, torch
program, x, expected = torch._inductor.aoti_load_package(sys.argv[1]), *torch.load(sys.argv[2])
torch.testing.assert_close(program(x), expected)
assert "numba_tconv" not in sys.modules
"""


@pytest.mark.thorough
@torch.no_grad()
def test_aot_inductor_packages_need_nothing_of_ours(tmp_path):
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 8, stride=4, padding=2)).eval()
    convert(model)
    exported = torch.export.export(model, (inputs(),))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    x = inputs()
    torch.save((x, model(x)), tmp_path / "tensors")
    command = [sys.executable, "-c", LOAD, package, tmp_path / "tensors"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_torch_jit_script_says_what_to_do_instead(model):
    for one in (model, model[1]):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace.* or torch\.export"):
            torch.jit.script(one)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_torch_jit_trace_keeps_the_operator(model):
    traced = torch.jit.trace(model, inputs())
    assert str(traced.inlined_graph).count("numba_tconv::conv_transpose1d") == 2
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    x = inputs(3, 11)
    assert torch.equal(torch.jit.load(file)(x), model(x))


def batch_norm(channels):
    norm = nn.BatchNorm1d(channels).eval()
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        tensor.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def test_a_batch_norm_is_fused_into_the_layer_before(model):
    norm, x = batch_norm(4), torch.randn(2, 6, 5)
    fused = nn.utils.fusion.fuse_conv_bn_eval(model[1], norm, transpose=True)
    assert type(fused) is ConvTranspose1d
    torch.testing.assert_close(fused(x), norm(model[1](x)))


def test_torch_ao_refuses_to_fuse_by_name(model):
    pair = nn.Sequential(model[1], batch_norm(4)).eval()
    with pytest.raises(AssertionError, match=r"fuser method for.*numba_tconv.*BatchNorm1d"):
        torch.ao.quantization.fuse_modules(pair, [["0", "1"]])
