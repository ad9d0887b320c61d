"""The engine, a forward pass and kernels, without services."""
