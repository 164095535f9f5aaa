"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The version of this package, also from a checkout that is not installed."""
    try:
        return version("fedhassle")
    except PackageNotFoundError:
        return "0+checkout"
