"""The version of this package, and the versions of Flower that it supports."""

from importlib.metadata import PackageNotFoundError, version

FLOWER = ("1.41", "1.42")  # from, and below: as in pyproject.toml (a test compares them)


def package_version() -> str:
    """Returns the version of this package, also in a checkout that is not installed."""
    try:
        return version("fedhassle")
    except PackageNotFoundError:
        return "0+checkout"
