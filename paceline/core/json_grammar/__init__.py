"""Translation of JSON schemas into grammars of the library llguidance, for JSON and for other notations of its values.

The library reads schemas itself, but its strings lack most of JSON's escapes, its numbers need not end, it refuses many
keywords, and some of its grammars lead into dead ends. Here, paths that cannot end are removed from a grammar before it
is written, and keywords that cannot be enforced are listed.

`compiler` is the way in. A schema takes four steps:

1. `document` finds the target of a `$ref`.
2. `conjunctions` resolves `allOf`, `anyOf`, `oneOf`, `not`, `if` and `dependent…` to lists of facts.
3. Facts are read: `facts` knows types, counts, bounds, patterns and items, `formats` has the patterns of formats,
   `members` finds the schemas of an object's members, and `fitting` says whether a given value fits.
4. Rules are written: `compiler` has `enum` and `const`, `scalars` has null, booleans, numbers and texts, `arrays` and
   `objects` have the rest, and `builder` has what these files share.

`notations` has the notations in which values are written: JSON, and those of calls that are no JSON. `parameters` reads
arguments whose text does not show their type. `builder` and its users take all marks and quotes from the notation.

Below them, `rules` is a grammar as data. `numbers`, `strings`, `patterns` and `pattern_characters` make regular
expressions, from sets of characters in `ranges`, and `languages` asks the library whether an expression can match.
"""
