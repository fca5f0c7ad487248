"""What is computed: the index formula, validated sizes, precisions. No GPU."""
