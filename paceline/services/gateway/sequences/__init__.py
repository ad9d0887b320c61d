"""The life of a sequence, from its plan to its last token.

In: a prompt of a plan. Out: events in order, without gaps and repetitions, whatever happens to workers. `runner`
repeats attempts, `attempt` is one of them, `progress` is how far the sequence has got, `patience` says when to give up,
`traces` records what happened.
"""
