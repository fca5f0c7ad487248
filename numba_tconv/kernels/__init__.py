"""The ladder: every rung by its name, from the slowest to the fastest; then the rungs for special problems."""

from . import depthwise, k1_gather, k2_polyphase, k3_shared_tile, k4_register_tile, k5_dmma, k5_mma, k6_wgmma
from .rung import Rung

LADDER = (
    k1_gather.Gather(),
    k2_polyphase.Polyphase(),
    k3_shared_tile.SharedTile(),
    k4_register_tile.RegisterTile(),
    k5_mma.WarpMatrix(),
    k6_wgmma.WarpgroupMatrix(),
)
RUNGS: dict[str, Rung] = {rung.name: rung for rung in (*LADDER, k5_dmma.DoubleMatrix(), depthwise.Depthwise())}
