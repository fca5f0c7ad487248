"""The rung for few channels a group."""
