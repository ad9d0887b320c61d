"""Models that run through their own code in `transformers`, with our attention over paged caches in place of theirs."""
