"""HTTP itself: connections, bodies, errors and access, before any route.

In: a connection. Out: a request whose path, caller and body have been checked, and the bytes of its answer.

listener       the socket
protocol       one connection: limits of request heads, and answers to HTTP/1.0
paths          the table of routes and their callers; how clients and proxies spell paths; HEAD: GET without the body
middleware     makes the scope of a request (`request_scope`), which everything after it reads
guard          lets a request in or refuses it, by the rules of `access`
bodies         limits of bodies, and compressed bodies
bounds         limits of the JSON in a body, and of the memory of all bodies
reading        bodies of routes, read on the threads of `pool`
texts          what JSON can spell and no answer can have
errors         errors to answer with, and refusals because no worker has room
error_responses  their answers, in the form of the path's API
json_answers   large answers in JSON
event_streams  streams of events, which end when the client disconnects
access         keys, callers, and their limits
"""
