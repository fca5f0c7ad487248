"""Curves against length: titles, labels, and lengths beside powers of two."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from numba_tconv.lab.measure import workloads
from numba_tconv.lab.report.figures import by_length, style
from tests.samples import ladder, row


def test_the_title_of_curves_is_what_their_rows_say():
    def measured(name, *speedups):
        layers = [workloads.at_length(workloads.get(name), 2**n, 16) for n in range(10, 10 + len(speedups))]
        return [row(one, slower=1.6 / gain) for one, gain in zip(layers, speedups, strict=True)]

    one = measured("kb64", 0.5, 2.0, 2.1, 2.1)
    assert by_length.finding(one) == (
        "2.0 to 2.1 times as fast as torch from 2,048 samples on (kb64, float32 ieee, batch 16)"
    )
    both = [*one, *measured("kb74", 9.0, 1.0, 2.5, 3.0)]
    assert by_length.finding(both) == (
        "2.1 to 3.0 times as fast as torch from 4,096 samples on (2 layers, float32 ieee, batch 16)"
    )
    slower = [replace(one, rung="k1_gather", ms_p50=9 * one.ms_p50) for one in both]
    assert by_length.finding([*slower, *both]) == by_length.finding(both)
    step = [replace(one, direction="step") for one in both]
    assert by_length.finding(step).startswith("Training: 2.1 to 3.0 times")


def test_neighbours_of_powers_of_two_are_told_but_not_drawn():
    def lengths(figure):
        return {x for line in figure.axes[0].lines for x in line.get_xdata()}

    def told(figure):
        return [text.get_text() for text in figure.texts if "one position more or less" in text.get_text()]

    def measured(length, slower=1.0):
        at = workloads.at_length(workloads.get("hifigan_u1"), length, 16)
        return [*ladder(at), row(at, "auto", slower=slower)]

    some = [*measured(2**7), *measured(2**8)]
    beside = [*measured(2**7 + 1, 2.0), *measured(2**8 - 1, 1.5), *measured(2**8 + 9, 9.0)]
    figure = by_length.throughput([*some, *beside])
    assert lengths(figure) == {2**10, 2**11}
    assert by_length.finding([*some, *beside]) == by_length.finding(some)
    (text,) = told(figure)
    gains = [one.opponent_ms / one.ms_p50 for one in beside if one.rung == "auto" and one.length != 2**8 + 9]
    assert len(set(gains)) == 2
    assert f"; one position more or less: {min(gains):.1f} to {max(gains):.1f} times as fast; roofline" in text
    assert not told(by_length.throughput(some))
    assert lengths(by_length.throughput(measured(2**7 + 1))) == {2**10 + 8}


def test_the_selection_has_a_curve_if_it_is_the_fastest_at_half_of_the_lengths():
    layers = [workloads.at_length(workloads.get("kb64"), 2**n, 16) for n in (10, 12, 14)]
    for count, has in ((2, True), (3, False)):
        some = [*map(row, layers[:count]), *(row(one, "auto") for one in layers[1:count])]
        figure = by_length.throughput([*some, row(layers[0], "auto", slower=1.0)])
        assert ("auto" in [label for _, label in figure.axes[0].curves]) == has


def test_labels_of_close_ends_stand_apart_and_others_beside_their_ends():
    axes = Figure().subplots()
    axes.set_ylim(0, 100)
    ends = {"top": 90, "third": 1.5, "first": 1, "second": 1.2}
    style.label_points(axes, [((0, y), name) for name, y in ends.items()])
    scale = 72 / axes.figure.dpi
    places = {one.get_text(): axes.transData.transform(one.xy)[1] * scale + one.xyann[1] for one in axes.texts}
    assert [one.get_text() for one in axes.texts if one.xyann[1] == 0] == ["first", "top"]
    assert places["second"] == pytest.approx(places["first"] + style.GAP)
    assert places["third"] == pytest.approx(places["second"] + style.GAP)
