"""A small proxy that opens tunnels (CONNECT), on loopback."""

import contextlib
import select
import socket
import threading


class Tunnel:
    """Opens a tunnel for every CONNECT; counts them, and may demand a password or refuse."""

    def __init__(self, demand=None, refuse=False):
        self.demand, self.refuse, self.targets = demand, refuse, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                line, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line):
        with contextlib.suppress(OSError), line:
            head = b""
            while b"\r\n\r\n" not in head:
                part = line.recv(4096)
                if not part:
                    return
                head += part
            word, target, *_ = head.decode().split()
            asked = f"Proxy-Authorization: {self.demand}".lower() in head.decode().lower()
            if word != "CONNECT" or self.refuse:
                line.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            elif self.demand is not None and not asked:
                line.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            else:
                self.targets.append(target)
                host, _, port = target.rpartition(":")
                with socket.create_connection((host, int(port))) as there:
                    line.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    self._pass(line, there)

    def _pass(self, one, other):
        both = {one: other, other: one}
        while True:
            for line in select.select(list(both), [], [])[0]:
                part = line.recv(65536)
                if not part:
                    return
                both[line].sendall(part)
