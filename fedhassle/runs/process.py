"""A process that trains one run of several: `python -m fedhassle.runs.process DESCRIPTOR`.

It gets a task on the connection of that descriptor, and sends events and log records back. It ends after the
round in which it is told to stop, or in which nobody listens any more.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from contextlib import closing
from dataclasses import replace
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any

from fedhassle.engine.gpu.memory import share_memory
from fedhassle.errors import UserError
from fedhassle.runs.events import Event
from fedhassle.runs.folder import Folder
from fedhassle.runs.processes import Task
from fedhassle.runs.run import prepare
from fedhassle.runs.train import train_run
from fedhassle.settings.request import Request


class Line:
    """The connection to the process that started this one."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()  # log records come from any thread

    def put_nowait(self, news: Any) -> None:
        """Sends an event or a log record."""
        with self._lock:
            self.connection.send(news)

    @property
    def told_to_stop(self) -> bool:
        """True if the other side sent something, or is gone."""
        return self.connection.poll()


def main(descriptor: int) -> None:
    """Trains the run of a task."""
    line = Line(Connection(descriptor))
    task: Task = line.connection.recv()
    logging.getLogger().addHandler(QueueHandler(line))  # type: ignore[arg-type]
    error: Exception | None = None
    try:
        train(task, line)
    except ConnectionError:
        return  # nobody listens any more
    except Exception as raised:
        error = portable(raised)
    line.put_nowait(Event(task.place, error=error))


def train(task: Task, line: Line) -> None:
    """Trains a run, or resumes it, to its end or until it is told to stop."""
    run = replace(prepare(Folder(task.folder), Request((task.settings,))), share=task.share)
    share_memory(run.device, run.share)
    with closing(train_run(run)) as steps:
        for step in steps:
            line.put_nowait(Event(task.place, step=step))
            if line.told_to_stop:
                return


def portable(error: Exception) -> Exception:
    """An error as another process can read it: itself, or else its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return UserError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(int(sys.argv[1]))
