"""FedAvg as a plain PyTorch loop, one client after another, without any framework."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.peers.clock import Clock, report, told
from benchmarks.peers.networks import build, n_parameters
from benchmarks.peers.work import CLASSES, Seen


def main() -> None:
    """Trains rounds and reports their times."""
    work, _ = told()
    gpu = work.device == "cuda"
    torch.set_num_threads(1)  # faster than two for such small batches
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    module = build(work.net, work.shape, CLASSES).to(work.device)
    if gpu:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    clients = [Seen(work, k, gpu) for k in range(work.clients)]
    state = {k: v.clone() for k, v in module.state_dict().items()}
    clock, steps = Clock(work.device), 0
    for _ in range(work.warmup + work.rounds):
        clock.start()
        steps = 0
        total = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in state.items()}
        for k in torch.randperm(work.clients)[: work.per_round].tolist():
            module.load_state_dict(state)
            optimiser = torch.optim.SGD(module.parameters(), work.lr, work.momentum)
            for _ in range(work.epochs):
                for x, y in clients[k].batches(work.batch):
                    optimiser.zero_grad()
                    F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
                    steps += 1
            for name, tensor in module.state_dict().items():
                total[name] += tensor / work.per_round
        state = {k: v.to(state[k].dtype) for k, v in total.items()}
        clock.stop()
    report(clock, work, steps, n_parameters(module))


if __name__ == "__main__":
    main()
