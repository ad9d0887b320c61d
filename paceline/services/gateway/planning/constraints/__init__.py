"""Constraints of answers: made of requests' fields, compiled on trial in processes of their own, and remembered.

`fields` collects what a request says about the form of its answers. `content` and `answer` make a constraint of it, and
`trial` compiles it as a worker will. They run in a child of the process `server`, with limits on CPU time and memory.
`compiler` is the gateway's end: it starts the process, lets owners take turns at its places, and remembers
outcomes. So no worker, and no thread of the gateway, ever works on a constraint that has not been tried.
"""
