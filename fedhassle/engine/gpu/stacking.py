"""Steps of several jobs in the same kernels: every tensor of a step has an axis of seats, one for each job.

The kernels of a small network are short, and starting them probably limits the GPU: jobs side by side on
lanes gain little. One kernel for several jobs has to be started once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fedhassle.engine.client import Buffers
from fedhassle.engine.gpu.graphs import Flat, traced
from fedhassle.engine.gpu.memory import showing_lack_of_memory
from fedhassle.engine.gpu.products import AsProducts
from fedhassle.engine.gpu.program import STRETCH, Program, StretchFunctions, StretchInputs
from fedhassle.engine.job import Schedule
from fedhassle.errors import first_line


class UnstackableError(RuntimeError):
    """Steps that cannot share kernels with those of other jobs."""


def for_all_seats(made: StretchFunctions, program: Program) -> StretchFunctions:
    """The functions for all seats of a program, from those for one."""
    seat = program.example
    axes: list[int | None] = [0] * len(pytree.tree_leaves(seat.buffers))
    axes[-1] = None  # the images, which seats share

    def inputs_for(steps: int) -> Callable[[Buffers, Schedule], StretchInputs]:
        schedule = seat.schedule.between(0, steps)
        of_schedule = [1] * len(schedule.tensors)
        return over_stacks(made.inputs, (seat.buffers, schedule), [*axes, *of_schedule], 1)

    try:
        with showing_lack_of_memory():
            first = made.inputs(seat.buffers, seat.schedule).at(0)
            of_inputs = [0] * len(pytree.tree_leaves(first))
            step = over_stacks(made.step, (seat.buffers, first), [*axes, *of_inputs], 0)
            known = {STRETCH: inputs_for(STRETCH)}
            step(program.buffers, known[STRETCH](program.buffers, program.schedule).at(0))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some operations have no batched form
        raise UnstackableError(first_line(error)) from error

    def inputs(buffers: Buffers, schedule: Schedule) -> StretchInputs:
        if schedule.steps not in known:
            known[schedule.steps] = inputs_for(schedule.steps)
        return known[schedule.steps](buffers, schedule)

    return StretchFunctions(inputs, step, made.capture)


def over_stacks(
    function: Callable[..., Any], example: Any, axes: Sequence[int | None], axis: int
) -> Callable[..., Any]:
    """A function of stacks of trees, from one of trees like the example; its results are stacked, too.

    The stacks have these axes, by leaf; None: a tensor that all share. The operations are batched and not the
    function, which may contain any Python.
    """
    flat, leaves = Flat(function, example), pytree.tree_leaves(example)
    graph = traced(flat, leaves)

    def call(*trees: Any) -> Any:
        with torch.no_grad():  # the backward pass is part of the graph
            batched = torch.vmap(AsProducts(graph).run, tuple(axes), axis)
            return flat.result(batched(*pytree.tree_leaves(trees)))

    return call
