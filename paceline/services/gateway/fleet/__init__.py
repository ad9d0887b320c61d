"""The cluster as this gateway knows it.

In: members from Redis, block events from kvtransfer, results of health checks, and this gateway's own calls. Out: the
state, load and cached blocks of each worker.
"""
