"""The APIs that clients see. Each has a package; modules that they share are listed below.

In: a body that `http` has read. Out: a plan for `ModelFleet`, then a response or a stream in the API's format.

respond          from a plan to a response or the events of a stream, for every API that generates
generation       the choices of one request, as one stream of deltas
resume           streams that a client continues at another gateway
"""
