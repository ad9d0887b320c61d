"""Takes from the calling process the rights that a decoder of media does not need: memory, files, sockets, network."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys

_NICENESS = 10
"""Niceness of a process that decodes. A worker that wants the same core gets nine times its CPU time, because other
requests wait for the worker. With much less CPU time, a busy host would never decode an image in time."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of Landlock's system calls, which are the same on all architectures of Linux."""
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights on files, each one bit, by the first version of Landlock that knows so many."""
_TCP_RIGHTS, _SCOPES = 0b11, 0b11
"""Bits of Landlock's TCP rights (bind, connect; from version 4 on) and of its scopes (abstract Unix sockets, signals;
from version 6 on)."""


def confine(memory: int) -> None:
    """Restrict this process permanently. Restrictions that the system does not have or allow are left out.

    All modules must have been imported, because no file can be opened afterwards.

    Args:
        memory: largest size of the address space, in bytes.
    """
    os.nice(_NICENESS)
    if sys.platform == "linux":
        # An item that arrives does not interrupt a thread of a worker at once, which its whole team would wait for.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        leave_network()
        _forbid_files()
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays open; no further file and no socket can be opened
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (limit, limit))


def leave_network() -> bool:
    """Move this process to an empty network of its own. Return whether the system allows this.

    Some containers forbid the move, although `/proc/sys/user/max_user_namespaces` is not 0. The other limits remain.
    """
    return bool(ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)


def _forbid_files() -> None:
    """Forbid, by Landlock, opening, running, renaming and removing files, TCP, and signals to other processes.

    See https://docs.kernel.org/userspace-api/landlock.html.
    """
    libc = ctypes.CDLL(None)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return
    files = _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= version)]
    handled = [(1 << files) - 1, *[_TCP_RIGHTS] * (version >= 4), *[_SCOPES] * (version >= 6)]
    # A right that the set handles is forbidden, because the set has no rules that allow it.
    rights = (ctypes.c_uint64 * len(handled))(*handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rights, ctypes.c_size_t(ctypes.sizeof(rights)), 0)
    if ruleset < 0:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0)))
    libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
