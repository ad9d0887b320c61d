"""Blocks that move: between hosts, between the arena and the disk, and into the cache of a host."""
