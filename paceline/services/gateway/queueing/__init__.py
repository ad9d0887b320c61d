"""Who is admitted next, and who is refused: the pure decisions of the gateway's queue."""
