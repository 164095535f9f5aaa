"""The version of this package, and those of Flower that it goes with."""

from importlib.metadata import PackageNotFoundError, version

FLOWER = ("1.41", "1.42")  # from this one on, below that: as pyproject.toml has it (a test compares them)


def package_version() -> str:
    """The version of this package, also from a checkout that is not installed."""
    try:
        return version("fedhassle")
    except PackageNotFoundError:
        return "0+checkout"
