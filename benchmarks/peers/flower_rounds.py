"""FedAvg rounds of Flower's simulation engine with Ray.

In its favour: workers keep all images and the network from round to round, nothing is evaluated, no
dashboard, no telemetry, and a round lasts from the drawing of clients until their mean; what Flower does
between two rounds does not count. On a GPU, as for pfl: channels_last, PyTorch's fused SGD, cuDNN tuned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.peers.clock import Clock, report, told, written
from benchmarks.peers.networks import build, n_parameters
from benchmarks.peers.work import CLASSES

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
ONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else each worker starts as many processes as there are cores


def main() -> None:
    """Trains rounds and reports their times."""
    os.environ.update(QUIET | ONE)  # before Flower and Ray are imported
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from benchmarks.peers import flower_client

    work, how = told()
    torch.set_num_threads(1)
    module = build(work.net, work.shape, CLASSES)
    clock, steps = Clock(work.device), [0]

    class Timed(FedAvg):
        """Flower's FedAvg between two clocks."""

        def configure_train(self, *given: Any, **more: Any) -> Any:
            """Starts a round."""
            clock.start()
            return super().configure_train(*given, **more)

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
            """Ends a round."""
            replies = list(replies)
            merged = super().aggregate_train(server_round, replies)
            clock.stop()
            assert len(replies) == work.per_round and not any(reply.has_error() for reply in replies)
            steps[0] = sum(int(reply.content["metrics"]["steps"]) for reply in replies)
            return merged

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        """Runs the rounds."""
        strategy = Timed(
            fraction_train=work.per_round / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.per_round,
            min_available_nodes=work.clients,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(module.state_dict()),
            num_rounds=work.warmup + work.rounds,
            train_config=ConfigRecord({"task": written(work, how)}),
        )

    cores, gpus = len(os.sched_getaffinity(0)), 1 / how.processes if work.device == "cuda" else 0.0
    at_once = min(cores, how.processes) if work.device == "cuda" else cores
    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=work.clients,
        backend_config={
            "init_args": {"num_cpus": at_once, "num_gpus": int(gpus > 0), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus},
        },
    )
    report(clock, work, steps[0], n_parameters(module), flwr=version("flwr"), ray=version("ray"))


if __name__ == "__main__":
    main()
