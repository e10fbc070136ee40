"""The one exception a user's mistake becomes."""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake in what the user asked for.

    The message says what is wrong, names the config key, shows the arithmetic and says what
    would work. The command prints it as one block, without a traceback, and exits with status 2.
    """
