"""The record of a planner: every report with its decision, one a line, so that the decisions can be made again."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.planner.actions import Decision
from paceline.core.planner.codec import from_json, to_json
from paceline.core.planner.memory import PlannerState
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report

KEPT = 4
"""Full files that are kept, as FILE.1 (the newest) to FILE.4."""

log = logging.getLogger(__name__)


class Recorder:
    """Writes the record of one planner. Each file begins with what the planner knew, so it is replayed on its own.

    Args:
        path: the file. An earlier record there is kept as FILE.1.
        most_bytes: size after which a new file begins.

    Raises ConfigError if the file cannot be written. Later errors are logged, because a full disk stops no planner.
    """

    def __init__(self, path: Path, most_bytes: int, planner: Planner) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._planner = planner
        self._file: TextIO | None = None
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None

    def write(self, report: Report, decision: Decision) -> None:
        """Add a report and the decision that the planner has just made from it."""
        line = f'{{"report":{to_json(report)},"decision":{to_json(decision)}}}\n'
        try:
            if self._file is None:
                self._begin()
                return  # the state is newer than this decision
            self._file.write(line)
            self._file.flush()
            if self._file.tell() >= self._most_bytes:
                self._begin()
        except OSError as error:
            log.warning("--record %s cannot be written: %s", self._path, error.strerror)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        """Begin a new file, after the names of the earlier ones have moved on."""
        self.close()
        self._file = None
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number + 1}") for number in range(KEPT))]
        for earlier, later in reversed(list(itertools.pairwise(names))):
            if earlier.exists():
                earlier.replace(later)
        self._file = self._path.open("w")
        planner = self._planner
        self._file.write(f'{{"objectives":{to_json(planner.objectives)},"state":{to_json(planner.state)}}}\n')


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision of a record, and the one that the planner makes now from the same report."""

    recorded: Decision
    made: Decision

    @property
    def differs(self) -> bool:
        return self.recorded != self.made


def replay(path: Path) -> Iterator[Replayed]:
    """Make the decisions of a record again. Raises ConfigError if the file is no record."""
    planner: Planner | None = None
    number = 0
    try:
        with path.open() as file:
            for line in file:
                number += 1
                parts = {name: json.dumps(part) for name, part in json.loads(line).items()}
                if planner is None:
                    state = from_json(PlannerState, parts["state"])
                    planner = Planner(from_json(Objectives, parts["objectives"]), state)
                    continue
                recorded = from_json(Decision, parts["decision"])
                yield Replayed(recorded, planner.decide(from_json(Report, parts["report"])))
    except OSError as error:
        raise ConfigError(f"--replay {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, AttributeError, InvalidRequestError) as error:
        raise ConfigError(f"--replay {path} is no record of a planner: line {number}: {error}") from None
