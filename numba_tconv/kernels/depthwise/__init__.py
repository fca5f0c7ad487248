"""The rung for one or a few channels a group."""
