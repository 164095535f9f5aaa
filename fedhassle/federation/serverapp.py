"""The program that the SuperLink starts for a run: Flower's ServerApp around `coordinate`."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedhassle.errors import UserError
from fedhassle.federation.coordinate import coordinate
from fedhassle.federation.grid import FlowerGrid
from fedhassle.federation.node import load_site
from fedhassle.federation.pace import hurry_server
from fedhassle.federation.terms import read_terms

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carries a run out in the folder and by the file that it was submitted with."""
    file, folder, test = (str(context.run_config[key]) for key in ("file", "folder", "test"))
    try:
        terms = read_terms(Path(file).read_text("utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the federation's file {file} cannot be read: {error}") from error
    hurry_server()
    images = load_site(Path(test)) if test else None
    for _ in coordinate(FlowerGrid(grid), terms, Path(folder), images):
        pass
