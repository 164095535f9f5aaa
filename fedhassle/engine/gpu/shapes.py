"""Shapes of jobs: keys that are equal for jobs that can share a recording."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from fedhassle.engine.job import Job
from fedhassle.randomness import generator
from fedhassle.vectors import Arrays


def shape_of(job: Job, kept: Arrays) -> Hashable:
    """A key that is equal for jobs with the same functions and tensors of the same sizes."""
    return with_message(functions_of(job, kept), job)


def with_message(functions: tuple[Hashable, ...], job: Job) -> Hashable:
    """The shape of a job whose key but for its message is known."""
    return *functions, sizes_of(job.message)


def functions_of(job: Job, kept: Arrays) -> tuple[Hashable, ...]:
    """All of a job's shape but the sizes of its message."""
    phase = job.phase
    streams = tuple(
        (s.part, s.batch, s.views, s.online, identity(s.logits), identity(s.labels)) for s in phase.streams
    )
    descents = tuple((d.train, d.optimiser, identity(d.loss)) for d in phase.descents)
    images = id(job.site.samples.images), id(job.site.views.scale)
    drawn = None if phase.draw is None else np.shape(phase.draw(generator("shape")))  # only its size matters
    further = identity(phase.then), drawn, job.rate is None
    return (phase.name, streams, descents, further, sizes_of(kept), images)


def sizes_of(arrays: Arrays) -> Hashable:
    """Names, sizes and types."""
    return tuple((name, len(v), v.dtype) for name, v in arrays.items())


def identity(value: Any) -> Hashable:
    """A key that is equal for functions that compute the same, even if they are created in each round."""
    if isinstance(value, partial):
        named = tuple((name, identity(v)) for name, v in sorted(value.keywords.items()))
        return (identity(value.func), identity(value.args), named)
    if isinstance(value, MethodType):
        return (value.__func__, id(value.__self__))
    if isinstance(value, FunctionType):
        cells = tuple(identity(cell.cell_contents) for cell in value.__closure__ or ())
        named = tuple((name, identity(v)) for name, v in sorted((value.__kwdefaults__ or {}).items()))
        return (value.__code__, cells, identity(value.__defaults__), named)
    if isinstance(value, tuple):
        return (type(value), *(identity(part) for part in value))
    plain = isinstance(value, int | float | str | None)
    return (type(value), value) if plain else id(value)  # unique, since recordings keep the object alive
