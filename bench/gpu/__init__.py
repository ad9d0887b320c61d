"""Benchmarks for a machine with a CUDA device."""
