"""How messages reach sites: a small protocol, and Flower as what fulfils it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid as FlwrGrid
from safetensors.numpy import load, save

from fedhassle.federation.messages import Content, RefusedError, failure, from_json, short, to_json

DIGITS = 6
WORDS, ARRAYS = "words", "arrays"  # the records of a message


class Node(NamedTuple):
    """A site's machine as the network sees it."""

    id: int
    name: str  # under which its key was admitted; empty where keys are not asked for
    since: str  # when it came


class Letter(NamedTuple):
    """A message to a node."""

    node: int
    kind: str  # query, train or evaluate
    content: Content
    group: str  # what it belongs to, in words for logs
    lifetime: float  # seconds after which nobody waits for an answer


class Answer(NamedTuple):
    """What came back: a content, or what went wrong."""

    to: str  # the letter's id
    content: Content | None
    error: str = ""


class Grid(Protocol):
    """A network of nodes."""

    def nodes(self) -> Sequence[Node]:
        """Those that are there."""
        ...

    def push(self, letters: Sequence[Letter]) -> Sequence[str | None]:
        """Sends letters; of each its id, or None where it could not be sent."""
        ...

    def pull(self, ids: Sequence[str]) -> Sequence[Answer]:
        """The answers to letters that have come since they were last asked for."""
        ...


class FlowerGrid:
    """Flower's grid as the server's program is given it.

    `names`: of sites by their keys, where Flower may know them by a name that they had before.
    """

    def __init__(self, grid: FlwrGrid, names: Callable[[], Mapping[bytes, str]] = dict) -> None:
        self.grid, self.names = grid, names

    def nodes(self) -> list[Node]:
        """Those that are there."""
        names = self.names()
        return [
            Node(node.node_id, names.get(node.public_key, node.name), node.last_activated_at)
            for node in self.grid.get_nodes()
        ]

    def push(self, letters: Sequence[Letter]) -> list[str | None]:
        """Sends letters; what several of them have in common goes to the SuperLink once."""
        if not letters:
            return []
        messages = [
            Message(
                to_records(letter.content),
                letter.node,
                letter.kind,
                ttl=letter.lifetime,
                group_id=letter.group,
            )
            for letter in letters
        ]
        try:
            ids: list[str | None] = [letter or None for letter in self.grid.push_messages(messages)]
        except Exception:
            self.nodes()
            raise
        if not any(ids):
            self.nodes()  # a run that is stopped while it sends learns of it by its next question
        return ids if len(ids) == len(letters) else [None] * len(letters)

    def pull(self, ids: Sequence[str]) -> list[Answer]:
        """The answers that have come."""
        return [to_answer(message) for message in self.grid.pull_messages(ids)] if ids else []


def to_answer(message: Message) -> Answer:
    """A reply; errors carry the SuperLink's address, so replies are told by what they reply to."""
    to = message.metadata.reply_to_message_id
    if message.has_error():
        return Answer(to, None, f"{message.error.reason or 'no reason given'} (code {message.error.code})")
    try:
        return Answer(to, from_records(message.content))
    except RefusedError as error:
        return Answer(to, None, str(error))


def replied(message: Message, answer: Callable[[str, Content], Content]) -> Message:
    """A site's reply to a message: what it answers to that kind of content, or why it was refused."""
    try:
        content = from_records(message.content)
    except RefusedError as error:
        said = failure(str(error))
    else:
        said = answer(message.metadata.message_type, content)
    return Message(to_records(said), reply_to=message)


def to_records(content: Content) -> RecordDict:
    """A content as Flower has it: in few parts, since each travels by itself.

    The arrays are a part of their own: what several sites are sent alike is stored once.
    """
    # Numbered: the format does not keep the order of names, on which the order of sums may depend.
    numbered = {f"{i:0{DIGITS}} {name}": array for i, (name, array) in enumerate(content.arrays.items())}
    arrays = ConfigRecord({ARRAYS: save(numbered)})
    return RecordDict({WORDS: ConfigRecord({WORDS: to_json(content.words)}), ARRAYS: arrays})


def from_records(records: RecordDict) -> Content:
    """What `to_records` made; anything else is refused."""
    words, blob = part(records, WORDS), part(records, ARRAYS)
    if len(records) != 2 or not isinstance(words, str) or not isinstance(blob, bytes):
        raise RefusedError(f"it sent records {short(list(records))}")
    try:
        arrays = load(blob)
    except Exception as error:  # of a foreign format, in ways of its own
        raise RefusedError(f"its arrays cannot be read: {error}") from error
    return Content(from_json(words), {key[DIGITS + 1 :]: arrays[key] for key in sorted(arrays)})


def part(records: RecordDict, name: str) -> object:
    """What a record of that name holds under its own name."""
    record = records.get(name)
    return record.get(name) if isinstance(record, ConfigRecord) else None
