"""The errors that a user can mend."""


class UserError(ValueError):
    """A setting, file or request that cannot work; its message says what would.

    The command line prints the message alone and ends with exit code 2.
    """


class BusyError(UserError):
    """What another process is at work on."""


class DamagedError(UserError):
    """A file that can be read, but is not what was written."""


class DivergedError(RuntimeError):
    """A run that cannot go on: every update of a round held NaN or infinite values."""


def require(holds: bool, message: str) -> None:
    """Raises `UserError(message)` unless the condition holds."""
    if not holds:
        raise UserError(message)
