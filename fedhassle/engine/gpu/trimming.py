"""Trimming: a job's message without the arrays that no step reads, so that more jobs have the same shape."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.precompute import EVERY
from fedhassle.engine.gpu.program import Seat
from fedhassle.engine.gpu.recording import RECORDINGS
from fedhassle.engine.job import Job, draw
from fedhassle.vectors import Arrays


class NamesRead(NamedTuple):
    """The names that the steps of jobs with the same functions read of their messages."""

    job: Job  # one of these jobs, to keep its functions alive
    names: set[str]  # read so far
    selections_tried: set[Hashable]  # of these names, each with a step that ran

    def selection(self, job: Job) -> Hashable:
        """The names that a job has of these, with their sizes."""
        names = job.message if EVERY in self.names else self.names & job.message.keys()
        return frozenset((name, len(job.message[name])) for name in names)


class Trimmer:
    """Removes the arrays from messages that no step reads, so that more jobs have the same shape."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._read: dict[Hashable, NamesRead] = {}  # by functions

    def trimmed(self, job: Job, functions: Hashable, kept: Arrays) -> Job:
        """The job, with only those arrays in its message that its steps read; `functions`: its shape without.

        The names that a step reads may depend on the names that exist. So one more step runs for each new
        selection of the names read so far.
        """
        if functions not in self._read:
            if sum(read.job.phase.name == job.phase.name for read in self._read.values()) >= RECORDINGS:
                return job
            self._read[functions] = NamesRead(job, set(), set())
        read = self._read[functions]
        if read.selection(job) not in read.selections_tried:
            seat = Seat.of(job, job.message | kept, kept, draw(job))
            read.names.update(seat.names_read(job, self.engine))
            read.selections_tried.add(read.selection(job))
        wanted = read.names | set(job.phase.trained)
        message = {name: v for name, v in job.message.items() if name in wanted or EVERY in wanted}
        return job._replace(message=message)
