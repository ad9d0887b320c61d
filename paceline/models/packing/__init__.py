"""Weights in the order that kernels read, shared by all workers of a host as mapped files."""
