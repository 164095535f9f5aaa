"""A site behind Flower's ClientApp, for a SuperNode that is not ours: a new process for every message."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedhassle.errors import UserError
from fedhassle.federation.grid import from_records, to_records
from fedhassle.federation.messages import Content, RefusedError
from fedhassle.federation.node import SiteNode, load_site
from fedhassle.federation.terms import engine_of, read_terms

Config = Mapping[str, object]
NEEDED = ("site", "data", "file", "memory")

app = ClientApp()


def site_node(config: Config) -> SiteNode:
    """The site that a node's configuration describes: its name, images, federation's file and memory."""
    missing = [key for key in NEEDED if not config.get(key)]
    if missing:
        raise UserError(f"the node's configuration lacks {', '.join(missing)}")
    name, data, file, memory = (str(config[key]) for key in NEEDED)
    torch.set_num_threads(int(str(config.get("threads", 1))))
    try:
        terms = read_terms(Path(file).read_text("utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the federation's file {file} cannot be read: {error}") from error
    x, y = load_site(Path(data))
    return SiteNode(name, terms, x, y, Path(memory), engine_of(str(config.get("device", "auto"))))


def replied(node: SiteNode, message: Message) -> Message:
    """A site's answer to one of Flower's messages."""
    try:
        content = from_records(message.content)
    except RefusedError as error:
        answer = Content({"error": str(error)})
    else:
        answer = node.answer(message.metadata.message_type, content)
    return Message(to_records(answer), reply_to=message)


@lru_cache(maxsize=1)
def the_node(config: tuple[tuple[str, object], ...]) -> SiteNode:
    """The site of this process."""
    return site_node(dict(config))


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answers any message."""
    return replied(the_node(tuple(sorted(context.node_config.items()))), message)
