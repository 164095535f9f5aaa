"""The program that the SuperLink starts for a run: Flower's ServerApp around `coordinate`."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedhassle.federation.agreement import read_agreement
from fedhassle.federation.coordinate import coordinate
from fedhassle.federation.grid import FlowerGrid
from fedhassle.federation.pace import hurry_server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carries a run out in the folder and by the file that it was submitted with."""
    file, folder, test = (str(context.run_config[key]) for key in ("file", "folder", "test"))
    agreement = read_agreement(Path(file))
    hurry_server()
    for _ in coordinate(FlowerGrid(grid), agreement, Path(folder), Path(test) if test else None):
        pass
