"""The training study on the CPU: the decoder, its data, and the rows of a run."""

import numpy as np
import pytest
import torch
from torch import nn

from numba_tconv import ConvTranspose1d
from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import ahead, rows
from numba_tconv.lab.studies import training
from numba_tconv.lab.studies.training import COEFFICIENTS, FRAME, HARMONICS, LAYERS, SAMPLE_RATE, Sizes
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

TINY = Sizes(batch=2, samples=512, widths=(8, 4))


def waves(count=2, samples=SAMPLE_RATE):
    return training.waveforms(count, samples, torch.Generator().manual_seed(1))


def test_waveforms_are_in_range_and_in_band():
    made = waves(count=8)
    assert made.shape == (8, 1, SAMPLE_RATE)
    torch.testing.assert_close(made.abs().amax(-1), torch.ones(8, 1))
    power = np.abs(np.fft.rfft(made.double().numpy())) ** 2  # one bin a hertz
    assert power[..., 80 : 400 * HARMONICS + 100].sum() > 0.99 * power.sum()
    assert not torch.equal(made[0], made[1])


def test_the_representation_is_the_cosine_transform_of_frames():
    made = waves(samples=5 * FRAME)
    found = training.representation(made)
    assert found.shape == (2, COEFFICIENTS, 5)
    frame = made[1, 0, 3 * FRAME : 4 * FRAME].double().numpy()
    mirrored = np.fft.fft(np.concatenate([frame, frame[::-1]]))[:COEFFICIENTS]
    shifted = (mirrored * np.exp(-0.5j * np.pi * np.arange(COEFFICIENTS) / FRAME)).real / 2 * np.sqrt(2 / FRAME)
    np.testing.assert_allclose(found[1, :, 3].numpy(), shifted, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_decoder_has_three_of_the_layers_and_the_frames_length(layer):
    model = training.decoder(layer, TINY.widths)
    layers = [module for module in model if isinstance(module, nn.ConvTranspose1d)]
    assert len(layers) == 3
    assert all(isinstance(one, ConvTranspose1d) == (layer is ConvTranspose1d) for one in layers)
    assert model(torch.randn(2, COEFFICIENTS, 7)).shape == (2, 1, 7 * FRAME)


def test_snake_is_its_formula():
    snake = training.Snake(3)
    nn.init.constant_(snake.frequency, 0.5)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(snake(x), x + 2 * (0.5 * x).sin() ** 2)


@pytest.mark.parametrize("arithmetic", training.ARITHMETICS)
def test_both_kinds_of_layers_learn_alike(arithmetic):
    """On the CPU torch computes both, so they agree to the bit if they start alike and see the same."""
    steps = training.RECORDED_EVERY + 2
    recorded = training.train(arithmetic, steps, TINY, "cpu")
    theirs, ours = ([row for row in recorded if row.layers == name] for name in LAYERS)
    assert [row.step for row in ours] == [training.RECORDED_EVERY, steps]
    assert [row.loss for row in ours] == [row.loss for row in theirs]
    assert ours[-1].loss < ours[0].loss
    assert all(row.ms > 0 and row.arithmetic == arithmetic for row in recorded)


def test_a_step_is_forward_backward_and_the_optimizers():
    torch.manual_seed(5)
    model, generator = training.decoder(nn.ConvTranspose1d, TINY.widths), torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)
    for _ in range(3):
        made = training.waveforms(TINY.batch, TINY.samples, generator)
        loss = (model(training.representation(made)) - made).square().sum() / made.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert training.train("ieee", 3, TINY, "cpu", seed=5)[0].loss == pytest.approx(loss.item(), rel=1e-5)


def test_bfloat16_is_autocast():
    ieee, bf16 = (training.train(arithmetic, 1, TINY, "cpu")[-1].loss for arithmetic in ("ieee", "bf16"))
    assert 0 < abs(bf16 - ieee) < 0.01 * ieee


def test_kernels_of_all_arithmetics_are_compiled_ahead():
    calls = training.calls_ahead(Sizes())
    forward = [call for call in calls if call.rung in RUNGS]
    assert [call.dtype for call in forward] == [torch.float32] * 6 + [torch.bfloat16] * 3
    assert [(p.batch, p.in_channels, p.out_channels, p.length) for p in (call.problem for call in forward)] == 3 * [
        (32, 16, 512, 512), (32, 512, 256, 2048), (32, 256, 1, 8192)
    ]  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        others = {GRADIENTS[call.rung].of for call in calls if call.rung not in RUNGS and call.dtype == dtype}
        assert others >= {"grad_input", "grad_weight"}


def test_the_command_records_every_arithmetic(tmp_path, monkeypatch, capsys):
    asked, train, path = [], training.train, tmp_path / "training" / "rows.csv"

    def on_the_cpu(arithmetic, steps, sizes, device):
        asked.append((arithmetic, sizes, device))
        return train(arithmetic, steps, TINY, "cpu")

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(training, "calls_ahead", lambda sizes: [sizes])
    monkeypatch.setattr(ahead, "compile_all", asked.extend)
    monkeypatch.setattr(training, "train", on_the_cpu)
    for steps in (1, 2):  # the second replaces the first
        assert cli.main(["train", "--steps", str(steps), "--out", str(path)]) == 0
    assert asked == 2 * [Sizes(), *((arithmetic, Sizes(), "cuda") for arithmetic in training.ARITHMETICS)]
    written = rows.read(path, training.Step)
    assert {(row.arithmetic, row.layers, row.step) for row in written} == {
        (arithmetic, name, 2) for arithmetic in training.ARITHMETICS for name in LAYERS
    }
    assert capsys.readouterr().out.endswith(f"rows written to {path}\n")
