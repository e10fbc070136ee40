"""The options of a command line, which are Hydra's: put before overrides, and checked."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from builder.origin import Origin, mistake
from builder.suggest import did_you_mean

_WITH_VALUE = {
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"),
    *("--package", "-p", "--experimental-rerun", "--cfg", "-c"),
}
"""Those that a value follows."""

_MAY_HAVE_VALUE = ("--info", "-i")


def options_first(words: Sequence[str]) -> list[str]:
    """Puts options before overrides: Hydra refuses overrides on both sides of an option.

    Args:
        words: The words of a command line, without ``--verbose``.

    Raises:
        CompositionError: If an option is unknown, or its value is.
    """
    options: list[str] = []
    overrides: list[str] = []
    before = ""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        is_value = before in _WITH_VALUE or (before in _MAY_HAVE_VALUE and _is_choice(word))
        if word in _MAY_HAVE_VALUE and not _is_choice(after):
            # Without a value of its own, it would take the override that comes next.
            options.append("--info=all")
        elif is_value or word.startswith("-"):
            options.append(word)
        else:
            overrides.append(word)
        before = word
    _Options(parents=[get_args_parser()]).parse_args([*options, *overrides])
    # Hydra's own help is composed without a job, which overrides would be of.
    return options if "--hydra-help" in options else [*options, *overrides]


def _is_choice(word: str) -> bool:
    return bool(word) and "=" not in word and not word.startswith("-")


class _Options(argparse.ArgumentParser):
    """Hydra's options, their mistakes in one line.

    Args:
        parents: Hydra's parser.
    """

    def __init__(self, parents: list[argparse.ArgumentParser]) -> None:
        super().__init__(add_help=False, allow_abbrev=False, parents=parents)

    def error(self, message: str) -> NoReturn:
        """Raises what would be a page of usage."""
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            names = [name for name in self._option_string_actions if name.startswith("--")]
            meant = did_you_mean(unknown[1], [*names, "--verbose"])
            raise mistake(Origin(override=unknown[1]), f"{unknown[1]}: no such option", meant)
        told = re.sub(r"^argument ([^/:]+)[^:]*", r"\1", message)
        raise mistake(Origin(override=told.partition(":")[0]), told)
