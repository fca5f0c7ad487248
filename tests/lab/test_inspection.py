"""Reports of compiled kernels, and what ``inspect`` prints of them; nothing is compiled."""

import subprocess
from collections import Counter
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.lab.machine_code import inspection, offline
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import RUNGS

LOG = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
    48 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem"""


def report(cc=(9, 0), threads=256, registers=32, shared=0, **values):
    made = dict(name="k", cc=cc, threads=threads, registers=registers, shared_bytes=shared)
    return offline.Report(**made, **dict(spill_bytes=0, local_bytes=0, ptx="", cubin=b"", log="") | values)


@pytest.mark.parametrize(
    ("values", "blocks", "occupancy"),
    [
        (dict(threads=256), 8, 1.0),  # 2048 threads
        (dict(threads=32), 32, 0.5),  # 32 blocks
        (dict(threads=33), 32, 33 / 64),
        (dict(threads=65, registers=16), 21, 21 * 65 / 2048),  # of 96 lanes
        (dict(threads=128, registers=128), 4, 0.25),  # 65,536 registers
        (dict(threads=128, registers=121), 4, 0.25),
        (dict(threads=128, registers=33), 12, 0.75),
        (dict(shared=227 * 1024), 1, 0.125),
        (dict(shared=113 * 1024), 2, 0.25),
        (dict(shared=114 * 1024), 1, 0.125),
        (dict(shared=228 * 1024), 0, 0.0),
        (dict(threads=1024), 2, 1.0),
        (dict(threads=1025), 0, 0.0),
        (dict(cc=(7, 5), threads=256), 4, 1.0),
        (dict(cc=(9, 0, "a"), threads=512), 4, 1.0),
    ],
    ids=str,
)
def test_blocks_are_as_many_as_every_limit_lets_be(values, blocks, occupancy):
    found = report(**values)
    assert (found.blocks_per_multiprocessor, found.occupancy) == (blocks, occupancy)


@pytest.mark.parametrize(("dynamic", "shared"), [(None, 512 + 1000), (0, 512), (256, 768)])
def test_a_report_is_read_from_the_compilers_log(monkeypatch, dynamic, shared):
    compiled = []
    monkeypatch.setattr(offline, "_machine_code", lambda *given: compiled.append(given) or (b"machine code", LOG))
    kernel = SimpleNamespace(name="k", threads=96, shared_bytes=1000, kept_ptx=lambda cc: f"ptx of {cc}")
    expected = dict(name="k", cc=(9, 0, "a"), threads=96, registers=40, spill_bytes=40, local_bytes=48)
    expected |= dict(shared_bytes=shared, ptx="given", cubin=b"machine code", log=LOG)
    assert asdict(offline.report(kernel, shared_bytes=dynamic, ptx="given")) == expected
    found = offline.report(kernel, (8, 0))
    assert (found.cc, found.ptx) == ((8, 0), f"ptx of {offline.target((8, 0))}")
    assert compiled == [("given", (9, 0, "a")), (found.ptx, (8, 0))]
    monkeypatch.setattr(offline, "_machine_code", lambda *given: (b"", "Used 9 registers"))
    none = offline.report(kernel, ptx="given", shared_bytes=0)
    assert (none.registers, none.spill_bytes, none.local_bytes, none.shared_bytes) == (9, 0, 0, 0)


def test_instructions_and_loops_are_found_in_text():
    sass = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 FFMA.FTZ R2, R3, R4, R2 ;
        /*0020*/             @UP1 UMOV UR4, 0x1 ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0050*/                   BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0070*/                   EXIT ;
"""
    mix = {"MOV": 1, "FFMA.FTZ": 1, "UMOV": 1, "BRA": 3, "IADD3": 1, "EXIT": 1}
    assert offline.instructions(sass) == mix
    first, second = offline.loops(sass)
    assert offline.instructions(first) == {"FFMA.FTZ": 1, "UMOV": 1, "BRA": 1}
    assert offline.instructions(second) == {"IADD3": 1, "BRA": 1}
    assert first.startswith(".L_x_1:")
    assert offline.product_loops(sass) == [first]
    with pytest.raises(ValueError, match="no loop of this code multiplies and adds"):
        offline.product_loops(second)


def test_programs_of_nvidias_packages_come_before_those_in_path(monkeypatch, tmp_path):
    monkeypatch.setattr(offline.shutil, "which", lambda name: {"ptxas": "/bin/ptxas"}.get(name))
    spec = ModuleSpec("nvidia", None, is_package=True)
    monkeypatch.setattr(offline, "find_spec", lambda name: spec)
    assert offline.tool("ptxas") == "/bin/ptxas"
    assert offline.tool("nvdisasm", optional=True) is None
    with pytest.raises(offline.ToolMissing, match=r"^nvdisasm was not found: .* nvidia-cuda-nvdisasm$"):
        offline.tool("nvdisasm")
    for folder in ("cu12", "cu13"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin" / "ptxas").touch()
    spec.submodule_search_locations.append(str(tmp_path))
    assert offline.tool("ptxas") == str(tmp_path / "cu12" / "bin" / "ptxas")
    monkeypatch.setattr(offline, "find_spec", lambda name: None)
    assert offline.tool("ptxas") == "/bin/ptxas"


@pytest.mark.parametrize(("out", "err", "said"), [("out", "err \n", "err"), ("out", "", "out")])
def test_a_program_that_fails_is_named_with_what_it_says(monkeypatch, out, err, said):
    done = SimpleNamespace(returncode=0, stdout=out, stderr=err)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done)
    assert offline._run("/bin/ptxas", "-v") == out + err
    done.returncode = 1
    with pytest.raises(RuntimeError, match=f"^ptxas failed: {said}$"):
        offline._run("/bin/ptxas", "-v")


REPORT = """
k6_wgmma for small (1, 64->64, k4, s2, p1, L 128) in tf32, config
{}
kernel main:

| compiled for | threads | registers | spilled B | local B | shared B | occupancy |
| ------------ | ------: | --------: | --------: | ------: | -------: | --------: |
| sm_90a       |     384 |       168 |         4 |       8 |     1024 |       19% |

21 instructions, most often:

| instruction | times | share |
| ----------- | ----: | ----: |
| FADD        |     9 |   43% |
{}
kernel sum:

| compiled for | threads | registers | spilled B | local B | shared B | occupancy |
| ------------ | ------: | --------: | --------: | ------: | -------: | --------: |
| sm_80        |     256 |        32 |         0 |       0 |        0 |      100% |

nvdisasm is missing, so instructions are not shown: pip install nvidia-cuda-nvdisasm
"""


def test_everything_of_a_rung_is_printed(monkeypatch, capsys):
    """The twelve most common instructions are listed."""
    main = report((9, 0, "a"), 384, 168, 1024, spill_bytes=4, local_bytes=8)
    mix = Counter({"FADD": 9} | {f"I{number}": 1 for number in range(12)})
    main.__dict__.update(instruction_mix=mix, name="main")
    other = report((8, 0))
    other.__dict__.update(instruction_mix=Counter(), name="sum")
    workload = workloads.get("small")
    reports, asked = [main, other], []
    monkeypatch.setattr(inspection, "compiled", lambda *given: asked.append(given) or ("config", reports))
    monkeypatch.setattr(type(RUNGS["k6_wgmma"]), "predicted_ms", lambda *_: 0.01234)
    listed = "".join(f"| I{number:<10} |     1 |    5% |\n" for number in range(11))
    for changes, said in ((None, ""), ({"stages": 3}, "not the configuration that the rung takes: no row is of it\n")):
        inspection.print_rung("k6_wgmma", workload, torch.float32, "tf32", H200, changes)
        predicted = f"{said}predicted: 0.0123 ms, without the launch\n"
        assert capsys.readouterr().out == REPORT.format(predicted, listed)
        assert asked.pop() == ("k6_wgmma", workload.problem, torch.float32, "tf32", H200, changes)
    reports.pop()
    monkeypatch.setattr(type(RUNGS["k6_wgmma"]), "predicted_ms", lambda *_: None)
    inspection.print_rung("k6_wgmma", workload, torch.float32, "tf32", H200)
    out = capsys.readouterr().out
    assert "kernel" not in out
    assert "predicted" not in out
    assert "launch fails" not in out
    large = report(threads=2048)
    large.__dict__.update(instruction_mix=Counter())
    inspection.print_report(large)
    assert "no multiprocessor takes such a block: the launch fails" in capsys.readouterr().out
