"""The gateway: the HTTP API, and the decisions which workers run a request.

A request passes these packages from top to bottom; imports go the same way.

api        routes and bodies of each API, and the formats of answers
gateway    all that one gateway process owns; model_fleet is one model with its fleet
telemetry  metrics, and the books of traces
sequences  the life of a sequence: its attempts, the next attempt after a failure, and when it is given up
planning   from bodies to a plan: prompts, media, constraints, sampling parameters
queueing   which requests wait, which one is next, which ones are refused
fleet      the members of the cluster, their loads and caches, and calls to them
routing    which workers run a sequence: pure functions
http       connections, bodies, errors and access, before any route
store      the database of data that is kept for clients: responses, files, batches
"""
