"""A client of the Flower simulation; a module of its own, so that Ray's workers import it once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from benchmarks.peers.clock import How, read
from benchmarks.peers.networks import build
from benchmarks.peers.work import CLASSES, Seen, Work

app = ClientApp()


@functools.cache
def everyone(work: Work) -> list[Seen]:
    """The images of all clients, which a worker keeps from round to round."""
    return [Seen(work, client, work.device == "cuda") for client in range(work.clients)]


@functools.cache
def network(work: Work, how: How) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A worker's network, which gets each client's weights, and its loss."""
    module = build(work.net, work.shape, CLASSES).to(work.device)
    torch.set_num_threads(1)
    if work.device == "cuda":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(work.device, torch.bfloat16, how.precision == "bf16"):
            return F.cross_entropy(module(x), y)

    return module, loss if how.compile == "none" else torch.compile(loss, mode=how.compile, dynamic=False)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A client's round."""
    work, how = read(str(message.content["config"]["task"]))
    data = everyone(work)[int(context.node_config["partition-id"])]
    module, loss = network(work, how)
    module.load_state_dict(cast(ArrayRecord, message.content["arrays"]).to_torch_state_dict())
    module.train()
    fused = work.device == "cuda" or None
    optimiser = torch.optim.SGD(module.parameters(), work.lr, work.momentum, fused=fused)
    steps = 0
    for _ in range(work.epochs):
        for x, y in data.batches(work.batch):
            optimiser.zero_grad()
            loss(x, y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps += 1
    records = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(data), "steps": steps}),
    }
    return Message(content=RecordDict(records), reply_to=message)  # type: ignore[arg-type]
