"""k6: producer warps and consumer warpgroups."""
