"""Loops of listings: from a label to the last branch back to it."""

import pytest

from numba_tconv.lab.machine_code.offline import loops, product_loops

LISTING = """\
    bra $L_end;
$L_outer:
    add.s64 %rd1, %rd1, 1;
    @%p0 bra $L_skip;
$L_inner:
    fma.rn.f32 %f1, %f2, %f3, %f1;
    @%p1 bra $L_inner;
$L_skip:
    @%p2 bra $L_outer;
    @%p3 bra $L_outer;
$L_end:
    ret;"""


def test_a_loop_ends_at_the_last_branch_back():
    lines = LISTING.splitlines()
    assert sorted(loops(LISTING), key=len) == ["\n".join(lines[4:7]), "\n".join(lines[1:10])]


def test_loops_of_products_multiply_and_add():
    copy = "$L_copy:\n    ld.global.f32 %f1, [%rd1];\n    bra $L_copy;\n"
    assert len(loops(copy + LISTING)) == 3
    assert product_loops(copy + LISTING) == product_loops(LISTING) == loops(LISTING)
    with pytest.raises(ValueError, match="no loop of this code multiplies and adds"):
        product_loops(copy)
