"""Answers to an operator's questions, as sentences about simulations."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.simulator.recorder import MINUTE
from paceline.simulator.result import Result
from paceline.simulator.scenario import PlannedFailure
from paceline.simulator.search import Found
from paceline.simulator.text import three_digits

PAYS = 0.02
"""Least relative improvement of one fleet over another that counts as a difference."""


def on_disaggregation(apart: Found, together: Found) -> str:
    """Return a sentence that says whether disaggregation pays.

    Args:
        apart: result of a disaggregated fleet.
        together: result of an aggregated fleet under the same load.
    """
    one, other = apart.result, together.result
    load = "this load"
    if one.is_met and other.is_met and one.cost and other.cost:
        better = 1 - one.cost / other.cost
        costs = f"it costs {three_digits(one.cost)} and the aggregated fleet {three_digits(other.cost)}"
        what = f"{costs}, and both meet the objectives"
    else:
        better = one.goodput / other.goodput - 1 if other.goodput else float(one.goodput > 0)
        first_goodput, others = three_digits(one.goodput), three_digits(other.goodput)
        what = f"goodput is {first_goodput} requests/s, that of the aggregated fleet {others}"
        load += " with so many workers"  # another ratio of the roles, which --find looks for, may be better
    if better > PAYS:
        return f"Disaggregation pays for {load}: {what}."
    if better < -PAYS:
        return f"Disaggregation does not pay for {load}: {what}."
    itl, theirs = (max((c.itl.p99 for c in fleet.classes.values()), default=0.0) for fleet in (one, other))
    return (
        f"Disaggregation makes little difference in goodput and cost for {load}: {what}. "
        f"The 99th percentile of ITL is {itl * 1000:.0f} ms with it and {theirs * 1000:.0f} ms without."
    )


def on_caches(sizes: Sequence[Found]) -> str:
    """Return a sentence that recommends the smallest cache whose result is close to the best.

    Args:
        sizes: results of one fleet, or of the cheapest fleet for each size, with caches of at least two sizes.
    """
    ordered = sorted(sizes, key=lambda found: found.tokens)
    are_met = all(found.result.is_met and found.result.cost for found in ordered)
    # For each value, larger is better.
    values = [-found.result.cost if are_met else found.result.goodput for found in ordered]
    best = max(values)
    chosen = next(found for found, value in zip(ordered, values) if best - value <= PAYS * abs(best))
    what = "cost" if are_met else "goodput"
    hits = ", ".join(f"{found.tokens:,} tokens: {found.result.hit_rate:.0%} of the prompts" for found in ordered)
    missed = "" if any(found.result.is_met for found in ordered) else " The objectives are missed with all of them."
    return (
        f"{chosen.tokens:,} tokens of cache on each host are enough: {what} differs by less than {PAYS:.0%} from the "
        f"best of these sizes. Found in caches with {hits}.{missed}"
    )


def on_failure(failure: PlannedFailure, result: Result, share: float) -> str:
    """Return a sentence about the effect of a failure on the requests of each minute.

    Args:
        share: share of the requests that has to be within the objectives, from 0 to 1.
    """
    within, at = result.within(), int(failure.at / MINUTE)
    later = {minute: good for minute, good in enumerate(within) if minute >= at and good is not None}
    what = f"{failure.share:.0%} of the workers fail at {failure.at:.0f} s"
    if not later:
        return f"{what}, after the last request has come; let them fail earlier."
    before = next((f"{good:.0%} of the requests before, " for good in reversed(within[:at]) if good is not None), "")
    worst = f"{what}. Within objectives are {before}{min(later.values()):.0%} in the worst minute from then on"
    late = [minute for minute, good in later.items() if good < share]
    if not late:
        return f"{worst}."
    if late[-1] == max(later):
        return f"{worst}, and less than {share:.0%} until the end."
    return f"{worst}, and {share:.0%} again after {(late[-1] + 1) * MINUTE - failure.at:.0f} s."
