"""A headless Chromium that tests talk to over a pipe, in its own protocol: no package is needed for it."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 600  # seconds after which the browser counts as hung
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *("--disable-dev-shm-usage", "--no-default-browser-check", "--remote-debugging-pipe"),
)

BEGIN = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for pipe, place in zip(pipes, (3, 4)):  # where the protocol has them
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable():
    """The browser of this machine, if it has one."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    return os.environ.get("CHROMIUM") or next((path for path in found if path), None)


@contextlib.contextmanager
def browser():
    """A page in a browser of its own, which ends with the block."""
    to_browser, ours = os.pipe()
    theirs, from_browser = os.pipe()
    folder = tempfile.mkdtemp(prefix="browser-")
    begin = [sys.executable, "-c", BEGIN, str(to_browser), str(from_browser)]
    process = subprocess.Popen(
        [*begin, executable(), *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(ours, theirs)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT)
        os.close(ours)
        os.close(theirs)
        shutil.rmtree(folder, ignore_errors=True)


class Page:
    """A tab: sizes, colours, what its console and its network were told, and what scripts in it return."""

    def __init__(self, to, back):
        self.to, self.back = to, back
        self.left, self.number, self.events, self.session = b"", 0, [], None
        (target,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """What a command returns; events that come meanwhile are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self):
        """The next message."""
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self.left:
            ready, _, _ = select.select([self.back], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser hangs"
            more = os.read(self.back, 1 << 20)
            assert more, "the browser has ended"
            self.left += more
        message, _, self.left = self.left.partition(b"\0")
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def show(self, path, width=1200, height=900, dark=False, media=""):
        """Opens a file or an address in a window of that size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        phone = {"deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **phone)
        self.events.clear()
        address = str(path)
        address = address if address.startswith("http:") else Path(path).resolve().as_uri()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def complaints(self):
        """What the console was told, and every address that was asked for but the page's own."""
        self.run("0")  # what happened before has come by now
        told = [
            event["params"]
            for event in self.events
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return told, asked[1:]
