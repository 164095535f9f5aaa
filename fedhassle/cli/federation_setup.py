"""Setting a federation up: `fedhassle federation init`, `join`, `admit` and `expel`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedhassle import terminal
from fedhassle.cli.data import FEW, show_survey
from fedhassle.errors import UserError, require

if TYPE_CHECKING:
    from fedhassle.federation.agreement import Agreement, DataTerms

# PyTorch takes seconds to load, cryptography a moment: commands import what they need when they run.

console = Console()
say = partial(terminal.say, console)

Federation = Annotated[
    Path, typer.Option("--federation", help="The federation's folder, at the coordinator.")
]
FOLDER = Path("federation")


def require_flower() -> None:
    """What a federation runs on is installed, in a version that goes with this package."""
    try:
        from fedhassle.federation.setup.preflight import check_versions
    except ImportError as error:  # cryptography comes with Flower
        raise UserError(f"a federation needs more: pip install 'fedhassle[flower]' ({error})") from error
    found = check_versions()
    require(found.ok, f"{found.said}: {found.advice}")


def init(
    address: Annotated[str, typer.Option(help="Where sites reach the server: host:port.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the run: method=hassle rounds=100."),
    ] = None,
    name: Annotated[str, typer.Option(help="What the federation is called.")] = "federation",
    classes: Annotated[str | None, typer.Option(help="The classes: benign,malignant.")] = None,
    like: Annotated[
        str | None, typer.Option(help="A data set: its classes, size, colours and normalisation.")
    ] = None,
    from_folder: Annotated[
        Path | None, typer.Option(help="Images of your own: their classes, size and normalisation.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="The label file of --from-folder.")] = None,
    size: Annotated[str | None, typer.Option(help="Of an image, in pixels: 64, or HEIGHTxWIDTH.")] = None,
    channels: Annotated[int | None, typer.Option(help="1 (grey) or 3 (colour).")] = None,
    flip: Annotated[
        bool | None, typer.Option("--flip/--no-flip", help="Whether a mirrored image is as good.")
    ] = None,
    crop: Annotated[int | None, typer.Option(help="Random crops, by so many pixels.")] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="Another name or address of the server, for its certificate.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The new folder.")] = FOLDER,
) -> None:
    """Found a federation: its file, a certificate authority and the server's certificate.

    Say what the images are with --classes and --size, with --like fmnist, or with --from-folder. Sites get
    federation.toml and ca.crt, and nothing else.
    """
    require_flower()
    from fedhassle.data.site.labels import suspicious_names
    from fedhassle.federation.agreement import Agreement, agreement_hash
    from fedhassle.federation.setup.init import found_federation
    from fedhassle.federation.setup.keys import certificate_fingerprint

    terms = chosen_terms(classes, like, from_folder, labels, size, channels)
    terms = replace(
        terms, flip=terms.flip if flip is None else flip, crop=terms.crop if crop is None else crop
    )
    agreement = checked_run(Agreement(name, address, terms, chosen_run(words or [], terms)))
    made = found_federation(agreement, out, also or [])
    say(f"{name}: {len(terms.class_names)} classes, images of {terms.height}×{terms.width}×{terms.channels}")
    for doubt in suspicious_names(terms.class_names):
        say(f"note: {doubt}")
    say(f"for every site   {made.agreement}  {made.ca}")
    say(f"for nobody else  {made.private}")
    say("read these to each site over the telephone, so that nobody can put other files in their place:")
    say(f"  hash of the agreement  {agreement_hash(agreement)}")
    say(f"  fingerprint of ca.crt  {certificate_fingerprint(made.ca)}")
    say(f"next: each site runs fedhassle federation join, and you admit its key into {out}")


def chosen_terms(
    classes: str | None,
    like: str | None,
    folder: Path | None,
    labels: Path | None,
    size: str | None,
    channels: int | None,
) -> DataTerms:
    """What the options say of the images."""
    from fedhassle.federation.setup import init

    ways = [way for way in (classes, like, folder) if way is not None]
    require(len(ways) == 1, "say what the images are with one of --classes, --like and --from-folder")
    require(labels is None or folder is not None, "--labels goes with --from-folder")
    sides = None if size is None else parsed_size(size)
    require(channels in (None, 1, 3), f"--channels is 1 (grey) or 3 (colour), got {channels}")
    if folder is not None:
        return init.terms_of_folder(folder, labels, sides, channels)
    if classes is not None:
        names = [name.strip() for name in classes.split(",")]
        require(sides is not None, "--classes goes with --size, such as --size 64")
        return init.terms_by_classes(names, sides or (0, 0), channels or 3)
    terms = init.terms_like(like or "")
    if sides is None and channels in (None, terms.channels):
        return terms
    sides = sides or (terms.height, terms.width)
    return init.terms_by_classes(terms.class_names, sides, channels or terms.channels)


def parsed_size(size: str) -> tuple[int, int]:
    """`64` or `48x64` as height and width."""
    match = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", size)
    if match is None:
        raise UserError(f"--size is a number of pixels, or HEIGHTxWIDTH such as 48x64, got {size!r}")
    return int(match[1]), int(match[2] or match[1])


def chosen_run(words: Sequence[str], terms: DataTerms) -> dict[str, Any]:
    """[run]: what is given, over a network that suits the images."""
    from fedhassle.data.catalogue import default_entry
    from fedhassle.settings.request import layer, overlaid

    return overlaid({"net": default_entry(terms.channels).net}, layer(words))


def checked_run(agreement: Agreement) -> Agreement:
    """The agreement, with settings that a run can be built from, and the most important ones written out."""
    from fedhassle.federation.agreement import checked_agreement, to_toml
    from fedhassle.federation.terms import agreed_method, described, run_settings
    from fedhassle.settings.request import overlaid

    checked_agreement(to_toml(agreement), "these options")  # before PyTorch is loaded
    settings = run_settings(agreement)
    agreed_method(settings, described(agreement))
    shown = {
        "method": {"name": settings.method.name},
        "rounds": settings.rounds,
        "evaluate_every": settings.evaluate_every,
        "seed": settings.seed,
    }
    return replace(agreement, run=overlaid(shown, dict(agreement.run)))


def join(
    federation: Annotated[Path, typer.Argument(help="Folder with federation.toml and ca.crt.")],
    name: Annotated[str, typer.Option(help="What this site is called: letters, digits, . _ -")],
    data: Annotated[Path, typer.Option(help="This site's images: a folder, or an .npz.")],
    labels: Annotated[Path | None, typer.Option(help="The label file (else labels.csv in it).")] = None,
    expected: Annotated[
        str | None, typer.Option("--hash", help="The agreement's, as the coordinator reads it out.")
    ] = None,
) -> None:
    """Prepare a site: check its data, make its key pair, and show what to send back.

    What to send back is the public key alone. The private key, and all data, stay on this machine.
    """
    require_flower()
    from fedhassle.data.site.survey import survey
    from fedhassle.federation.agreement import agreement_hash, read_agreement
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.federation.setup.keys import certificate_fingerprint, fingerprint, read_public_key
    from fedhassle.federation.setup.preflight import check_agreement

    folder = federation_folder(federation)
    agreement = read_agreement(folder.agreement)
    same = check_agreement(agreement, expected)
    require(same.ok, f"{same.said}: {same.advice}")
    key, public = folder.site_key(name), folder.site_public(name)
    authority = certificate_fingerprint(folder.ca)
    with terminal.shown_progress(console) as progress:
        found = survey(data, agreement.data.form, labels, progress)
    show_survey(found, FEW, console)
    kept = site_key(key, public, name)
    say(f"hash of the agreement  {agreement_hash(agreement)}")
    say(f"fingerprint of ca.crt  {authority}")
    say("compare both with what the coordinator reads to you over the telephone")
    say(f"{'kept' if kept else 'made'} the private key {key}: it stays on this machine")
    say(f"send this file to the coordinator, and nothing else: {public}")
    say(f"  {public.read_text('utf-8').strip()}")
    say(f"  {fingerprint(read_public_key(public))}")


def site_key(key: Path, public: Path, name: str) -> bool:
    """Makes a site's key pair, or keeps the one that is there (True); the public half is there afterwards."""
    from fedhassle.federation.setup.keys import make_site_key, public_line
    from fedhassle.files import write_text

    if not key.exists():
        make_site_key(key, public, name)
        return False
    write_text(public, public_line(key, name) + "\n")
    return True


def admit(
    name: Annotated[str, typer.Argument(help="What the site is called.")],
    key: Annotated[Path, typer.Argument(help="The public key that it sent, NAME.pub.")],
    federation: Federation = FOLDER,
) -> None:
    """Admit a site, by the public key that it sent; one that is admitted gets the name that is given here."""
    require_flower()
    from fedhassle.federation.setup.admission import admit_site
    from fedhassle.federation.setup.folder import checked_name, federation_folder, is_name
    from fedhassle.federation.setup.keys import fingerprint, key_comment, read_public_key

    folder = federation_folder(federation)
    public, called = read_public_key(key), key_comment(key)
    if checked_name(name) != called and is_name(called):
        raise UserError(
            f"the site that made {key} is called {called}, not {name}: fedhassle federation admit {called} "
            f"{key}, or let it join again with --name {name}"
        )
    before = admit_site(folder.path, name, public)
    said = {"": f"{name} is admitted", name: f"{name} is admitted already"}
    say(f"{said.get(before, f'{before} is called {name} from now on')}: {fingerprint(public)}")


def expel(
    name: Annotated[str, typer.Argument(help="What the site is called.")],
    federation: Federation = FOLDER,
) -> None:
    """Take a site out of the federation."""
    require_flower()
    from fedhassle.federation.setup.admission import expel_site
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.federation.setup.keys import fingerprint

    gone = expel_site(federation_folder(federation).path, name)
    say(f"{name} is expelled: {fingerprint(gone.key)}")
