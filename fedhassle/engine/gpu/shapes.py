"""Which jobs are alike, so that one recording serves them all."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from fedhassle.engine.client import Job
from fedhassle.vectors import Arrays

RECORDINGS = 8  # of one phase: what changes more often than that is not worth recording


def shape_of(job: Job, kept: Arrays) -> Hashable:
    """Equal for jobs that one recording can serve: the same functions on tensors of the same sizes."""
    phase = job.phase
    streams = tuple((s.part, s.batch, s.views, s.online, identity(s.labels)) for s in phase.streams)
    descents = tuple((d.train, d.sgd, identity(d.loss)) for d in phase.descents)
    sizes = tuple(
        tuple((name, len(v), v.dtype) for name, v in arrays.items()) for arrays in (job.message, kept)
    )
    images = id(job.site.samples.images), id(job.site.views.scale)
    return (phase.name, streams, descents, identity(phase.then), identity(phase.draw), sizes, images)


def identity(value: Any) -> Hashable:
    """Equal for functions that compute the same: those made anew each round are judged by what they hold."""
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
    return (type(value), value) if plain else id(value)  # recordings keep it alive, so that its id is its own
