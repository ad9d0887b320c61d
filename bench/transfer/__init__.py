"""The way of blocks between processes, hosts and tiers."""
