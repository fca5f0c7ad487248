"""Index formula, validated sizes, precisions."""
