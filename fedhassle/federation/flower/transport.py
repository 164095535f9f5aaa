"""Transport of messages to sites and back: a small protocol, and its implementation on Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from safetensors.numpy import load, save

from fedhassle.federation.messages import Payload, RefusedError, failure, from_json, short, to_json

DIGITS = 6
WORDS, ARRAYS = "words", "arrays"  # the records of a message


class Admission(NamedTuple):
    """The name and the number of images with which the coordinator admitted a key."""

    name: str  # of the site
    images: int | None = None  # the most that it may count; None: nothing is agreed


class ConnectedNode(NamedTuple):
    """A site's machine as the network sees it."""

    id: int
    name: str  # the name that its key was admitted under; empty where keys are not required
    since: str  # the time at which it connected
    images: int | None = None  # the most that it was admitted with; None: nothing is agreed


class SiteRequest(NamedTuple):
    """A message to a node."""

    node: int
    kind: str  # query, train or evaluate
    payload: Payload
    group: str  # a label for Flower's logs, such as the round
    lifetime: float  # seconds after which the server no longer waits for an answer


class Answer(NamedTuple):
    """A node's answer to a request: a payload, or an error."""

    to: str  # the request's id
    payload: Payload | None
    error: str = ""


class Transport(Protocol):
    """Connects the server to the nodes of its sites."""

    def nodes(self) -> Sequence[ConnectedNode]:
        """The nodes that are online."""
        ...

    def push(self, requests: Sequence[SiteRequest]) -> Sequence[str | None]:
        """Sends requests; returns the id of each, or None where it could not be sent."""
        ...

    def pull(self, ids: Sequence[str]) -> Sequence[Answer]:
        """The answers to these requests that have arrived since the last call."""
        ...


class FlowerTransport:
    """Transport over the grid that Flower gives to the server's program.

    `admissions`: the current ones by key; Flower keeps the name of the first registration.
    """

    def __init__(self, grid: Grid, admissions: Callable[[], Mapping[bytes, Admission]] = dict) -> None:
        self.grid, self.admissions = grid, admissions

    def nodes(self) -> list[ConnectedNode]:
        """The nodes that are online."""
        known, made = self.admissions(), []
        for node in self.grid.get_nodes():
            name, images = known.get(node.public_key, Admission(node.name))
            made.append(ConnectedNode(node.node_id, name, node.last_activated_at, images))
        return made

    def push(self, requests: Sequence[SiteRequest]) -> list[str | None]:
        """Sends requests; arrays that several of them share go to the SuperLink once."""
        if not requests:
            return []
        messages = [
            Message(to_records(one.payload), one.node, one.kind, ttl=one.lifetime, group_id=one.group)
            for one in requests
        ]
        try:
            ids: list[str | None] = [number or None for number in self.grid.push_messages(messages)]
        except Exception:
            self.nodes()  # raises SystemExit if the run was stopped
            raise
        if not any(ids):
            self.nodes()  # as above
        return ids if len(ids) == len(requests) else [None] * len(requests)

    def pull(self, ids: Sequence[str]) -> list[Answer]:
        """The answers that have arrived."""
        return [to_answer(message) for message in self.grid.pull_messages(ids)] if ids else []


def to_answer(message: Message) -> Answer:
    """Converts a reply; it is matched by the id it replies to, since errors come from the SuperLink."""
    to = message.metadata.reply_to_message_id
    if message.has_error():
        return Answer(to, None, f"{message.error.reason or 'no reason given'} (code {message.error.code})")
    try:
        return Answer(to, from_records(message.content))
    except RefusedError as error:
        return Answer(to, None, str(error))


def reply_to(message: Message, answer: Callable[[str, Payload], Payload]) -> Message:
    """A site's reply to a message: its answer to that kind of payload, or the reason of a refusal."""
    try:
        payload = from_records(message.content)
    except RefusedError as error:
        said = failure(str(error))
    else:
        said = answer(message.metadata.message_type, payload)
    return Message(to_records(said), reply_to=message)


def to_records(payload: Payload) -> RecordDict:
    """Converts a payload to Flower's records: only two, since each one travels separately.

    The arrays are a record of their own, so that arrays for several sites are stored once.
    """
    # Numbered: the format does not keep the order of names, on which the order of sums may depend.
    numbered = {f"{i:0{DIGITS}} {name}": array for i, (name, array) in enumerate(payload.arrays.items())}
    arrays = ConfigRecord({ARRAYS: save(numbered)})
    return RecordDict({WORDS: ConfigRecord({WORDS: to_json(payload.words)}), ARRAYS: arrays})


def from_records(records: RecordDict) -> Payload:
    """Converts records of `to_records` back; refuses any others."""
    words, blob = value_in(records, WORDS), value_in(records, ARRAYS)
    if len(records) != 2 or not isinstance(words, str) or not isinstance(blob, bytes):
        raise RefusedError(f"it sent unexpected records: {short(list(records))}")
    try:
        arrays = load(blob)
    except Exception as error:  # safetensors raises several kinds
        raise RefusedError(f"its arrays cannot be read: {error}") from error
    return Payload(from_json(words), {key[DIGITS + 1 :]: arrays[key] for key in sorted(arrays)})


def value_in(records: RecordDict, name: str) -> object:
    """The value that the record `name` holds under the key `name`."""
    record = records.get(name)
    return record.get(name) if isinstance(record, ConfigRecord) else None
