"""Which worker may touch which block: leases, cached blocks and their places. Pure."""
