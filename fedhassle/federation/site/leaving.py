"""Answers that leave a site: errors without local paths, and a log of every answer."""

from __future__ import annotations

import re
from pathlib import Path

from fedhassle.errors import UserError
from fedhassle.federation.audit_log import AuditLog
from fedhassle.federation.messages import Payload, to_json

HIDDEN = "…"
QUOTED = re.compile(r"(?<!\w)(?P<mark>['\"`]).*?(?P=mark)(?!\w)")  # not the apostrophe of a word
PATH = re.compile(r"[^\s'\"`]*[\\/][^'\"`\s]*")  # any word with a slash
SUFFIXES = (
    *("png", "jpe?g", "webp", "tiff?", "bmp", "gif", "dcm", "npz", "csv", "tsv", "xlsx?", "toml", "py"),
    *("safetensors", "jsonl?", "log", "txt", "key", "pub", "crt", "db"),
)
FILE = re.compile(rf"[^\s'\"`]*\.(?:{'|'.join(SUFFIXES)})\b", re.IGNORECASE)
KEPT = ("federation.toml", "labels.csv")  # names that every site has


def outward(error: Exception) -> str:
    """The text of an error as it leaves the site: without paths, file names, and anything unexpected.

    The site's own log has all of it.
    """
    if isinstance(error, UserError):
        return without_paths(str(error))
    quoted = QUOTED.sub(lambda found: found["mark"] + HIDDEN + found["mark"], str(error))
    return f"{type(error).__name__}: {without_paths(quoted)}"


def without_paths(text: str) -> str:
    """Returns a text in which paths and names of files are replaced by dots."""

    def hide(found: re.Match[str]) -> str:
        return found[0] if found[0] in KEPT else HIDDEN

    def hide_quoted(found: re.Match[str]) -> str:
        inside = found[0][1:-1]
        secret = PATH.search(inside) or (FILE.search(inside) and inside not in KEPT)
        return found["mark"] + HIDDEN + found["mark"] if secret else found[0]

    text = QUOTED.sub(hide_quoted, text)
    return FILE.sub(hide, PATH.sub(HIDDEN, text))


class AnswerLog:
    """The site's own audit log: who asked for what, and what the site sent, with its size."""

    def __init__(self, path: Path, server: str) -> None:
        self.log, self.server = AuditLog(path), server

    def write(self, kind: str, asked: Payload, sent: Payload) -> None:
        """Logs an answer before it leaves; a refusal or an error is one too."""
        about = {key: asked.words[key] for key in ("run", "round") if key in asked.words}
        self.log.write(
            "failed" if "error" in sent.words else "answered",
            asked_by=self.server,
            kind=str(kind)[:100],
            **{key: value if isinstance(value, int) else str(value)[:100] for key, value in about.items()},
            received_bytes=size(asked),
            words=sent.words,
            arrays={name: len(array) for name, array in sent.arrays.items()},
            sent_bytes=size(sent),
        )


def size(payload: Payload) -> int:
    """The bytes of a payload."""
    return len(to_json(payload.words).encode()) + sum(array.nbytes for array in payload.arrays.values())
