"""Routing: the choice of workers for a sequence. Pure functions of a request and a snapshot of the fleet.

In: candidates with loads and cached tokens. Out: a placement, or None if no worker has room.
"""
