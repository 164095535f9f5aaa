"""FedAvg rounds of Apple's pfl: its SimulatedBackend, PyTorchModel and FederatedAveraging.

As in its own CIFAR-10 benchmark, the users' tensors are on the device, updates are weighted by datapoints,
and a central SGD has rate 1. In its favour: channels_last and PyTorch's fused SGD on a GPU, cuDNN tuned, an
epoch is shuffled and augmented at once, no metrics are printed, and users are evaluated only in round 1,
which is not timed. Several processes share the device, as its guide advises.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.clock import Clock, How, report, told
from benchmarks.peers.networks import build, n_parameters
from benchmarks.peers.work import CLASSES, Seen, Work


def main() -> int:
    """Trains rounds and reports their times."""
    work, how = told()
    if how.processes > 1 and "PFL_WORKER_RANK" not in os.environ:
        return launch(how.processes)
    os.environ["PFL_PYTORCH_DEVICE"] = work.device  # before pfl is imported
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
    switch(work, how)
    train(work, how)
    return 0


def launch(processes: int) -> int:
    """Starts this module once per process; they find each other by pfl's environment variables."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    addresses = ",".join(f"localhost:{port + k}" for k in range(processes))
    shared = os.environ | {"PFL_WORKER_ADDRESSES": addresses, "CLOCK_ROOT": str(os.getpid())}
    shared["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else each process starts as many as there are cores
    command = [sys.executable, "-m", "benchmarks.peers.pfl_rounds", *sys.argv[1:]]
    started = [
        subprocess.Popen(command, env=shared | {"PFL_WORKER_RANK": str(rank)}) for rank in range(processes)
    ]
    return max(abs(one.wait()) for one in started)


def switch(work: Work, how: How) -> None:
    """Sets PyTorch's backend switches for speed."""
    if work.device == "cpu":
        torch.set_num_threads(1)
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if how.processes > 1:  # pfl asks for NCCL, which accepts only one process per GPU
        start: Any = torch.distributed.init_process_group
        torch.distributed.init_process_group = lambda backend=None, **more: start(backend="gloo", **more)


def train(work: Work, how: How) -> None:
    """Runs pfl's federated averaging between two clocks."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    gpu, several = work.device == "cuda", how.processes > 1
    np.random.seed(0)  # pfl draws users by it, the same in all processes
    steps, clock = [0], Clock(work.device, int(os.environ.get("CLOCK_ROOT", os.getpid())))

    class User(Dataset):  # type: ignore[misc]
        """A user whose epochs are shuffled and augmented on the device."""

        def __init__(self, seen: Seen, user: int) -> None:
            super().__init__(raw_data=(seen.pixels, seen.y), user_id=user)
            self.seen = seen

        def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
            """Batches of an epoch."""
            for pair in self.seen.batches(batch_size or len(self.seen)):
                steps[0] += 1
                yield list(pair)

    users = {k: User(Seen(work, k, gpu), k) for k in range(work.clients)}
    sampler = get_user_sampler("minimize_reuse", list(users))  # as its documentation advises
    data = FederatedDataset(users.__getitem__, sampler)
    module: Any = build(work.net, work.shape, CLASSES).to(work.device)
    if gpu:
        module = module.to(memory_format=torch.channels_last)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y)

    def metrics(x: Tensor, y: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            return {"loss": Weighted(F.cross_entropy(module(x), y, reduction="sum").item(), len(y))}

    # Its own `use_torch_compile` compiles a function that training never calls.
    module.loss = loss if how.compile == "none" else torch.compile(loss, mode=how.compile, dynamic=False)
    module.metrics = metrics
    sgd = functools.partial(torch.optim.SGD, momentum=work.momentum, fused=gpu or None)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=sgd,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if how.precision == "bf16" else None,
    )
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])

    def together() -> None:
        if several:
            torch.distributed.barrier()

    class Timer(TrainingProcessCallback):  # type: ignore[misc]
        """Stops the clock after a round and starts it again."""

        def on_train_begin(self, *, model: Any) -> Any:
            """Starts the first round."""
            together()
            clock.start()
            return Metrics()

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            """Ends a round and starts the next."""
            together()
            clock.stop()
            made = torch.tensor(steps)
            if several:
                torch.distributed.all_reduce(made)
            self.made, steps[0] = int(made), 0
            together()
            clock.start()
            return False, Metrics()

    timer, total = Timer(), work.warmup + work.rounds
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=total,
            evaluation_frequency=total + 1,
            train_cohort_size=work.per_round,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs,
            local_learning_rate=work.lr,
            local_batch_size=work.batch,
            local_max_grad_norm=None,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=work.images),
        callbacks=[timer],
        send_metrics_to_platform=False,
    )
    if os.environ.get("PFL_WORKER_RANK", "0") == "0":
        report(clock, work, timer.made, n_parameters(module), pfl=version("pfl"))
    together()
    if several:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
