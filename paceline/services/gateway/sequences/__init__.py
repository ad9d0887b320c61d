"""The life of a sequence, from its plan to its last token.

In: a prompt of a plan. Out: events in order, without gaps and repetitions, whatever happens to workers. `runner`
starts attempts until one succeeds, `attempt` is a single attempt, `progress` is how far the sequence has got,
`patience` decides when to give up a sequence, `traces` records what happened, `load` measures the work that sequences
make, `notices` tells others about them.
"""
