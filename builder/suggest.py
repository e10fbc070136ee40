"""Valid names: the nearest to a wrong one, and what a key takes."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from hydra.errors import HydraException

from builder.loading import Composer, Request
from builder.schema import TASKS, Config

EXTRAS = {
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
    "optuna": "optuna",
}
"""Launchers and sweepers that come with an extra of ours, by the choice's name."""

_AT_MOST = 12
"""How many valid names a message lists."""

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", Any: "texts or lists of token ids"}


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that is meant, where one is near.

    Args:
        name: The wrong name.
        valid: The valid ones.
    """
    found = difflib.get_close_matches(name, list(valid), n=1)
    return found[0] if found else None


def did_you_mean(name: str, valid: Sequence[str], form: str = "{}") -> str:
    """Names the nearest valid name, or lists the valid ones.

    Args:
        name: The wrong name.
        valid: The valid ones.
        form: What is written for a name, such as ``deployment={}``.
    """
    close = nearest(name, valid)
    if close is not None:
        return f"did you mean {form.format(close)}?"
    listed = sorted(valid)
    more = ["..."] if len(listed) > _AT_MOST else []
    return f"valid here: {', '.join([*listed[:_AT_MOST], *more]) or 'none'}"


@cache
def schema_types() -> dict[str, Any]:
    """The type of each key of the schema, those of every task."""
    found = {"task": None, **dict(_types("", Config))}
    for task in TASKS.values():
        found |= dict(_types("task.", task))
    return found


def _types(path: str, schema: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, type_ in typing.get_type_hints(schema).items():
        yield f"{path}{name}", type_
        if is_dataclass(type_):
            yield from _types(f"{path}{name}.", typing.cast("type[Any]", type_))


def key_like(key: str, schema: Any) -> str | None:
    """Names the valid key that is meant by an unknown one, or lists those beside it.

    Args:
        key: The unknown key.
        schema: What has the keys beside it: a dataclass, or none.
    """
    *parents, unknown = key.split(".")
    prefix = ".".join([*parents, ""])
    beside = list(typing.get_type_hints(schema)) if is_dataclass(schema) else []
    elsewhere = [one for one in schema_types() if one.endswith(f".{unknown}")]
    if key in elsewhere:
        return _of_other_tasks(key, schema)
    if nearest(unknown, beside) is None and elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return did_you_mean(unknown, beside, prefix + "{}") if beside else None


def _of_other_tasks(key: str, schema: Any) -> str | None:
    """Names the tasks that have a key, where the chosen one does not."""
    ours = [f"task={name}" for name, task in TASKS.items() if task is schema]
    having = [f"task={name}" for name, task in TASKS.items() if key in dict(_types("task.", task))]
    verb = "has" if len(having) == 1 else "have"
    return f"{ours[0]} has no such key, {', '.join(having)} {verb} it" if ours else None


def nested(key: str, value: str) -> str:
    """How a key with dots is written in a file: ``devices: {count: 2}``.

    Args:
        key: The key, such as ``devices.count``.
        value: Its value, as it is written.
    """
    first, *others = key.split(".")
    for part in reversed(others):
        value = f"{{{part}: {value}}}"
    return f"{first}: {value}"


def wanted(key: str) -> str | None:
    """What a key takes, or ``None`` where that is anything.

    Args:
        key: A key of the schema.
    """
    type_ = schema_types().get(key)
    members = [one for one in typing.get_args(type_) if one is not type(None)]
    if isinstance(type_, types.UnionType):
        return f"{_wanted(members[0])}, or null"
    return _wanted(type_)


def _wanted(type_: Any) -> str | None:
    if isinstance(type_, type) and issubclass(type_, Enum):
        return f"one of {', '.join(one.name for one in type_)}"
    if is_dataclass(type_):
        return f"a mapping of {', '.join(typing.get_type_hints(type_))}"
    of = typing.get_args(type_)
    if typing.get_origin(type_) is list:
        return f"a list of {_MANY.get(of[0], 'values')}"
    if typing.get_origin(type_) is dict:
        return f"a mapping of names to {_MANY.get(of[1], 'values')}"
    return _PLAIN.get(type_)


def known_choices(request: Request) -> list[str]:
    """The choices that are made, as one overrides them: ``devices@deployment.devices``.

    Args:
        request: What was asked.
    """
    taken: list[str] = []
    found = request.composer.defaults(taken)
    for word in request.overrides:
        try:
            found = request.composer.defaults([*taken, word])
        except (HydraException, ValueError):
            # One with a mistake in it makes no choice.
            continue
        taken.append(word)
    return list(found.overrides.known_choices)


def choice_like(composer: Composer, typed: str, value: str, known: Iterable[str]) -> str | None:
    """The override that chooses a file, where a key that was typed means one.

    Args:
        composer: The folders.
        typed: What was typed before ``=``, such as ``deployment.devices``.
        value: What was typed after it.
        known: The choices that are made, as one overrides them.
    """
    dotted = typed.replace("/", ".")
    for choice in known:
        group = choice.split("@")[0]
        if choice.rpartition("@")[2].replace("/", ".") == dotted and composer.is_group(group):
            return f"{choice}={_choice(composer, group, value)}"
    group, last = typed.replace(".", "/"), dotted.rpartition(".")[2]
    if composer.is_group(group):
        return f"{added(group, known)}={_choice(composer, group, value)}"
    if last != dotted and composer.is_group(last) and value in composer.choices(last):
        return f"+{last}@{dotted}={value}"
    close = nearest(typed, composer.groups()) if "." not in typed else None
    return close and f"{added(close, known)}={_choice(composer, close, value)}"


def added(group: str, known: Iterable[str]) -> str:
    """A group as an override names it: with a plus where nothing is chosen of it yet."""
    return group if group in known or group.startswith("hydra/") else f"+{group}"


def _choice(composer: Composer, group: str, value: str) -> str:
    """The choice that is meant, or those of a sweep."""
    choices = composer.choices(group)
    each = [one if one in choices else nearest(one, choices) or one for one in value.split(",")]
    return ",".join(each)


def word_like(composer: Composer, word: str, known: Sequence[str]) -> str:
    """The override that a word without ``=`` means, or what one looks like.

    Args:
        composer: The folders.
        word: The word.
        known: The choices that are made, as one overrides them.
    """
    bare = word.lstrip("+~")
    if bare in schema_types():
        return f"did you mean {bare}=VALUE?"
    groups = composer.groups()
    for separator in (".", "/", ":"):
        typed, _, choice = bare.rpartition(separator)
        group = nearest(typed.replace(".", "/"), groups)
        if group is not None and (close := nearest(choice, composer.choices(group))):
            return f"did you mean {added(group, known)}={close}?"
    choices = {one: group for group in reversed(groups) for one in composer.choices(group)}
    close = nearest(bare, choices)
    if close is not None:
        return f"did you mean {added(choices[close], known)}={close}?"
    keys = {one.rpartition(".")[2]: one for one in schema_types()}
    close = nearest(bare.rpartition(".")[2], keys)
    if close is not None:
        return f"did you mean {keys[close]}=VALUE?"
    return "an override is GROUP=CHOICE or KEY=VALUE"
