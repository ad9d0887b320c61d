"""The APIs that clients see. Each has its room; what they share lies here.

In: a body that `http` has read. Out: a plan for `ModelFleet`, then a response or a stream in the API's format.

respond          from a plan to a response, for every API that generates
generation       the choices of one request, as one stream of deltas
streaming        the events of a streamed answer
resume           streams that a client continues at another gateway
"""
