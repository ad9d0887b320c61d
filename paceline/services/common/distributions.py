"""Distributions of values, and times of steps, in messages between services."""

from __future__ import annotations

import itertools

from paceline.core.planner.distribution import Distribution
from paceline.core.step_loads import StepLoad
from paceline.proto import fleet_pb2 as pb


def distribution_to_pb(values: Distribution) -> pb.Distribution:
    """Return the message with whole counts. Another thread may add values meanwhile."""
    counts = sorted(dict(values.counts).items())
    buckets = [bucket for bucket, _ in counts]
    steps = [buckets[0], *(later - earlier for earlier, later in itertools.pairwise(buckets))] if buckets else []
    return pb.Distribution(buckets=steps, counts=[round(times) for _, times in counts], total=values.total)


def load_to_pb(load: StepLoad) -> pb.StepLoad:
    """Return the message of a load's totals."""
    seconds = distribution_to_pb(load.seconds)
    return pb.StepLoad(load=load.number, tokens=load.tokens, context=load.context, seconds=seconds)


def distribution_from_pb(message: pb.Distribution) -> Distribution:
    """Return the distribution. Buckets without a count are left out."""
    buckets = itertools.accumulate(message.buckets)
    return Distribution({bucket: float(times) for bucket, times in zip(buckets, message.counts)}, message.total)
