"""k6: producer warps copy, consumer warpgroups multiply and store."""
