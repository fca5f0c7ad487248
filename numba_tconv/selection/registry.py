"""The ladder, slowest to fastest; then rungs for special problems."""

from numba_tconv.kernels import k1_gather, k2_polyphase, k3_shared_tile
from numba_tconv.kernels.depthwise import kernel as depthwise
from numba_tconv.kernels.k4_register_tile import kernel as k4_register_tile
from numba_tconv.kernels.k5_dmma import kernel as k5_dmma
from numba_tconv.kernels.k5_mma import kernel as k5_mma
from numba_tconv.kernels.k6_wgmma import kernel as k6_wgmma
from numba_tconv.kernels.rung import Rung

LADDER = (
    k1_gather.Gather(),
    k2_polyphase.Polyphase(),
    k3_shared_tile.SharedTile(),
    k4_register_tile.RegisterTile(),
    k5_mma.WarpMatrix(),
    k6_wgmma.WarpgroupMatrix(),
)
RUNGS: dict[str, Rung] = {rung.name: rung for rung in (*LADDER, k5_dmma.DoubleMatrix(), depthwise.Depthwise())}
