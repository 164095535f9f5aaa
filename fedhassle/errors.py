"""Errors that a user can fix."""


class UserError(ValueError):
    """A setting, file or request that cannot work; the message says what would work.

    The command line prints only the message and ends with exit code 2.
    """


class BusyError(UserError):
    """Another process is using the file or folder."""


class DamagedError(UserError):
    """A file that can be read, but whose contents have changed since it was written."""


class DivergedError(RuntimeError):
    """A run that cannot continue: every update of a round had NaN or infinite values."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def require(holds: bool, message: str) -> None:
    """Raises `UserError(message)` unless the condition holds."""
    if not holds:
        raise UserError(message)
