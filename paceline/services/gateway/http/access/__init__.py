"""Access: the callers of the gateway, and their limits.

`http/paths.py` has the callers of each route, `http/guard.py` lets requests in, `keys.py` has the keys, `limiter.py`
has the limits of each key. Routes find the caller in the request's scope.
"""
