"""The mathematics: index formula, validated sizes, precisions. No GPU."""
