"""Benchmarks: our own numbers, and ratios to peers measured in the same run, alternating."""
