"""Models that run in their own code in `transformers`, with Paceline's attention over paged caches in place of their
own.
"""
