"""Constraints of answers: made from fields of requests, compiled on trial in separate processes, and remembered.

`fields` collects the fields of a request that say in which form its answers must be. `content` and `answer` make a
constraint from these fields, and `trial` compiles the constraint as a worker will. Both steps run in a child of the
process `server`, with limits on CPU time and memory. `compiler` is the gateway's end: it starts the process, lets
owners take turns, and remembers outcomes. So no worker, and no thread of the gateway, ever works on a constraint that
has not been tried.
"""
