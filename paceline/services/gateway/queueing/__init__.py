"""The gateway's queue: the order of waiting requests, and refusals. The decisions are pure functions.

In: a request's demand. Out: its turn, or a refusal with the seconds after which its client should come back.
"""
