"""Commands that start a Ray cluster of their own."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from small import LIMIT, environment, interruptible


class RayCommand:
    """A command in its own process group; its processes are found by a mark in their environment."""

    def __init__(self, output, *words):
        self.mark = uuid.uuid4().hex
        self.home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
        self.output = output
        changes = {"MARK": self.mark, "HOME": str(self.home), "RAY_TMPDIR": str(self.home)}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                interruptible(*words),
                env=environment(**changes),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT)
        shutil.rmtree(self.home, ignore_errors=True)

    def living(self, title=""):
        """The numbers of its processes, or of those with a title."""
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [number for number in numbers if self.owns(number, title)]

    def owns(self, pid, title):
        try:
            marked = f"MARK={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            return marked and Path(f"/proc/{pid}/cmdline").read_text().startswith(title)
        except OSError:  # it has ended meanwhile
            return False

    def until(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, "the process hangs"
            time.sleep(0.02)

    def ended(self):
        """Exit code and output, once the command is over; none of its processes are left."""
        code = self.process.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while self.living() and time.monotonic() < deadline:  # those that were told to end
            time.sleep(0.1)
        assert not self.living()
        return code, self.output.read_text()
