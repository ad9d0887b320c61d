"""HTTP itself: connections, bodies, errors and access, before any route.

protocol  one connection: limits of request heads, and answers to HTTP/1.0
paths     the path of a route, however a client or a proxy spells it
head      HEAD, which is GET without the body
bodies    limits of bodies, and compressed bodies
"""
