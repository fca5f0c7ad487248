"""k6: warps that copy, warpgroups that multiply and store."""
