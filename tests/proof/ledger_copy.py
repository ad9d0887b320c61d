"""Copies of ledgers, about twenty times faster than `copy.deepcopy`, because exploring is mostly copying."""

from __future__ import annotations

import copy
from typing import TypeVar

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import LRU
from paceline.services.kvtransfer.ledger.lease import Lease
from paceline.services.kvtransfer.ledger.ledger import Ledger

Owner = TypeVar("Owner")


def copy_ledger(ledger: Ledger) -> Ledger:
    twin = copy_fields(ledger)
    pool = twin._pool = copy_fields(ledger._pool)
    book = twin._book = copy_fields(ledger._book)
    pool._index = [index.copy() for index in pool._index]
    pool._policy = _copy_policy(ledger._pool._policy)
    book._pool = pool
    book._live = {name: _copy_lease(lease) for name, lease in book._live.items()}
    book._draining = {key: _copy_lease(lease) for key, lease in book._draining.items()}
    return twin


def _copy_policy(policy: CachePolicy) -> CachePolicy:
    if not isinstance(policy, LRU):
        return copy.deepcopy(policy)
    twin = copy_fields(policy)
    twin._blocks = {name: copy.copy(block) for name, block in policy._blocks.items()}
    twin._queue = copy_fields(policy._queue)
    twin._queue._spans = {span: names.copy() for span, names in policy._queue._spans.items()}
    return twin


def copy_fields(owner: Owner) -> Owner:
    """Return a copy of an object with containers of its own."""
    twin = object.__new__(type(owner))
    for name, value in vars(owner).items():
        twin.__dict__[name] = value.copy() if hasattr(value, "copy") else value
    return twin


def _copy_lease(lease: Lease) -> Lease:
    twin = copy.copy(lease)
    twin.tables = [table.copy() for table in lease.tables]
    return twin
