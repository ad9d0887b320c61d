"""The gateway's queue: the order of those who wait, and refusals. The decisions are pure functions."""
