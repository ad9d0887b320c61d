"""Translation of JSON schemas into grammars of the library llguidance.

The library reads schemas itself, but its strings lack most of JSON's escapes, its numbers need not end, it refuses many
keywords, and some of its grammars lead into dead ends. Here, a grammar is cut to the paths that can end before it is
written, and keywords that cannot be enforced are listed.
"""
