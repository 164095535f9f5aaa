"""A site as Flower's ClientApp, for a SuperNode that is not ours: a new process for every message."""

from __future__ import annotations

from functools import lru_cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedhassle.federation.flower.transport import reply_to
from fedhassle.federation.site.configured import site_node
from fedhassle.federation.site.node import SiteNode

app = ClientApp()


@lru_cache(maxsize=1)
def the_node(config: tuple[tuple[str, object], ...]) -> SiteNode:
    """The site of this process."""
    return site_node(dict(config))


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answers any message."""
    node = the_node(tuple(sorted(context.node_config.items())))
    return reply_to(message, node.answer)
