"""A client of the Flower simulation; a module of its own, so that Ray's workers import it once."""

from __future__ import annotations

import functools
import json
from typing import cast

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks.peers.clock import work_from
from benchmarks.peers.networks import build
from benchmarks.peers.work import CLASSES, Seen, Work

app = ClientApp()


@functools.cache
def seen(work: Work, client: int) -> Seen:
    """A client's images, kept from round to round."""
    return Seen(work, client, work.device == "cuda")


@functools.cache
def network(work: Work) -> nn.Module:
    """A worker's network, which gets each client's weights."""
    module = build(work.net, work.shape, CLASSES).to(work.device)
    if work.device == "cuda":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


@app.train()
def train(message: Message, context: Context) -> Message:
    """A client's round."""
    work = work_from(json.loads(str(message.content["config"]["work"])))
    torch.set_num_threads(1)
    data = seen(work, int(context.node_config["partition-id"]))
    module = network(work)
    module.load_state_dict(cast(ArrayRecord, message.content["arrays"]).to_torch_state_dict())
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), work.lr, work.momentum)
    steps = 0
    for _ in range(work.epochs):
        for x, y in data.batches(work.batch):
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps += 1
    records = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(data), "steps": steps}),
    }
    return Message(content=RecordDict(records), reply_to=message)  # type: ignore[arg-type]
