"""`fedhassle federation init`, `certificate`, `join`, `admit` and `expel`: set up a federation."""

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
from fedhassle.cli.completion import complete_choice
from fedhassle.cli.data import FEW, show_survey
from fedhassle.cli.options import AgreedPatients, Intensities, Labels
from fedhassle.errors import UserError, require
from fedhassle.names import counted

if TYPE_CHECKING:
    from fedhassle.federation.agreement import Agreement, DataTerms
    from fedhassle.federation.setup.folder import FederationFolder

# PyTorch takes seconds to load, cryptography a moment: commands import what they need when they run.

console = Console()
say = partial(terminal.say, console)

Federation = Annotated[
    Path, typer.Option("--federation", help="Folder of the federation, at the coordinator.")
]
Coordinators = Annotated[Path, typer.Argument(help="Folder of the federation, at the coordinator.")]
SiteImages = Annotated[Path, typer.Option(help="Images of this site: a folder, or an .npz file.")]
AgreementHash = Annotated[
    str | None, typer.Option("--hash", help="Hash that the coordinator told you (default: not checked).")
]
OtherNames = Annotated[
    list[str] | None,
    typer.Option("--also", help="Another address in the server's certificate (default: none)."),
]
FOLDER = Path("federation")
NO_PATIENTS = (
    "if a patient has several images, choose --patients: sites would validate on patients they train on"
)


def require_flower() -> None:
    """Checks that Flower is installed, in a version that this package supports."""
    try:
        from fedhassle.federation.setup.preflight import check_versions
        from fedhassle.federation.setup.proxy import spare_loopback
    except ImportError as error:  # cryptography comes with Flower
        raise UserError(f"a federation needs Flower: pip install 'fedhassle[flower]' ({error})") from error
    found = check_versions()
    require(found.ok, f"{found.said}: {found.advice}")
    spare_loopback()


def init(
    address: Annotated[str, typer.Option(help="Address of the server for the sites, host:port.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings of the run: method=hassle rounds=100.",
            autocompletion=complete_choice,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "federation",
    classes: Annotated[str | None, typer.Option(help="Names of the classes: benign,malignant.")] = None,
    like: Annotated[
        str | None, typer.Option(help="Use the classes, size, colours and normalisation of this data set.")
    ] = None,
    from_folder: Annotated[
        Path | None, typer.Option(help="Use the classes, size and normalisation of these images.")
    ] = None,
    labels: Labels = None,
    size: Annotated[
        str | None, typer.Option(help="Pixels: 64, or HEIGHTxWIDTH (default: as --like or --from-folder).")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(help="1: grey, 3: colour (default: as --like or --from-folder, or 3).")
    ] = None,
    flip: Annotated[
        bool | None,
        typer.Option("--flip/--no-flip", help="Mirror images in training (default: as --like, or --flip)."),
    ] = None,
    crop: Annotated[
        int | None,
        typer.Option(
            help="Largest shift of images in training, in pixels (default: as --like, or 1/8 of the side)."
        ),
    ] = None,
    patients: AgreedPatients = None,
    intensities: Intensities = None,
    also: OtherNames = None,
    out: Annotated[Path, typer.Option(help="Folder to create.")] = FOLDER,
) -> None:
    """Create a federation: its agreement, keys and certificates.

    Describe the images with --classes and --size, with --like fmnist, or with --from-folder. Give each site
    the files federation.toml and ca.crt, and nothing else.
    """
    require_flower()
    from fedhassle.federation.agreement import Agreement
    from fedhassle.federation.setup.init import create_federation

    terms = chosen_terms(classes, like, from_folder, labels, size, channels, intensities)
    terms = replace(
        terms,
        flip=terms.flip if flip is None else flip,
        crop=terms.crop if crop is None else crop,
        patients=terms.patients if patients is None else patients,
        intensities=intensities,
    )
    agreement = checked_run(Agreement(name, address, terms, chosen_run(words or [], terms)))
    show_created(agreement, create_federation(agreement, out, also or []))


def show_created(agreement: Agreement, made: FederationFolder) -> None:
    """Prints what a federation has agreed on, and what its coordinator does next."""
    from fedhassle.data.site.labels import suspicious_names
    from fedhassle.federation.agreement import agreement_hash
    from fedhassle.federation.setup.keys import certificate_fingerprint

    terms = agreement.data
    form = f"{terms.height}×{terms.width}×{terms.channels}"
    say(f"{agreement.name}: {len(terms.class_names)} classes, images of {form}")
    for doubt in (*suspicious_names(terms.class_names), *([] if terms.patients else [NO_PATIENTS])):
        say(f"note: {doubt}")
    say(f"for every site   {made.agreement}  {made.ca}")
    say(f"for nobody else  {made.private}")
    say("read these to each site over the telephone, so that nobody can replace the files on the way:")
    say(f"  hash of the agreement  {agreement_hash(agreement)}")
    say(f"  fingerprint of ca.crt  {certificate_fingerprint(made.ca)}")
    say(f"next: each site runs fedhassle federation join, and you admit its key to {made.path}")


def certificate(folder: Coordinators = FOLDER, also: OtherNames = None) -> None:
    """Make a new certificate for the server, in place of the old one.

    It is for the address in federation.toml, the names of the old one, and those of --also. Sites need
    nothing new, since the federation's own authority signs it. The old files are kept beside the new ones.
    """
    require_flower()
    from fedhassle.federation.agreement import read_agreement
    from fedhassle.federation.setup.certificate import renew_certificate
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.federation.setup.keys import names_in, read_certificate, validity

    found = federation_folder(folder)
    kept = renew_certificate(found, read_agreement(found.agreement).address, also or [])
    made = read_certificate(found.certificate)
    say(f"{found.certificate}: {validity(made)}")
    say(f"for      {', '.join(names_in(made))}")
    say(f"old      {'  '.join(map(str, kept)) or 'none'}")
    say("sites need nothing new: ca.crt stays the same")
    say("the server uses the new certificate from its next start")


def chosen_terms(
    classes: str | None,
    like: str | None,
    folder: Path | None,
    labels: Path | None,
    size: str | None,
    channels: int | None,
    intensities: str | None,
) -> DataTerms:
    """Returns the terms for the images, from the options; `intensities` is for reading those of a folder."""
    from fedhassle.federation.setup import init

    ways = [way for way in (classes, like, folder) if way is not None]
    require(len(ways) == 1, "describe the images with one of --classes, --like and --from-folder")
    require(labels is None or folder is not None, "--labels needs --from-folder")
    sides = None if size is None else parsed_size(size)
    require(channels in (None, 1, 3), f"--channels must be 1 (grey) or 3 (colour), got {channels}")
    if folder is not None:
        return init.terms_of_folder(folder, labels, sides, channels, intensities)
    if classes is not None:
        names = [name.strip() for name in classes.split(",")]
        if sides is None:
            raise UserError("--classes needs --size, such as --size 64")
        return init.terms_by_classes(names, sides, channels or 3)
    terms = init.terms_like(like or "")
    if sides is None and channels in (None, terms.channels):
        return terms
    sides = sides or (terms.height, terms.width)
    return init.terms_by_classes(terms.class_names, sides, channels or terms.channels)


def parsed_size(size: str) -> tuple[int, int]:
    """Parses `64` or `48x64` as height and width."""
    match = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", size)
    if match is None:
        raise UserError(f"--size must be a number of pixels, or HEIGHTxWIDTH such as 48x64, got {size!r}")
    return int(match[1]), int(match[2] or match[1])


def chosen_run(words: Sequence[str], terms: DataTerms) -> dict[str, Any]:
    """Returns the table [run]: the given settings over a network that suits the images."""
    from fedhassle.data.dataset import default_net
    from fedhassle.settings.request import layer, overlaid

    return overlaid({"net": default_net(terms.channels)}, layer(words))


def checked_run(agreement: Agreement) -> Agreement:
    """Returns the agreement with its main settings written out, once a run can be built from it."""
    from fedhassle.federation.agreement import checked_agreement, to_toml
    from fedhassle.federation.build import require_buildable, run_settings
    from fedhassle.settings.request import overlaid

    checked_agreement(to_toml(agreement), "these options")  # before PyTorch is loaded
    settings = run_settings(agreement)
    if settings.privacy.hide:  # validation images would tell who has labels
        agreement = replace(agreement, data=replace(agreement.data, validation=0.0))
    require_buildable(agreement, "this command")
    shown = {
        "method": {"name": settings.method.name},
        "rounds": settings.rounds,
        "evaluate_every": settings.evaluate_every,
        "seed": settings.seed,
    }
    return replace(agreement, run=overlaid(shown, dict(agreement.run)))


def join(
    federation: Annotated[Path, typer.Argument(help="Folder with federation.toml and ca.crt.")],
    name: Annotated[str, typer.Option(help="Name of this site: letters, digits, . _ -")],
    data: SiteImages,
    labels: Labels = None,
    expected: AgreementHash = None,
) -> None:
    """Prepare a site: check its data and create its key pair.

    Send only the public key to the coordinator. The private key and all data stay on this machine.
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
    with terminal.progress_bar(console) as progress:
        found = survey(data, agreement.data.form, labels, progress)
    show_survey(found, FEW, console)
    kept = site_key(key, public, name)
    say(f"hash of the agreement  {agreement_hash(agreement)}")
    say(f"fingerprint of ca.crt  {authority}")
    say("compare both with what the coordinator reads to you over the telephone")
    say(f"{'kept' if kept else 'created'} the private key {key}: it stays on this machine")
    say(f"send only this file to the coordinator: {public}")
    say(f"  {public.read_text('utf-8').strip()}")
    say(f"  {fingerprint(read_public_key(public))}")
    say(f"and tell the coordinator over the telephone: {counted(len(found.site.files), 'image')}")


def site_key(key: Path, public: Path, name: str) -> bool:
    """Creates a site's key pair, or keeps the existing one (True); writes the public key in both cases."""
    from fedhassle.federation.setup.keys import make_site_key, public_line
    from fedhassle.files import write_text

    if not key.exists():
        make_site_key(key, public, name)
        return False
    write_text(public, public_line(key, name) + "\n")
    return True


def admit(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    key: Annotated[Path, typer.Argument(help="Public key that the site sent, NAME.pub.")],
    federation: Federation = FOLDER,
    images: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of images that the site told you; it is refused if it counts more (default: not "
            "agreed, so that the model card does not repeat its counts).",
        ),
    ] = None,
) -> None:
    """Admit a site by its public key, or update an admitted one.

    An admitted site gets another name or number of images in the same way; it keeps its key.
    """
    require_flower()
    from fedhassle.federation.setup.admission import admit_site
    from fedhassle.federation.setup.folder import checked_name, federation_folder, is_name
    from fedhassle.federation.setup.keys import fingerprint, key_comment, read_public_key

    folder = federation_folder(federation)
    public, called = read_public_key(key), key_comment(key)
    if checked_name(name) != called and is_name(called):
        raise UserError(
            f"{key} belongs to a site named {called}, not {name}: run fedhassle federation admit {called} "
            f"{key}, or let the site join again with --name {name}"
        )
    before = admit_site(folder.path, name, public, images)
    said = {"": f"{name} is admitted", name: f"{name} was already admitted"}
    say(f"{said.get(before, f'{before} is now named {name}')}: {fingerprint(public)}")
    if images is not None:
        say(f"{name} may count {images:,} images, labelled or not")


def expel(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    federation: Federation = FOLDER,
) -> None:
    """Remove a site from the federation."""
    require_flower()
    from fedhassle.federation.setup.admission import expel_site
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.federation.setup.keys import fingerprint

    gone = expel_site(federation_folder(federation).path, name)
    say(f"{name} is expelled: {fingerprint(gone.key)}")
