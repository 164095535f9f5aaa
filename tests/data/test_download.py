"""Downloads from a local server, and everything that can go wrong."""

import gzip
import hashlib
import io
import logging
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedhassle.data import catalogue, download, published
from fedhassle.data.download import Source
from fedhassle.errors import UserError

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass
class Server:
    address: str
    answers: dict[str, list[tuple[int, bytes, int]]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def offer(self, name: str, content: bytes) -> Source:
        """Serves a file and returns the source that names it."""
        self.answers[f"/{name}"] = [(200, content, len(content))]
        md5 = hashlib.md5(content).hexdigest()
        return Source(name, (f"{self.address}/{name}",), md5, len(content))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            offered.requests.append(self.path)
            answers = offered.answers.get(self.path, [(404, b"", 0)])
            status, body, length = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        offered = Server(f"http://127.0.0.1:{running.server_port}")
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield offered
        running.shutdown()
        thread.join()


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


def images(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def labels(count: int, classes: int) -> np.ndarray:
    return (np.arange(count) % classes).astype(np.uint8)


def fashion(server: Server) -> tuple[list[Source], list[np.ndarray]]:
    """Offers a small Fashion-MNIST; its arrays in the order of the files."""
    arrays = [images(30, 28, 28), labels(30, 10), images(20, 28, 28), labels(20, 10)]
    return [server.offer(name, idx(array)) for name, array in zip(FILES, arrays, strict=True)], arrays


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def records(x: np.ndarray, y: np.ndarray, coarse: bytes = b"") -> bytes:
    """CIFAR's binary rows, written image by image and plane by plane."""
    planes = [b"".join(image[:, :, channel].tobytes() for channel in range(3)) for image in x]
    return b"".join(coarse + bytes([label]) + plane for label, plane in zip(y, planes, strict=True))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_fmnist_is_downloaded_once_and_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, (x_train, y_train, x_test, y_test) = fashion(server)
    entry = replace(catalogue.CATALOGUE["fmnist"], sources=tuple(sources), images=(30, 20))
    monkeypatch.setitem(catalogue.CATALOGUE, "fmnist", entry)
    for _ in range(2):
        found = catalogue.load("fmnist", tmp_path / "new" / "folder")
        np.testing.assert_array_equal(found.x_train, x_train.reshape(30, 28, 28, 1))
        np.testing.assert_array_equal(found.x_test, x_test.reshape(20, 28, 28, 1))
        assert found.y_train.tolist() == y_train.tolist()
        assert found.y_test.tolist() == y_test.tolist()
        assert (found.net, found.mean, found.std, found.flip, found.crop) == ("lenet", (0,), (1,), True, 0)
    assert server.requests == [f"/{name}" for name in FILES]
    assert left(tmp_path / "new" / "folder") == ["fmnist.npz"]


def test_cifar10_takes_five_batches_in_order(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, x_test, y_test = images(50, 32, 32, 3), labels(50, 10), images(10, 32, 32, 3), labels(10, 10)
    batches = {
        f"cifar-10-batches-bin/data_batch_{b + 1}.bin": records(x[b * 10 :][:10], y[b * 10 :][:10])
        for b in reversed(range(5))
    }
    content = tar({**batches, "cifar-10-batches-bin/test_batch.bin": records(x_test, y_test)})
    source = server.offer("cifar-10-binary.tar.gz", content)
    entry = replace(catalogue.CATALOGUE["cifar10"], sources=(source,), images=(50, 10))
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", entry)
    found = catalogue.load("cifar10", tmp_path)
    np.testing.assert_array_equal(found.x_train, x)
    np.testing.assert_array_equal(found.x_test, x_test)
    assert found.y_train.tolist() == y.tolist()
    assert (found.net, found.crop, found.classes, found.shape) == ("resnet8", 4, 10, (3, 32, 32))


def test_cifar100_takes_the_fine_label(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, x_test, y_test = images(200, 32, 32, 3), labels(200, 100), images(5, 32, 32, 3), labels(5, 100)
    members = {"train": records(x, y, coarse=b"\x07"), "test": records(x_test, y_test, coarse=b"\x09")}
    content = tar({f"cifar-100-binary/{part}.bin": rows for part, rows in members.items()})
    source = server.offer("cifar-100-binary.tar.gz", content)
    entry = replace(catalogue.CATALOGUE["cifar100"], sources=(source,), images=(200, 5))
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar100", entry)
    found = catalogue.load("cifar100", tmp_path)
    np.testing.assert_array_equal(found.x_train, x)
    assert found.y_train.tolist() == y.tolist()
    assert found.y_test.tolist() == [0, 1, 2, 3, 4]


def test_wrong_checksum_names_file_and_address(server: Server, tmp_path: Path) -> None:
    sources, _ = fashion(server)
    sources[1] = replace(sources[1], md5="0" * 32)
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte\.gz") as caught:
        download.fetch("fmnist", sources, published.read_idx, tmp_path)
    assert f"{server.address}/{FILES[1]}: wrong checksum" in str(caught.value)
    assert server.requests.count(f"/{FILES[1]}") == 1  # the same bytes would come again
    assert left(tmp_path) == []


@pytest.mark.parametrize("cuts", [1, 3])
def test_cut_connection_is_tried_again_a_few_times(server: Server, tmp_path: Path, cuts: int) -> None:
    sources, _ = fashion(server)
    whole = idx(labels(30, 10))
    cut = (200, whole[: len(whole) // 2], len(whole))
    server.answers[f"/{FILES[1]}"] = [cut] * cuts + [(200, whole, len(whole))]
    if cuts < download.ATTEMPTS:
        assert download.fetch("fmnist", sources, published.read_idx, tmp_path) == tmp_path / "fmnist.npz"
        assert left(tmp_path) == ["fmnist.npz"]
    else:
        with pytest.raises(UserError, match=f"{FILES[1]}"):
            download.fetch("fmnist", sources, published.read_idx, tmp_path)
        assert left(tmp_path) == []
    assert server.requests.count(f"/{FILES[1]}") == min(cuts + 1, 3)


def test_answer_beyond_the_published_length_is_refused(server: Server, tmp_path: Path) -> None:
    sources, _ = fashion(server)
    sources[0] = replace(sources[0], length=100)
    with pytest.raises(UserError, match="longer than the published 100 bytes"):
        download.fetch("fmnist", sources, published.read_idx, tmp_path)
    assert left(tmp_path) == []


def test_mirror_takes_over(server: Server, tmp_path: Path) -> None:
    sources, _ = fashion(server)
    mirrored = [replace(s, urls=(f"{server.address}/gone/{s.name}", *s.urls)) for s in sources]
    download.fetch("fmnist", mirrored, published.read_idx, tmp_path)
    assert server.requests[:2] == [f"/gone/{FILES[0]}", f"/{FILES[0]}"]  # 404 is not tried again


def test_without_network_the_message_says_what_to_put_where(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, _ = fashion(server)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    sources = [replace(source, urls=(f"http://127.0.0.1:{port}/x",)) for source in sources]
    entry = replace(catalogue.CATALOGUE["fmnist"], sources=tuple(sources))
    monkeypatch.setitem(catalogue.CATALOGUE, "fmnist", entry)
    with pytest.raises(UserError) as caught:
        catalogue.load("fmnist", tmp_path)
    parts = ("fmnist.npz", "x_train, y_train, x_test, y_test", *FILES, str(tmp_path))
    for part in (*parts, "$FEDHASSLE_DATA", "--data-dir"):
        assert part in str(caught.value)
    assert left(tmp_path) == []


def test_original_files_in_the_folder_are_used_and_kept(server: Server, tmp_path: Path) -> None:
    sources, arrays = fashion(server)
    for name, array in zip(FILES[:3], arrays[:3], strict=True):
        (tmp_path / name).write_bytes(idx(array))
    download.fetch("fmnist", sources, published.read_idx, tmp_path)
    assert server.requests == [f"/{FILES[3]}"]
    assert left(tmp_path) == sorted(["fmnist.npz", *FILES[:3]])
    (tmp_path / "fmnist.npz").unlink()
    (tmp_path / FILES[0]).write_bytes(b"something else")
    with pytest.raises(UserError, match=rf"{FILES[0]}: md5 is .* published is {sources[0].md5}"):
        download.fetch("fmnist", sources, published.read_idx, tmp_path)


@pytest.mark.parametrize(
    "place", ["data.published._idx", "data.download._md5", "data.download._save", "files.os.fsync"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interruption_leaves_nothing(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException | type[BaseException],
) -> None:
    def interrupt(*arguments: object) -> None:
        raise error

    sources, _ = fashion(server)
    monkeypatch.setattr(f"fedhassle.{place}", interrupt)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else UserError):
        download.fetch("fmnist", sources, published.read_idx, tmp_path)
    assert left(tmp_path) == []


def test_folder_that_cannot_be_created_is_a_user_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--data-dir"):
        download.fetch("fmnist", fashion(server)[0], published.read_idx, tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        idx(labels(9, 3))[:-9],
        *map(gzip.compress, [b"", b"\0\0\x0d\1abcd", b"\0\0\x08\1\0\0\0\5abcd"]),
    ],
    ids=["no gzip", "cut", "empty", "not bytes", "too short"],  # the content has the time of day in it
)
def test_malformed_idx_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.gz"):
        published.read_idx([tmp_path / "x.gz"] * 4)


@pytest.mark.parametrize("members", [{}, {"cifar-100-binary/train.bin": bytes(3075)}])
def test_malformed_cifar_is_a_user_error(tmp_path: Path, members: dict[str, bytes]) -> None:
    (tmp_path / "c.tar.gz").write_bytes(tar(members))
    with pytest.raises(UserError, match=r"c\.tar\.gz"):
        published.read_cifar100([tmp_path / "c.tar.gz"])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_a_bar_and_a_log_one_line_a_file(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    terminal: bool,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level(logging.INFO, logger="fedhassle"):
        download.fetch("fmnist", fashion(server)[0], published.read_idx, tmp_path)
    logged = [name for name in FILES for record in caplog.records if name in record.getMessage()]
    assert logged == ([] if terminal else list(FILES))
    assert (FILES[0] in stream.getvalue()) == terminal
