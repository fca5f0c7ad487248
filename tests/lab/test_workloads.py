"""The named workloads: sets, decoders, resolving names, lengths for sweeps."""

from itertools import pairwise

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import sweep, workloads
from numba_tconv.lab.measure.workloads import WORKLOADS


def test_decoders_feed_the_next_layer():
    """In decoders that crop their seams, each output has the length and channels of the next input."""
    for family in ("hifigan", "dac", "oobleck"):
        layers = [w.problem for name, w in WORKLOADS.items() if name.startswith(f"{family}_u")]
        assert [layer.out_length for layer in layers] == [layer.stride * layer.length for layer in layers]
        for layer, following in pairwise(layers):
            assert (layer.out_channels, layer.out_length) == (following.in_channels, following.length)


def test_an_expanded_weight_is_named_as_such():
    expanded = {name for name, workload in WORKLOADS.items() if workload.expanded_weight}
    assert expanded == {f"bigvgan_{channels}" for channels in (24, 48, 96, 192, 384, 768)}


def test_an_unknown_name_is_answered_with_close_ones():
    with pytest.raises(ValueError, match=r"'hifigan_u9'.*hifigan_u[1-4]"):
        workloads.get("hifigan_u9")


def test_sets_and_names_expand_without_repeating():
    names = [workload.name for workload in workloads.expand(["kb79", "kernelbench", "depthwise", "audio"])]
    assert names == ["kb79", "kb64", "kb74", "depthwise", "hifigan_u1", "hifigan_u3", "dac_u1", "oobleck_u4"]


def test_a_row_leads_back_to_what_was_measured():
    for name, workload in WORKLOADS.items():
        length = workload.problem.length
        assert workloads.of_row(name, length) is workload
        assert workloads.of_row(name, length + 1) is None
        resized = workloads.at_length(workload, 77, 3)
        assert (resized.problem.batch, resized.problem.length) == (3, 77)
        assert workloads.of_row(f"{name}@batch3", 77) == resized


@pytest.mark.parametrize("name", ["kb65", "kb65@batch2", "kb64@", "kb64@batch", "kb64@batchx", "kb64@batch2@batch3"])
def test_other_rows_lead_nowhere(name):
    assert workloads.of_row(name, 65536) is None


def test_a_layer_of_sizes_is_named_after_them():
    for workload in WORKLOADS.values():
        named = workloads.of_sizes(workload.problem)
        assert workloads.layer(named.name).problem.layer == workload.problem.layer
        resized = workloads.at_length(named, 77, 3)
        assert workloads.of_row(resized.name, 77).problem == resized.problem
    names = {workloads.of_sizes(workload.problem).name: workload for workload in WORKLOADS.values()}
    assert names["c32to64k3s2p1d2"].name == "kb79"
    assert names["c512to512k4s2p1g512"].name == "depthwise"
    assert names["c128to128k3"].name == "kb64"
    p = Problem(1, 4, 6, 3, 5, stride=3, padding=2, output_padding=1, groups=2, dilation=2, bias=True)
    assert workloads.of_sizes(p).name == "c4to6k3s3p2op1d2g2bias"
    assert workloads.layer("c4to6k3s3p2op1d2g2bias").problem == p
    assert names["c512to256k10s5p3op1"].name == "xcodec_u1"
    assert workloads.layer("kb79") is WORKLOADS["kb79"]
    assert workloads.of_row("c32to64k3s2p1d2", 64) is None
    assert workloads.of_row("c32to63k3g2@batch1", 64) is None  # groups that do not divide


def test_lengths_of_a_sweep_are_powers_of_two_of_output():
    p = workloads.get("hifigan_u1").problem
    assert sweep.lengths(p) == [2**n for n in range(7, 18)]
    assert sweep.lengths(p, 1000, 5000, 4) == [128, 512]
    assert sweep.lengths(p, 1, 16) == [1, 2]
    assert sweep.neighbours([128, 256, 512, 1024]) == [255, 257, 511, 513, 1023, 1025]
    assert sweep.neighbours([1]) == [2]
    with pytest.raises(ValueError, match="no power of two from 5 to 7"):
        sweep.lengths(p, 5, 7)


def test_the_layers_that_are_swept_are_workloads():
    assert set(sweep.LAYERS) <= set(WORKLOADS)
