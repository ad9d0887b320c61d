"""HTTP itself: connections, bodies, errors and access, before any route.

In: a connection. Out: a request whose path, caller and body have been checked, and the bytes of its answer.

listener       the socket, and its connections: limits of request heads, and answers to HTTP/1.0
paths          the table of routes and their callers; how clients and proxies spell paths; HEAD: GET without the body
middleware     makes the scope of a request, which everything after it reads
request_scope  this scope, and the threads for work on bodies
guard          lets a request in or refuses it, by the rules of `access`
bodies         limits of bodies, and compressed bodies
bounds         limits of the JSON in a body, and of the memory of all bodies
reading        bodies of routes, read on threads
errors         errors to answer with, refusals because no worker has room, and texts that no answer can have
error_responses  their answers, in the form of the path's API
event_streams  streams of events, which end when the client disconnects
access         keys, callers, and their limits
"""
