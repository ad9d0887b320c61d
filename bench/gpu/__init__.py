"""Benchmarks that are meant for a machine with a CUDA device."""
