"""Who may call the gateway, what a caller sees, and how much it may use.

`decisions.py` decides for each route, `guard.py` applies the decisions, `book.py` has the keys, `limiter.py` has the
limits of each key. Routes ask `caller_of(request)`.
"""
