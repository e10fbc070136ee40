"""The reference page: every key of the schema and every choice of conf/, in Markdown.

``python -m builder.reference > docs/reference.md`` refreshes the page.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from builder import schema
from builder.help import first_comment
from builder.loading import config_folder

COMMAND = "python -m builder.reference > docs/reference.md"
"""What refreshes the page."""

ENUMS = tuple(
    cls for cls in vars(schema).values() if isinstance(cls, type) and issubclass(cls, Enum)
)[1:]
"""The schema's words, each a section of its own; the first is ``Enum`` itself."""

Docstrings = dict[str, str]
"""What stands under each class and field: by ``Class`` and ``Class.field``."""


def render() -> str:
    """The page."""
    told = _docstrings(Path(schema.__file__))
    lines = [
        "# Reference",
        "",
        "Every key of a job, and every choice of a group. This page is made of `builder/schema.py`",
        f"and the files of `conf/`; `{COMMAND}`, in a checkout, refreshes it.",
        "",
        "A key is set in a file, or on the command line: `deployment.batch.max_batch_size=4`.",
        "`null` is no value. [configuration.md](configuration.md) says how files and overrides",
        "come together.",
        "",
        "## Keys",
        "",
    ]
    for key, cls in _sections():
        lines += _section(key, cls, told)
    lines += ["## Words", ""]
    for enum in ENUMS:
        rows = [(f"`{word.value}`", told[f"{enum.__name__}.{word.name}"]) for word in enum]
        lines += [f"### {enum.__name__}", "", told[enum.__name__], ""]
        lines += [*_table(("word", "meaning"), rows), ""]
    lines += ["## Groups and choices", ""]
    for group in _groups(config_folder()):
        rows = [(f"`{file.stem}`", first_comment(file)) for file in sorted(group.glob("*.yaml"))]
        lines += [f"### `{group.name}`", "", *_table(("choice", "what it is"), rows), ""]
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, type[Any]]]:
    """Each part of a job, by its key: a part within another comes after it."""
    for key, cls in (("model", schema.ModelConfig), ("deployment", schema.DeploymentConfig)):
        yield from _nested(key, cls)
    for name, task in schema.TASKS.items():
        for key, cls in _nested("task", task):
            yield key.replace("task", f"task={name}", 1) if key == "task" else key, cls


def _nested(key: str, cls: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    yield key, cls
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _nested(f"{key}.{name}", kind)


def _section(key: str, cls: type[Any], told: Docstrings) -> list[str]:
    kinds = get_type_hints(cls)
    prefix = key.split("=")[0]
    rows = [
        (
            f"`{prefix}.{field.name}`",
            _kind(kinds[field.name]),
            _default(field),
            told[f"{cls.__name__}.{field.name}"],
        )
        for field in fields(cls)
        if not is_dataclass(kinds[field.name])
    ]
    lines = [f"### `{key}`", "", told[cls.__name__], ""]
    return [*lines, *_table(("key", "type", "default", "meaning"), rows), ""] if rows else lines


def _kind(kind: Any) -> str:
    """A type in words."""
    arguments = get_args(kind)
    if get_origin(kind) is list:
        return f"list of {_kind(arguments[0])}" if arguments[0] is not Any else "list"
    if get_origin(kind) is dict:
        return f"{_kind(arguments[1])} by name"
    if arguments:
        return " or ".join(_kind(argument) for argument in arguments)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    words = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}
    return words.get(kind, "any")


def _default(field: Field[Any]) -> str:
    value = field.default
    if field.default_factory is not NO_DEFAULT:
        value = field.default_factory()
    if value == MISSING:
        return "none: it has to be set"
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`" if value is not None else "`null`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _groups(folder: Path) -> list[Path]:
    """The groups' folders, Hydra's own settings left out."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "hydra")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [headings, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return [line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])]


def _docstrings(file: Path) -> Docstrings:
    """The docstring of each class of a module, and the one under each of its fields."""
    told: Docstrings = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        told[node.name] = _flowing(ast.get_docstring(node) or "")
        for statement, after in zip(node.body, node.body[1:], strict=False):
            name = _assigned(statement)
            if name is not None:
                told[f"{node.name}.{name}"] = _flowing(_text(after))
    return told


def _assigned(statement: ast.stmt) -> str | None:
    """The name that a field or an enum's member is given."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _text(statement: ast.stmt) -> str:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return str(statement.value.value) if is_text else ""  # type: ignore[attr-defined]


def _flowing(text: str) -> str:
    """A docstring in one line of Markdown."""
    return " ".join(text.split()).replace("``", "`")


if __name__ == "__main__":
    sys.stdout.write(render())
