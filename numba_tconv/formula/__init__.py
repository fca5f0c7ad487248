"""The mathematics: index formula, validated sizes, precisions. Needs no GPU."""
