"""``rolecall --help``: a page about this tool, with the groups and choices that there are."""

from __future__ import annotations

import textwrap
from pathlib import Path

from builder.loading import Composer, Request

WIDTH = 96
"""Columns of the page."""

TOP = """\
rolecall: declarative deployments for language-model decoders on Modular MAX

usage: rolecall [OPTION ...] [GROUP=CHOICE ...] [KEY=VALUE ...]

A job is a model, a deployment and a task, each a YAML file; KEY=VALUE changes one value of them.
"""

EXAMPLES = {
    "rolecall": "generate with SmolLM2 on this machine",
    """rolecall 'task.prompts=["Hello!"]'""": "your own prompt",
    "rolecall model=local model.source=FOLDER": "your own checkpoint",
    "rolecall task=plan deployment=h100_x2_tp2": "what it needs, and does it fit?",
    "rolecall task=verify model=tiny_llama deployment=tp2": "does it compute what one device does?",
    "rolecall task=diff task.against=pp2": "what the other deployment would change",
    "rolecall --config-dir my_conf task=check": "are all of my deployments fine?",
    "rolecall -m task=plan deployment=cpu,pp2": "a job for each, and one report",
    "rolecall deployment.batch.max_batch_size=4": "change one value",
}
"""Commands, and what they are for."""

OPTIONS = {
    "--config-dir FOLDER": "choices of yours beside these",
    "-m, --multirun": "a job for each combination of comma-separated choices or values",
    "--cfg job": "print the composed configuration, and run nothing",
    "-v, --verbose": "show the traceback of a mistake",
    "--shell-completion install=bash": 'completion, with eval "$(...)"; also zsh and fish',
    "--hydra-help": "Hydra's own options",
}
"""What else a command line may say."""

WITHOUT = ("base",)
"""Files that others begin with, and nobody chooses."""


def help_page(request: Request) -> str:
    """The page.

    Args:
        request: The command line, whose folders are shown.
    """
    composer = request.composer
    tasks = {f"task={name}": _comment(composer, "task", name) for name in composer.choices("task")}
    groups = [name for name in composer.groups() if not name.startswith(("hydra/", "task"))]
    parts = [
        TOP,
        _section("tasks", tasks),
        "groups and choices",
        *(_choices(composer, group) for group in groups if composer.choices(group)),
        "",
        _section("examples", EXAMPLES),
        _section("options", OPTIONS),
        "Every key: docs/reference.md. Every error: docs/errors.md. Begin with docs/tutorial.md.",
    ]
    return "\n".join(parts)


def _section(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:{width}}  {text}" for name, text in rows.items()), ""])


def _choices(composer: Composer, group: str) -> str:
    names = [name for name in composer.choices(group) if name not in WITHOUT]
    head = f"  {group + '=':12}"
    indent = " " * len(head)
    return textwrap.fill(", ".join(names), WIDTH, initial_indent=head, subsequent_indent=indent)


def _comment(composer: Composer, group: str, choice: str) -> str:
    file = composer.file(f"{group}/{choice}")
    return "" if file is None else first_comment(file.path)


def first_comment(file: Path) -> str:
    """What a file says of itself: its first line of comment that is no directive.

    Args:
        file: A file of configuration.
    """
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# @"):
            return line.removeprefix("# ")
    return ""
