"""Files of models: digests of their content, locks, leases, reading ahead, and the cache of what was made from them."""
