"""`fedhassle run`, `resume` and `compare`: train models and compare their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle.cli.completion import complete_choice
from fedhassle.cli.options import DataDir, Device, Ray, Words, parse_request
from fedhassle.errors import require
from fedhassle.names import counted
from fedhassle.settings.request import is_setting, key_value, variations
from fedhassle.terminal import say, show_table

if TYPE_CHECKING:
    from fedhassle.runs.run import Run

# PyTorch takes seconds to load: commands import what needs it when they run.

console = Console()


def run(
    words: Words = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one in runs/).")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="One run per value: seed=0,1,2. Repeat it with another key to train every combination "
            "(default: one run).",
            autocompletion=complete_choice,
        ),
    ] = None,
    data_dir: DataDir = None,
    device: Device = None,
    ray: Ray = None,
) -> None:
    """Train a model, or several with different settings.

    CONFIG is a preset (quick, paper) or a TOML file with the settings that differ from the paper's. KEY=VALUE
    overrides it: method=fedavg rounds=50 split.alpha=0.5 seed=1. With --vary each value is a run with its own
    folder; several train at once where that is faster. With workers=4 a run trains on four GPUs or groups of
    cores.
    """
    if not vary:
        requested = parse_request(words, data_dir, device, ray)
        from fedhassle.runs.run import start

        follow_run(start(requested, out))
        return
    many = [
        (name, parse_request([*(words or []), *more], data_dir, device, ray))
        for name, more in variations(vary)
    ]
    from fedhassle.runs.run import start_several

    follow_runs(start_several(many, out))


def resume(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER... [rounds=N]",
            help="Folders of runs, or folders that contain such folders; then a larger number of rounds.",
        ),
    ],
    device: Annotated[
        str | None, typer.Option(help="Device to train on: auto, cpu or cuda (default: the run's).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of workers (default: the run's).")] = None,
    ray: Ray = None,
) -> None:
    """Resume interrupted runs, or extend finished ones.

    After a crash, a kill or Ctrl-C a run continues from its last checkpoint, with bit-identical results (on a
    GPU with deterministic=true). With rounds=300 a finished run trains on to 300 rounds, as if it had had 300
    from the start. This is refused if the first rounds depend on the number of rounds, as with a
    learning-rate schedule. No other setting can change.
    """
    from fedhassle.files import remove_stale_lock
    from fedhassle.runs.folder import Folder, run_folders
    from fedhassle.runs.record import read_summary
    from fedhassle.runs.resume import reopen
    from fedhassle.runs.run import Loader

    folders, rounds = folders_and_rounds(words)
    there = [path for folder in folders for path in run_folders(folder)]
    ended = [path for path in there if Folder(path).finished]
    finished = [path for path in ended if rounds in (None, read_summary(path)["rounds"])]
    for path in finished:
        remove_stale_lock(path)
        say(console, f"{path} is finished: nothing to resume")
        show_result(path)
    load = Loader()
    cut = [reopen(path, device, load, workers, ray, rounds) for path in there if path not in finished]
    if len(cut) == 1:
        follow_run(cut[0])
    elif cut:
        follow_runs(cut)


def folders_and_rounds(words: Sequence[str]) -> tuple[list[Path], int | None]:
    """Returns the folders of a command, and the number of rounds that it asks for, if any."""
    changes = dict(key_value(word) for word in words if is_setting(word) and not Path(word).exists())
    for key in changes:
        require(
            key == "rounds",
            f"{key} cannot change when a run is resumed, only rounds can: the rounds before would not fit. "
            f"Start a new run with it: fedhassle run … {key}={changes[key]}",
        )
    rounds = changes.get("rounds")
    require(rounds is None or type(rounds) is int, f"rounds: expected a whole number, got {rounds!r}")
    folders = [Path(word) for word in words if Path(word).exists() or not is_setting(word)]
    require(bool(folders), "name the folder of a run before rounds=N")
    return folders, rounds


def follow_run(launched: Run) -> None:
    """Shows a run while it trains, then its result."""
    from fedhassle.runs.folder import resume_command
    from fedhassle.runs.live import follow
    from fedhassle.runs.train import train_run

    settings, path = launched.settings, launched.folder.path
    workers = f" with {counted(settings.workers, 'worker')}" if settings.distributed else ""
    place = settings.device + workers
    say(
        console,
        f"{settings.method.name} on {launched.dataset.name}: {len(launched.split.names)} clients, "
        f"{settings.clients_per_round} per round, {counted(launched.rounds, 'round')}, on {place}",
    )
    say(console, f"files    {path}")
    try:
        follow(train_run(launched), launched.rounds, launched.method.headline, console)
    except KeyboardInterrupt:
        say(console, f"stopped; to continue: {resume_command(launched.folder)}")
        raise typer.Exit(130) from None
    show_result(path)


def follow_runs(launched: Sequence[Run]) -> None:
    """Shows several runs while they train, then compares their results and lists those that failed."""
    from fedhassle.runs.folder import resume_command
    from fedhassle.runs.live import follow_several
    from fedhassle.runs.several import train_several

    paths = [run.folder.path for run in launched]
    say(console, f"{len(launched)} runs on {launched[0].settings.device}; files in:")
    for path in paths:
        say(console, f"  {path}")
    try:
        ends = follow_several(train_several(launched), console)
    except KeyboardInterrupt:
        say(console, f"stopped; to continue: {resume_command(*(run.folder for run in launched))}")
        raise typer.Exit(130) from None
    done = [path for path, end in zip(paths, ends, strict=True) if end.error is None]
    if done:
        show_comparison(done)
    failed = [(path, end.error) for path, end in zip(paths, ends, strict=True) if end.error is not None]
    for path, error in failed:
        say(console, f"{path} failed: {error}")
    if failed:
        raise failed[0][1]


def show_comparison(paths: Sequence[Path], picture: Path | None = None, against: str | None = None) -> None:
    """Prints the table of finished runs, grouped over seeds, and draws their curves.

    Below the table are the differences to the first group, or to the one named `against`, seed by seed.
    """
    from fedhassle.runs.curves import draw_curves
    from fedhassle.runs.live import comparison_table, gaps, own_table
    from fedhassle.runs.record import read_summary
    from fedhassle.runs.seeds import grouped

    groups = grouped([read_summary(path) for path in paths])
    lines = gaps(groups, against)
    if picture is not None:
        draw_curves(groups, picture)
    show_table(console, comparison_table(groups))
    if (own := own_table(groups)) is not None:
        show_table(console, own)
    for line in lines:
        say(console, line)
    double = len(paths) - sum(len(group.runs) for group in groups)
    if double:
        say(console, f"left out, with the same settings and seed as another run: {counted(double, 'run')}")
    if len({group.seeds for group in groups}) > 1:
        say(console, "the groups have different seeds: compare only the seeds that they share")


def show_result(path: Path) -> None:
    """Prints the table of a finished run and the paths of its files."""
    from fedhassle.runs.folder import Folder
    from fedhassle.runs.live import final_table
    from fedhassle.runs.record import OWN, evaluations_averaged, on_test_images, read_summary

    folder, summary = Folder(path), read_summary(path)
    show_table(console, final_table(summary))
    if (tested := on_test_images(summary)) is not None:
        show_table(console, final_table(tested, "on the coordinator's test images"))
    if own := summary.get(OWN):
        shown = "; ".join(
            f"{name} {'unknown' if value is None else f'{value:.4g}'}" for name, value in own.items()
        )
        say(
            console,
            f"metrics  {shown} (mean of the last {counted(evaluations_averaged(summary), 'evaluation')})",
        )
    best = summary.get("best")
    if best is not None:
        score = f"{summary['headline']} {100 * best['accuracy'][summary['headline']]:.2f} %"
        how = f"round {best['round']}, the best on validation images ({score})"
        say(console, f"model    {folder.best}: {how}")
    model = "model" if best is None else "last"
    for what, file in ((model, folder.model), ("curves", folder.curves), ("summary", folder.summary)):
        say(console, f"{what:8} {file}")


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of finished runs, folders that contain such folders, or summary.json files."
        ),
    ],
    picture: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path(
        "compare.png"
    ),
    against: Annotated[
        str | None,
        typer.Option(help="Row of the table to compare the others with (default: the first)."),
    ] = None,
) -> None:
    """Compare finished runs: a table, and a plot of their curves.

    Runs that differ only in their seed are averaged (mean ± std). Below the table are the differences to the
    first row, seed by seed. Unfinished runs, without a summary.json, are listed and left out.
    """
    from fedhassle.files import check_picture
    from fedhassle.runs.curves import FORMATS
    from fedhassle.runs.folder import is_result, result_folders

    check_picture(picture, FORMATS)
    there = [path for folder in folders for path in result_folders(folder)]
    done = [path for path in there if is_result(path)]
    show_comparison(done or there, picture, against)  # if none is finished, the error names the first
    if len(done) < len(there):
        left = " ".join(str(path) for path in there if path not in done)
        say(console, f"left out, without a summary.json: {left}")
    say(console, f"picture  {picture}")
