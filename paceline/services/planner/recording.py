"""The files of a planner's record, from which its decisions can be made again (`core/planner/replay.py`)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.planner.actions import Decision
from paceline.core.planner.planner import Planner
from paceline.core.planner.replay import Recorder, Replayed, replay
from paceline.core.planner.reports import Report

KEPT = 4
"""Number of full files that are kept, as FILE.1 (the newest) to FILE.4."""

log = logging.getLogger(__name__)


class RecordFile:
    """A planner whose decisions go to a file. Each file begins with the planner's state, so it can be replayed alone.

    Args:
        path: the file. An earlier record there is kept as FILE.1.
        most_bytes: size in bytes after which a new file begins.

    Raises ConfigError if the file cannot be written. Later errors are logged, because a full disk stops no planner.
    """

    def __init__(self, path: Path, most_bytes: int, planner: Planner) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._recorder = Recorder(planner)
        self._file: TextIO | None = None
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None

    def decide(self, report: Report) -> Decision:
        """Write the planner's decision to the file, and return it."""
        try:
            if self._file is None or self._file.tell() >= self._most_bytes:
                self._begin()
            decision, line = self._recorder.decide(report)
        except OSError as error:
            self._fail(error)
            return self._recorder.planner.decide(report)
        try:
            assert self._file is not None
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError as error:
            self._fail(error)
        return decision

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        """Rename the earlier files, and begin a new one."""
        self.close()
        self._file = None
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number + 1}") for number in range(KEPT))]
        for earlier, later in reversed(list(itertools.pairwise(names))):
            if earlier.exists():
                earlier.replace(later)
        self._file = self._path.open("w")
        self._file.write(f"{self._recorder.start()}\n")

    def _fail(self, error: OSError) -> None:
        log.warning("--record %s cannot be written: %s", self._path, error.strerror)
        self._file = None


def replay_file(path: Path) -> Iterator[Replayed]:
    """Make the decisions of a record again, and yield each with the recorded one. Raises ConfigError if the file is no
    record.
    """
    try:
        with path.open() as file:
            yield from replay(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replay {path} cannot be read: {error}") from None
    except InvalidRequestError as error:
        raise ConfigError(f"--replay {path} is no record of a planner: {error}") from None
