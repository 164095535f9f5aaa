"""Steps as recordings: traced, fused and captured once, then replayed for every job of the same shape.

One job followed through: HASSLE's `labelled residual`, on a client with labelled and unlabelled data.

1. Trimmed (`trimming.py`): the client was sent w_S, w_U, r_US, r_SU and w_S_before. One step is made with a
   message that notes which names are asked for: w_S and w_U. They and r_US, which it trains, are kept.
2. Shape (`shapes.py`): what still tells the job from others is its phase, with the functions in it, and the
   sizes of its vectors. So this phase is one shape, whoever the client and whatever the round.
3. Program (`program.py`): a lane lays out buffers for the shape, whose places never change: r_US with its
   momentum, what is received, and the course (rows, labels, draws) of a stretch of ten steps.
4. Functions (here): `look` makes the ten batches and asks w_S and w_U about all of them at once (`ahead.py`),
   `step` makes one step. Both are tried out and fused once for all lanes.
5. Replay (`scheduling.py`): each lane captures `look` and ten times `step` as one graph. The job's 100 steps
   are then: its vectors into the buffers, and ten times the next part of its course into place and a replay.

What cannot be compiled is captured as it is; what cannot be captured, or changes too often to be worth it,
runs eagerly. On a CPU, where there is nothing to capture, the same functions run over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from fedhassle.engine.client import Buffers, Course, Job
from fedhassle.engine.device import Engine
from fedhassle.engine.gpu.graphs import Compiler, UncapturableError, Watch
from fedhassle.engine.gpu.program import STRETCH, Program, StretchFunctions, StretchInputs, stretch_functions
from fedhassle.engine.gpu.shapes import RECORDINGS

log = logging.getLogger("fedhassle")


class FunctionsByShape:
    """The functions of each shape of job, the same for all lanes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # With the first job of each shape: it keeps alive what the shape knows by its id.
        self._known: dict[Hashable, tuple[Job, StretchFunctions]] = {}
        self._compiler = Compiler()
        self._told: set[str] = set()

    def worth_it(self, key: Hashable, job: Job) -> bool:
        """Whether a shape is known, or its phase has not had too many of them; else it leaves no trace."""
        alike = sum(known.phase.name == job.phase.name for known, _ in self._known.values())
        if key in self._known or alike < RECORDINGS:
            return True
        self.tell(
            f"phase {job.phase.name!r} runs eagerly: its functions or its messages change from round to "
            "round; what changes should be a tensor in the message, the memory or a draw"
        )
        return False

    def find(self, key: Hashable, job: Job, program: Program) -> StretchFunctions:
        """The functions of a shape; `program` is one to try them on."""
        if key not in self._known:
            self._known[key] = job, self._make(job, program)
        return self._known[key][1]

    def _make(self, job: Job, program: Program) -> StretchFunctions:
        made = stretch_functions(job, program.questions(job, self.engine), self.engine)
        if made.capture and (reason := why_not(made, program)):
            self.tell(f"phase {job.phase.name!r} runs eagerly: its step cannot be captured ({reason})")
            return made._replace(capture=False)
        return self._fused(made, program) if self.engine.compile else made

    def _fused(self, made: StretchFunctions, program: Program) -> StretchFunctions:
        """The functions with fused kernels, if the compiler can."""
        try:
            whole = self._compiler(made.look, program.buffers, program.course)
            inputs = whole(program.buffers, program.course).at(0)
            step = self._compiler(made.step, program.buffers, inputs)
            step(program.buffers, inputs)  # it is compiled when it is called
        except Exception as error:  # a compiler may fail in any way, and is not needed
            first = str(error).partition("\n")[0]
            self.tell(f"steps are captured but not compiled ({type(error).__name__}: {first})")
            return made

        def look(buffers: Buffers, course: Course) -> StretchInputs:
            return (whole if course.steps == STRETCH else made.look)(buffers, course)

        return made._replace(look=look, step=step)

    def give_up(self, key: Hashable, job: Job, error: Exception) -> StretchFunctions:
        """The functions of a shape whose steps cannot be captured: they run eagerly from now on."""
        first = str(error).partition("\n")[0]
        self.tell(f"phase {job.phase.name!r} runs eagerly: its step cannot be captured ({first})")
        known, made = self._known[key]
        self._known[key] = known, made._replace(capture=False)
        return self._known[key][1]

    def tell(self, message: str) -> None:
        """Warns once."""
        if message not in self._told:
            self._told.add(message)
            log.warning("%s", message)


def why_not(functions: StretchFunctions, program: Program) -> str:
    """Why a step cannot be captured; nothing if it can."""
    try:
        with Watch():  # type: ignore[no-untyped-call]
            program.run(functions, 1)
    except UncapturableError as error:
        return str(error)
    return ""
