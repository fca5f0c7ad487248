"""Figures of full-size rows show the rows' numbers in their places."""

from dataclasses import replace

import numpy as np
import pytest

from numba_tconv.formula.problem import COPY_BANDWIDTH, PEAK_FLOPS
from numba_tconv.kernels.k6_wgmma.choose import choose_whole, cost
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.lab.measure import search, workloads
from numba_tconv.lab.report import figures as plotting
from numba_tconv.lab.report.figures import by_rung, by_workload
from numba_tconv.runtime.device import H200
from tests.samples import SLOWER, in_mode, ladder, row, sweep

TENSOR = {"k5_mma": 2.6, "k6_wgmma": 1.2}


def whole_ladder(workload="kb64", **values):
    """Rungs in full precision, and tensor-core rungs in TF32."""
    tensor = [row(workload, name, slower=slower, precision="tf32", **values) for name, slower in TENSOR.items()]
    return [*ladder(workload, **values), *tensor]


@pytest.mark.parametrize(("slower", "said"), [((1.25, 2.5), "60%"), ((1.25, 2.0, 5.0), "50%")])
def test_the_title_of_shares_has_their_median(slower, said):
    rows = [row(name, slower=by) for name, by in zip(("kb64", "kb74", "kb79"), slower, strict=False)]
    assert f"layers, at {said} of the roofline" in by_workload.finding(rows)


def test_rows_of_cudnn_and_rows_without_a_roofline_are_not_drawn():
    beside = [row("kb74", roofline=None), row("kb79", "cudnn"), row("dac_u1", "cudnn", roofline=None)]
    (axes,) = plotting.shares([row(), *beside]).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["kb64"]
    assert "over 1 layer," in axes.get_title()
    assert plotting.errors([row(), *beside]).axes[0].get_title().endswith("of 2 measurements")


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def points(axes, marker):
    """The positions of one kind of mark."""
    return [tuple(xy) for line in axes.lines if line.get_marker() == marker for xy in line.get_xydata()]


def below(figure):
    return figure.get_supxlabel()


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_bars_are_times_on_one_logarithmic_axis():
    figure = plotting.ladder(whole_ladder())
    (axes,) = figure.axes
    floor = {name: workloads.get("kb64").problem.floor_ms(4, name) for name in ("ieee", "tf32")}
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    times = [floor["ieee"] * slower for slower in SLOWER.values()] + [floor["tf32"] * one for one in TENSOR.values()]
    assert ends == pytest.approx(times)
    assert axes.get_xscale() == "log"
    lines = [line.get_xdata()[0] for line in axes.lines]
    assert lines == pytest.approx([2.5 * floor["ieee"], floor["ieee"], 2.5 * floor["tf32"], floor["tf32"]])
    assert [text.get_text() for text in axes.get_yticklabels()] == [*SLOWER, *TENSOR]
    heights = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert heights == pytest.approx(axes.get_yticks())
    gain = times[0] / times[-1]
    assert f"k6_wgmma is {gain:,.0f} times as fast as k1_gather" in figure.get_suptitle()


def test_a_ladder_is_one_panel_a_workload_and_says_every_time():
    recorded = [*whole_ladder(), *ladder("hifigan_u3")]  # the second has no rows on tensor cores
    figure = plotting.ladder(recorded)
    assert [axes.get_title().split("'")[0] for axes in figure.axes] == ["kb64", "hifigan_u3"]
    assert [len(axes.patches) for axes in figure.axes] == [6, 4]
    for one in recorded:
        assert by_rung.milliseconds(one.ms_p50) in texts(figure)


def test_times_have_three_digits_at_least():
    assert [by_rung.milliseconds(ms) for ms in (1274.4, 99.96, 1.5, 0.1234)] == [
        "1,274 ms", "100 ms", "1.5 ms", "0.123 ms"
    ]  # fmt: skip


def test_the_ladder_is_of_float32_and_of_rungs_that_stand_on_it():
    beside = [
        row(rung="depthwise"),
        row(rung="k6_wgmma", precision="tf32x3"),
        row(rung="k6_wgmma", dtype="bfloat16"),
        row("dac_u1"),
    ]
    assert all(by_rung.shown(one) for one in whole_ladder())
    assert not any(by_rung.shown(one) for one in beside)


# --- throughput against intensity -------------------------------------------------------------------------------------


def test_marks_stand_at_the_intensity_of_their_problems_under_the_roofs():
    names = ("kb64", "kb79", "dac_u1")
    recorded = [one for name in names for one in whole_ladder(name)]
    ieee, tf32 = plotting.intensity(recorded).axes
    problems = [workloads.get(name).problem for name in names]
    for axes, precision, marker, slower in ((ieee, "ieee", "v", SLOWER["k4_register_tile"]), (tf32, "tf32", "x", 2.5)):
        floors = [p.floor_ms(4, precision) for p in problems]
        expected = [
            (p.flops / p.min_bytes(4), p.flops / ms / slower / 1e9) for p, ms in zip(problems, floors, strict=True)
        ]
        assert points(axes, marker) == [pytest.approx(one) for one in expected]
        x, roof = axes.lines[0].get_data()
        peak = PEAK_FLOPS[precision]
        assert roof * 1e12 == pytest.approx(np.minimum(np.array(x) * COPY_BANDWIDTH, peak))
        assert x[1] == pytest.approx(peak / COPY_BANDWIDTH)
        assert f"{peak / 1e12:g} TFLOP/s" in [text.get_text() for text in axes.texts]
        shown = [xy for line in axes.lines for xy in line.get_xydata()]
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert all(left <= x <= right and low <= y <= high for x, y in shown)


def test_the_title_of_intensities_says_which_layers_memory_bounds():
    layers = [row(name, precision=precision) for name in ("kb79", "dac_u1") for precision in ("ieee", "tf32")]
    title = plotting.intensity(layers).legends[0].get_title().get_text()
    assert title == "Memory bounds 1 of 2 layers in float32 tf32; 0 of 2 layers in float32 ieee"


def test_names_of_workloads_do_not_cover_each_other():
    near = [row(name) for name in ("kb64", "hifigan_u1", "encodec_u1", "oobleck_u1")]
    named = [text for text in texts(plotting.intensity(near)) if text in workloads.WORKLOADS]
    assert named == ["kb64", "hifigan_u1"]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_stand_in_the_line_of_their_direction_and_precision():
    recorded = [
        row("kb64", "k4_register_tile", relerr=1e-7, cudnn_relerr=2e-7),
        row("kb79", "k4_register_tile", relerr=5e-7, cudnn_relerr=4e-7),
        row("kb79", "k1_gather", slower=9.0, relerr=6e-7, cudnn_relerr=4e-7),
        row("kb64", "k6_wgmma", precision="tf32", relerr=3e-4, cudnn_relerr=3e-4),
        row("kb64", "auto", direction="step", relerr=2e-7, cudnn_relerr=9e-7),
    ]
    figure = plotting.errors(recorded)
    (axes,) = figure.axes
    labels = dict(zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True))
    assert list(labels.values()) == ["float32 ieee", "float32 tf32", "float32 ieee"]
    places = list(labels)
    found = [(min(places, key=lambda at: abs(at - line.get_ydata()[0])), list(line.get_xdata())) for line in axes.lines]
    assert found == [
        *((places[0], [1e-7, 5e-7]), (places[0], [2e-7, 4e-7])),
        *((places[1], [3e-4]), (places[1], [3e-4])),
        *((places[2], [2e-7]), (places[2], [9e-7])),
    ]
    assert texts(figure) == ["forward", "step"]
    assert axes.get_title() == "Errors are torch's or smaller in 3 of 4 measurements"


# --- predicted against measured ---------------------------------------------------------------------------------------

KB64 = workloads.get("kb64").problem


def tried(slower=1.0, **values):
    """A search over all configurations of kb64 that took ``slower`` times the prediction."""
    common = dict(time="2026-01-02T03:04:05Z", commit="0123abc", gpu="NVIDIA H200", workload="kb64", precision="tf32")
    common |= values
    return [
        search.Tried(
            **common,
            **search.described(config),
            chosen=False,
            ms_p50=slower * cost(KB64, config, H200),
        )
        for config in configs(KB64, common["precision"])
    ]


def test_configurations_stand_at_their_measured_and_predicted_times():
    found = configs(KB64, "tf32")
    figure = plotting.predicted(tried(2.0))
    (axes,) = figure.axes
    taken, others = points(axes, "P"), points(axes, ".")
    chosen = cost(KB64, choose_whole(KB64, "tf32"), H200)
    assert taken == [pytest.approx((2 * chosen, chosen))]
    assert len(others) == len(found) - 1
    assert all(measured == pytest.approx(2 * expected) for measured, expected in others)
    assert texts(figure) == ["kb64"], "a choice that is far off is named"
    assert "0123abc" not in below(figure)
    assert texts(plotting.predicted(tried(1.1))) == []


def test_every_precision_has_a_panel_of_its_own():
    both = {precision: tried(precision=precision) for precision in ("tf32", "bf16")}
    panels = plotting.predicted([*both["tf32"], *both["bf16"]]).axes
    assert [axes.get_title() for axes in panels] == [*both]
    for axes, some in zip(panels, both.values(), strict=True):
        assert len(points(axes, "P")) == 1
        assert len(points(axes, "P")) + len(points(axes, ".")) == len(some)


def test_the_title_says_how_often_the_choice_is_near_the_fastest():
    def title(some):
        return plotting.predicted(some).legends[0].get_title().get_text()

    start = "k6's cost model takes a tile within 5% of the fastest in"
    assert title(tried()) == f"{start} 1 of 1 searches"
    taken = choose_whole(KB64, "tf32")
    slow = [replace(one, ms_p50=2.0) if search.is_of(one, taken) else replace(one, ms_p50=1.0) for one in tried()]
    assert title(slow) == f"{start} 0 of 1 searches"


def test_what_is_no_longer_there_is_not_predicted():
    gone = [*tried(workload="kb63"), *(replace(one, stages=99) for one in tried())]
    assert plotting.predicted([]) is None
    assert plotting.predicted(gone) is None
    (axes,) = plotting.predicted([*gone, *tried()]).axes
    assert len(points(axes, "P")) + len(points(axes, ".")) == len(tried())


def test_a_search_is_drawn_with_the_rows(tmp_path):
    paths = plotting.draw_all([], tmp_path, searched=tried())
    assert [path.name for path in paths] == ["predicted_k6_wgmma.svg", "predicted_k6_wgmma.png"]


# --- axes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "x", "y"),
    [
        (lambda: plotting.shares([row()]), "share of the roofline", ""),
        (lambda: plotting.ladder(whole_ladder()), "time in ms", ""),
        (lambda: plotting.intensity(whole_ladder()), "FLOP / byte", "TFLOP/s"),
        (lambda: plotting.errors([row()]), "error against float64", ""),
        (lambda: plotting.predicted(tried()), "measured, ms", "predicted without the launch, ms"),
        (lambda: plotting.throughput(sweep()), "samples of output", "times as fast as torch"),
        (lambda: plotting.decoders([in_mode()]), "ms", ""),
    ],
    ids=["shares", "ladder", "intensity", "errors", "predicted", "throughput", "decoders"],
)
def test_axes_say_what_they_show(draw, x, y):
    figure = draw()
    assert all(axes.get_xlabel().startswith(x) for axes in figure.axes)
    assert (figure.get_supylabel() or figure.axes[0].get_ylabel()).startswith(y)


# --- captions ---------------------------------------------------------------------------------------------------------


def test_captions_name_gpu_and_newest_date_and_fit_in_the_figure():
    recorded = [
        replace(one, commit=f"{number:07x}", time=f"2026-01-{28 - number:02}T00:00:00Z")
        for number, one in enumerate(whole_ladder())
    ]
    figure = plotting.errors(recorded)
    said = below(figure).replace("\n", " ")
    assert said.startswith("NVIDIA H200, driver")
    assert said.endswith("2026-01-28")
    figure.draw_without_rendering()
    box = figure._supxlabel.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
