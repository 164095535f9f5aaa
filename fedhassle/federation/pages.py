"""Pages of HTML for a federation: what to label next at a site, and the status of a server.

They load nothing, run no scripts and escape every text. Their style is that of the report.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fedhassle.version import package_version


def page(template: str, **content: object) -> str:
    """A page from a template beside this file."""
    style = resources.files("fedhassle.reproduce.report").joinpath("style.css").read_text("utf-8")
    made = environment().get_template(f"{template}.html.j2")
    return made.render(style=Markup(style), version=package_version(), **content)


@cache
def environment() -> Environment:
    """The templates of this folder."""
    folder = resources.files("fedhassle.federation")
    return Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
