"""`fedhassle run`, `resume` and `compare`: runs, and what came out of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle.cli.options import DataDir, Device, Words, asked
from fedhassle.names import counted
from fedhassle.settings.request import variations
from fedhassle.terminal import say

if TYPE_CHECKING:
    from fedhassle.runs.launch import Run

# PyTorch takes seconds to load: commands import what needs it when they run.

console = Console()


def run(
    words: Words = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (else one under runs/).")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2", help="One run for each value: seed=0,1,2. Several: every combination."
        ),
    ] = None,
    data_dir: DataDir = None,
    device: Device = None,
) -> None:
    """Train a model, or several that differ in some settings.

    CONFIG is a preset (quick, paper) or a TOML file that holds what differs from the paper's settings;
    KEY=VALUE comes on top of it, such as method=fedavg rounds=50 split.alpha=0.5 seed=1. With --vary there
    is a run for each value, in folders of their own; on a GPU they train side by side.
    """
    if not vary:
        requested = asked(words, data_dir, device)
        from fedhassle.runs.launch import start

        follow_to_the_end(start(requested, out))
        return
    many = [(name, asked([*(words or []), *more], data_dir, device)) for name, more in variations(vary)]
    from fedhassle.runs.launch import start_several

    follow_all_to_the_end(start_several(many, out))


def resume(
    folders: Annotated[
        list[Path], typer.Argument(help="The folder of a run that was cut, several, or one of such folders.")
    ],
    device: Device = None,
) -> None:
    """Go on with runs after a crash, a kill or Ctrl-C."""
    from fedhassle.runs.launch import Loader, reopen
    from fedhassle.runs.record import Folder, begun_in

    there = [path for folder in folders for path in begun_in(folder)]
    finished = [path for path in there if Folder(path).finished]
    for path in finished:
        say(console, f"{path} is finished: nothing to resume")
        show_result(path)
    load = Loader()
    cut = [reopen(path, device, load) for path in there if path not in finished]
    if len(cut) == 1:
        follow_to_the_end(cut[0])
    elif cut:
        follow_all_to_the_end(cut)


def follow_to_the_end(launched: Run) -> None:
    """Shows a run while it trains, then its result."""
    from fedhassle.runs.launch import carry_out
    from fedhassle.runs.live import follow
    from fedhassle.runs.record import way_on

    settings, path = launched.settings, launched.folder.path
    say(
        console,
        f"{settings.method.name} on {launched.dataset.name}: {len(launched.split.names)} clients, "
        f"{settings.clients_per_round} a round, {counted(settings.rounds, 'round')}, on {settings.device}; "
        f"files in {path}",
    )
    try:
        follow(carry_out(launched), settings.rounds, launched.method.headline, console)
    except KeyboardInterrupt:
        say(console, f"stopped; go on with: {way_on(launched.folder)}")
        raise typer.Exit(130) from None
    show_result(path)


def follow_all_to_the_end(launched: Sequence[Run]) -> None:
    """Shows several runs while they train, then their results together, and at the end what went wrong."""
    from fedhassle.runs.live import follow_together
    from fedhassle.runs.record import way_on
    from fedhassle.runs.several import carry_out_together

    paths = [run.folder.path for run in launched]
    say(console, f"{len(launched)} runs on {launched[0].settings.device}; files in:")
    for path in paths:
        say(console, f"  {path}")
    try:
        ends = follow_together(carry_out_together(launched), console)
    except KeyboardInterrupt:
        say(console, f"stopped; go on with: {way_on(*(run.folder for run in launched))}")
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
    """The table of finished runs, those that differ in their seed alone together; before it, their curves.

    Beneath it, by how much they are above the first, or the one that is named, on the same seeds.
    """
    from fedhassle.runs.curves import draw_curves
    from fedhassle.runs.live import comparison_table, gaps
    from fedhassle.runs.record import read_summary
    from fedhassle.runs.seeds import grouped

    groups = grouped([read_summary(path) for path in paths])
    lines = gaps(groups, against)
    if picture is not None:
        draw_curves(groups, picture)
    console.print(comparison_table(groups))
    for line in lines:
        say(console, line)
    double = len(paths) - sum(len(group.runs) for group in groups)
    if double:
        say(console, f"left out, of the same settings and seed as another: {counted(double, 'run')}")
    if len({group.seeds for group in groups}) > 1:
        say(console, "not all have the same seeds: compare on those that all have")


def show_result(path: Path) -> None:
    """The table of a finished run, and where its files are."""
    from fedhassle.runs.live import final_table
    from fedhassle.runs.record import Folder, on_test_images, read_summary

    folder, summary = Folder(path), read_summary(path)
    console.print(final_table(summary))
    if (tested := on_test_images(summary)) is not None:
        console.print(final_table(tested, "the same on the coordinator's test images"))
    for what, file in (("model", folder.model), ("curves", folder.curves), ("figures", folder.summary)):
        say(console, f"{what:8} {file}")


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of finished runs, folders of such folders, or summary.json files."),
    ],
    picture: Annotated[Path, typer.Option(help="Where the picture goes (.png, .svg or .pdf).")] = Path(
        "compare.png"
    ),
    against: Annotated[
        str | None,
        typer.Option(help="What the others are held against, as the table calls it; else the first."),
    ] = None,
) -> None:
    """Compare runs: a table, and their curves together.

    Runs that differ in their seed alone are taken together as mean ± std. Beneath are the differences to the
    first, seed by seed. Runs without a summary.json, which are not finished, are named and left out.
    """
    from fedhassle.files import check_picture
    from fedhassle.runs.curves import FORMATS
    from fedhassle.runs.record import spread_out, to_be_read

    check_picture(picture, FORMATS)
    there = [path for folder in folders for path in spread_out(folder)]
    done = [path for path in there if to_be_read(path)]
    show_comparison(done or there, picture, against)  # if none is finished, the error names the first
    if len(done) < len(there):
        left = " ".join(str(path) for path in there if path not in done)
        say(console, f"left out, without a summary.json: {left}")
    say(console, f"picture  {picture}")


def methods() -> None:
    """List the methods, one line each."""
    from fedhassle.methods import METHODS

    for name, method in METHODS.items():
        say(console, f"{name:16} {first_line(method.__doc__)}")


def first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().partition("\n")[0]
