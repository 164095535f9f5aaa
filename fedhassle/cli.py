"""The command line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedhassle.commands import models
from fedhassle.commands.options import DataDir, Device
from fedhassle.commands.reproduce import reproduce
from fedhassle.commands.site import check
from fedhassle.errors import DivergedError, UserError
from fedhassle.requested import Requested, request, variations
from fedhassle.version import package_version

if TYPE_CHECKING:
    from fedhassle.launch import Run

# PyTorch takes seconds to load: commands import what needs it when they run.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
data_app.command("check")(check)
console = Console()

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...", help="A preset (quick, paper) or a TOML file; then settings."
    ),
]


app.command()(reproduce)


def show_version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        typer.echo(f"fedhassle {package_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Federated semi-supervised learning where each site labels any share of its data."""


@app.command()
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
        from fedhassle.launch import start

        follow_to_the_end(start(requested, out))
        return
    many = [(name, asked([*(words or []), *more], data_dir, device)) for name, more in named_variations(vary)]
    from fedhassle.launch import start_several

    follow_all_to_the_end(start_several(many, out))


def named_variations(vary: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every combination of choices, with a name for its folder."""
    return [("-".join(word.partition("=")[2] for word in words), words) for words in variations(vary)]


@app.command()
def resume(
    folders: Annotated[list[Path], typer.Argument(help="The folder of a run that was cut, or several.")],
    device: Device = None,
) -> None:
    """Go on with runs after a crash, a kill or Ctrl-C."""
    from fedhassle.launch import reopen
    from fedhassle.runs import Folder

    finished = [path for path in folders if Folder(path).summary.exists() and Folder(path).config.exists()]
    for path in finished:
        console.print(f"{path} is finished: nothing to resume")
        show_result(path)
    cut = [reopen(path, device) for path in folders if path not in finished]
    if len(cut) == 1:
        follow_to_the_end(cut[0])
    elif cut:
        follow_all_to_the_end(cut)


def asked(words: Sequence[str] | None, data_dir: Path | None, device: str | None) -> Requested:
    """What the words and options of a command ask for."""
    config, changes = None, list(words or [])
    if changes and "=" not in changes[0]:
        config, *changes = changes
    if data_dir is not None:
        changes.append(f"data.folder={json.dumps(str(data_dir), ensure_ascii=False)}")
    if device is not None:
        changes.append(f"device={json.dumps(device)}")
    return request(config, changes)


def follow_to_the_end(launched: Run) -> None:
    """Shows a run while it trains, then its result."""
    from fedhassle.launch import carry_out
    from fedhassle.view import follow

    settings, path = launched.settings, launched.folder.path
    console.print(
        f"{settings.method.name} on {launched.dataset.name}: {len(launched.split.names)} clients, "
        f"{settings.clients_per_round} a round, {settings.rounds} rounds, on {settings.device}; "
        f"files in {path}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        follow(carry_out(launched), settings.rounds, launched.method.headline, console)
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: fedhassle resume {path}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    show_result(path)


def follow_all_to_the_end(launched: Sequence[Run]) -> None:
    """Shows several runs while they train, then their results together, and at the end what went wrong."""
    from fedhassle.together import carry_out_together
    from fedhassle.view import follow_together

    paths = [run.folder.path for run in launched]
    console.print(f"{len(launched)} runs on {launched[0].settings.device}; files in:", highlight=False)
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True)
    try:
        ends = follow_together(carry_out_together(launched), console)
    except KeyboardInterrupt:
        again = " ".join(str(path) for path in paths)
        console.print(f"stopped; go on with: fedhassle resume {again}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    done = [path for path, end in zip(paths, ends, strict=True) if end.error is None]
    if done:
        show_comparison(done)
    failed = [(path, end.error) for path, end in zip(paths, ends, strict=True) if end.error is not None]
    for path, error in failed:
        console.print(f"{path} failed: {error}", highlight=False, soft_wrap=True)
    if failed:
        raise failed[0][1]


def show_comparison(paths: Sequence[Path]) -> None:
    """The table of finished runs, those that differ in their seed alone together."""
    from fedhassle.report.groups import grouped
    from fedhassle.runs import read_summary
    from fedhassle.view import comparison_table

    console.print(comparison_table(grouped([read_summary(path) for path in paths])))


def show_result(path: Path) -> None:
    """The table of a finished run, and where its files are."""
    from fedhassle.runs import Folder, read_summary
    from fedhassle.view import final_table

    folder = Folder(path)
    console.print(final_table(read_summary(path)))
    for what, file in (("model", folder.model), ("curves", folder.curves), ("figures", folder.summary)):
        console.print(f"{what:8} {file}", highlight=False, soft_wrap=True)


@app.command()
def split(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    picture: Annotated[Path, typer.Option(help="Where the picture goes (.png or .svg).")] = Path("split.png"),
    save: Annotated[Path | None, typer.Option(help="Also save the split itself, for split.file=….")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show who holds what.

    Prints counts and effective classes per client, and draws the paper's dot picture.
    """
    from fedhassle.build import build_dataset, build_split
    from fedhassle.config import resolve
    from fedhassle.data.partition import table
    from fedhassle.report.dots import draw_split

    settings = resolve(asked(words, data_dir, None))
    dataset = build_dataset(settings)
    made = build_split(settings, dataset)
    rows = table(made, dataset.y_train, dataset.classes)
    title = f"{dataset.name}, {settings.split.labels}, α = {settings.split.alpha:g}"
    draw_split(rows, picture, title, dataset.class_names)
    if save is not None:
        made.save(save)
    if as_json:
        result = {
            "hash": made.hash,
            "notes": list(made.notes),
            "clients": [plain(asdict(row)) for row in rows],
        }
        typer.echo(json.dumps(result, indent=1))
        return
    console.print(split_table(rows, made.hash))
    for note in made.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(f"picture  {picture}", highlight=False, soft_wrap=True)


def plain(value: Any) -> Any:
    """Arrays and numbers of NumPy as JSON has them."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


def split_table(rows: Sequence[Any], digest: str) -> Table:
    """Counts and effective classes, a row for each client."""
    shown = Table(
        title=f"split {digest[:12]}: samples; effective classes",
        title_justify="left",
    )
    for column in ("client", "kind"):
        shown.add_column(column)
    for column in ("labelled", "unlabelled", "all", "lab.", "unl."):
        shown.add_column(column, justify="right")
    for row in rows:
        classes = (row.effective, row.effective_labelled, row.effective_unlabelled)
        figures = [f"{value:.1f}" if value else "–" for value in classes]
        shown.add_row(row.name, row.kind, f"{row.labelled:,}", f"{row.unlabelled:,}", *figures)
    total = [sum(row.labelled for row in rows), sum(row.unlabelled for row in rows)]
    shown.add_row("all", "", *(f"{n:,}" for n in total), "", "", "", style="bold")
    return shown


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, or their summary.json files.")
    ],
    picture: Annotated[Path, typer.Option(help="Where the picture goes (.png, .svg or .pdf).")] = Path(
        "compare.png"
    ),
) -> None:
    """Compare runs: a table, and their curves together.

    Runs that differ in their seed alone are taken together as mean ± std.
    """
    from fedhassle.report.curves import draw_curves
    from fedhassle.report.groups import grouped
    from fedhassle.runs import read_summary
    from fedhassle.view import comparison_table

    groups = grouped([read_summary(folder) for folder in folders])
    console.print(comparison_table(groups))
    draw_curves(groups, picture)
    console.print(f"picture  {picture}", highlight=False, soft_wrap=True)


app.command()(models.predict)
app.command()(models.evaluate)
app.command()(models.export)


@app.command()
def bench(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Else fedavg and hassle; all: all of them."),
    ] = None,
    net: Annotated[str | None, typer.Option(help="resnet8 (else on a GPU) or lenet (else on a CPU).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter rounds, and fewer of them.")] = False,
    scaling: Annotated[bool, typer.Option(help="Also how times grow with the numbers of clients.")] = True,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Fuse kernels, on a GPU.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else a GPU where there is one.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Where all figures go.")] = None,
) -> None:
    """Measure how fast rounds are here.

    Compares with a plain training loop and with the device's peak, on random images.
    """
    from fedhassle.bench import Options
    from fedhassle.bench import run as measure

    chosen = tuple(methods) if methods else Options.methods
    measure(Options(chosen, net, None, quick, scaling, compiled, device=device, json=as_json), console)


@app.command()
def methods() -> None:
    """List the methods, one line each."""
    from fedhassle.methods import METHODS

    for name, method in METHODS.items():
        console.print(f"{name:16} {first_line(method.__doc__)}", highlight=False, soft_wrap=True)


def first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().partition("\n")[0]


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """List the data sets, one line each, and whether they are here."""
    from fedhassle.data.datasets import CATALOGUE, data_folder

    folder = data_folder(data_dir)
    for entry in CATALOGUE.values():
        here = (
            "shipped"
            if not entry.sources
            else "here"
            if (folder / f"{entry.name}.npz").exists()
            else "to download"
        )
        counts = f"{entry.images[0]:,} + {entry.images[1]:,} images, {entry.classes} classes"
        console.print(
            f"{entry.name:12} {counts:38} {here:12} {entry.description}", highlight=False, soft_wrap=True
        )
    console.print(
        f"files lie in {folder}; any .npz with x_train, y_train, x_test, y_test goes by its path",
        soft_wrap=True,
    )


def main() -> None:
    """Runs the command line: what a user can mend is a short message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # α and ± on a terminal that has none
    sys.path.insert(0, "")  # methods and networks of one's own may lie in the working folder
    sys.exit(guarded(app))


def guarded(command: Callable[[], object]) -> int:
    """The exit code of a command."""
    try:
        command()
    except UserError as error:
        typer.echo(f"fedhassle: {error}", err=True)
        return 2
    except OSError as error:
        typer.echo(f"fedhassle: {error.filename or ''}: {error.strerror or error}", err=True)
        return 2
    except DivergedError as error:
        typer.echo(f"fedhassle: {error}", err=True)
        return 1
    return 0
