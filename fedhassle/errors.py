"""The errors that a user can mend."""


class UserError(ValueError):
    """A setting, file or request that cannot work; its message says what would.

    The command line prints the message alone and ends with exit code 2.
    """


def require(holds: bool, message: str) -> None:
    """Raises `UserError(message)` unless the condition holds."""
    if not holds:
        raise UserError(message)
