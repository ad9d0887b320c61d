"""Access: the callers of the gateway, the things that they see, and their limits.

`decisions.py` decides for each route, `http/guard.py` applies the decisions, `book.py` has the keys, `limiter.py` has
the limits of each key. Routes find the caller in the request's scope.
"""
