"""Jobs that receive what their steps ask for and no more, so that more of them are of one shape."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from fedhassle.engine.client import Job, draw
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.ahead import EVERY
from fedhassle.engine.gpu.program import Program
from fedhassle.engine.gpu.shapes import RECORDINGS, shape_of
from fedhassle.vectors import Arrays


class NamesUsed(NamedTuple):
    """What the steps of jobs with the same functions use of what they receive."""

    job: Job  # one of them, whose functions stay alive
    names: set[str]  # asked for so far
    selections_tried: set[Hashable]  # of these names: a step was made with each

    def selection(self, job: Job) -> Hashable:
        """Those of the names that a job has, and their sizes."""
        names = job.message if EVERY in self.names else self.names & job.message.keys()
        return frozenset((name, len(job.message[name])) for name in names)


class Trimmer:
    """Finds out what the steps of a job ask for, and takes the rest out of its message."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._used: dict[Hashable, NamesUsed] = {}  # by functions

    def trimmed(self, job: Job, kept: Arrays) -> Job:
        """The job with no more in its message than its steps ask for, so that more jobs are of one shape.

        Which names a step asks for may depend on those that there are: so another one is made whenever
        there is another selection of the names that were asked for so far.
        """
        functions = shape_of(job._replace(message={}), kept)
        if functions not in self._used:
            if sum(used.job.phase.name == job.phase.name for used in self._used.values()) >= RECORDINGS:
                return job
            self._used[functions] = NamesUsed(job, set(), set())
        used = self._used[functions]
        if used.selection(job) not in used.selections_tried:
            program = Program(job, job.message | kept, kept, draw(job))
            used.names.update(program.names_asked(job, self.engine))
            used.selections_tried.add(used.selection(job))
        wanted = used.names | set(job.phase.trained)
        message = {name: v for name, v in job.message.items() if name in wanted or EVERY in wanted}
        return job._replace(message=message)
