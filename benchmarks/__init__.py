"""Benchmarks anyone can run; each prints what it compares, in one run."""
