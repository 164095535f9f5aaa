"""The program that the SuperLink starts for a run: Flower's ServerApp around `coordinate`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedhassle.errors import UserError
from fedhassle.federation.agreement import read_agreement
from fedhassle.federation.flower.logs import log_to_output
from fedhassle.federation.flower.patches import patch_server
from fedhassle.federation.flower.processes import end_with
from fedhassle.federation.flower.transport import Admission, FlowerTransport
from fedhassle.federation.server.calls import pem
from fedhassle.federation.server.coordinate import coordinate
from fedhassle.federation.setup.admission import admitted

app = ServerApp()


class Admissions:
    """The current admissions by key; while the record cannot be read, the last ones that were."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[bytes, Admission]()

    def __call__(self) -> dict[bytes, Admission]:
        """Reads the record."""
        with suppress(UserError):
            sites = admitted(self.folder)
            self.known = {pem(site.key): Admission(name, site.images) for name, site in sites.items()}
        return self.known


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carries out a run, with the file and folder that it was submitted with."""
    file, folder, test = (str(context.run_config[key]) for key in ("file", "folder", "test"))
    agreement = read_agreement(Path(file))
    end_with(os.getppid())  # otherwise it would keep its folder locked after the server has ended
    log_to_output(also=("flwr",))
    patch_server()
    transport = FlowerTransport(grid, Admissions(Path(file).parent))
    for _ in coordinate(transport, agreement, Path(folder), Path(test) if test else None):
        pass
