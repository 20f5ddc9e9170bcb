"""The exceptions that end a command with one sentence, and its exit codes."""

RUN_ERROR = 1
USER_ERROR = 2


class UserError(ValueError):
    """Bad input, in one sentence: what was got, what was expected, what to do. The command exits with code 2."""


class RunError(RuntimeError):
    """A run that cannot go on, through no setting that could have been refused. The command exits with code 1."""
