"""The ladder: every rung by its name, from the slowest to the fastest."""

from . import k1_gather, k2_polyphase, k3_shared_tile, k4_register_tile
from .rung import Rung

LADDER = (k1_gather.Gather(), k2_polyphase.Polyphase(), k3_shared_tile.SharedTile(), k4_register_tile.RegisterTile())
RUNGS: dict[str, Rung] = {rung.name: rung for rung in LADDER}
