"""The command line: one file a command, each a dataclass whose fields are its options and whose `run` does the work."""


class UsageError(ValueError):
    """Options that do not fit together: exit status 2."""
