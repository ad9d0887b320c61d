"""A running server under the load of its clients."""
