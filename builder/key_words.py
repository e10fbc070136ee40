"""Mistakes of keys and values in words."""

from __future__ import annotations

import json
import re
import shlex
import typing
from dataclasses import is_dataclass
from typing import Any

import yaml
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from builder.loading import Request, config_folder, values
from builder.origin import CompositionError, Origin, mistake
from builder.provenance import origins
from builder.schema import TASKS
from builder.suggest import (
    choice_like,
    key_like,
    known_choices,
    nearest,
    nested,
    schema_types,
    wanted,
)
from builder.yaml_lines import YamlFile, text_of

_BEGINNINGS = {
    "deployment": "[base, _self_]",
    "devices": "[/schema/devices@_here_, _self_]",
    "model": "[/schema/model@_here_, _self_]",
    "task": "[/schema/task/NAME@_here_, _self_]",
}
"""The defaults list of a file of each group."""


def explain_key(error: OmegaConfBaseException, told: str, request: Request) -> CompositionError:
    """Words an error of one key.

    Args:
        error: What OmegaConf raised, with the key.
        told: What Hydra made of it.
        request: What was asked.
    """
    # The value of a list's entry is the list's.
    key = re.sub(r"\[.*", "", str(error.full_key))
    if isinstance(error, MissingMandatoryValue):
        return missing(key, request)
    if isinstance(error, GrammarParseError):
        return _unreadable(key, error, request)
    if found := re.match(r"In '([^']+)'", told):
        if "is not a subclass of" in told and (elsewhere := _elsewhere(found[1], request)):
            return elsewhere
        file = request.composer.file(found[1])
        if file is not None:
            return _in_file(file, key, error, request)
    if re.match("Could not|Error merging override", told):
        return _on_the_line(key, error, request)
    if isinstance(error, InterpolationResolutionError):
        return _unresolved(key, error, request)
    return mistake(origins(request).get(key, Origin()), f"{key}: {_first_line(error)}")


def unknown_key(key: str, schema: Any, request: Request) -> CompositionError:
    """Words a key that the schema does not have.

    Args:
        key: The key.
        schema: What has the keys beside it.
        request: What was asked.
    """
    found = origins(request)
    below = [origin for one, origin in found.items() if f"{one}.".startswith(f"{key}.")]
    origin = below[0] if below else Origin()
    if origin.override is not None:
        return _unknown_on_the_line(key, schema, origin.override, request)
    return mistake(origin, f"{key}: unknown key", key_like(key, schema))


def missing(key: str, request: Request) -> CompositionError:
    """Words a key that has to be set and is not: names the file that leaves it out.

    Args:
        key: The key.
        request: What was asked.
    """
    package, _, name = key.rpartition(".")
    files = _files_of(package, request)
    if not files:
        words = [one.input_line for one in request.parsed() if one.key_or_group == package]
        origin = Origin(override=words[-1] if words else None)
        return mistake(origin, f"{package}: missing", f"choose one with {package}=CHOICE")
    if files[-1].root is None:
        return _begun_otherwise(files[-1], package, "an empty file")
    ours = files[-1].path.is_relative_to(config_folder())
    remedy = (
        f"write {key}=VALUE on the command line, "
        f"or {name}: VALUE {'in a file of your own' if ours else 'there'}"
    )
    return mistake(Origin(), f"{key}: missing, {files[-1].name} leaves it out", remedy)


def empty(key: str, takes: str, request: Request) -> CompositionError:
    """Words an empty text where there has to be one.

    Args:
        key: The key.
        takes: What is written for it.
        request: What was asked.
    """
    origin = origins(request).get(key, Origin())
    return mistake(origin, f"{key}: no value is given", f"it takes {takes}")


def no_task(request: Request) -> CompositionError:
    """Words a task that has none of the tasks' schemas.

    Args:
        request: What was asked.
    """
    files = _files_of("task", request)
    form = f"begin it with defaults: {_BEGINNINGS['task']}, NAME one of {', '.join(TASKS)}"
    if not files:
        return mistake(Origin(), "task: missing", f"choose one with task={' or '.join(TASKS)}")
    return mistake(Origin(file=files[-1].name, line=1), "task: none of the tasks", form)


def _files_of(package: str, request: Request) -> list[YamlFile]:
    """The files of one package, in order."""
    defaults = request.composer.defaults(request.overrides).defaults
    names = [str(default.config_path) for default in defaults if default.package == package]
    return [file for file in map(request.composer.file, names) if file is not None]


def _begun_otherwise(file: YamlFile, package: str, what: str) -> CompositionError:
    beginning = _BEGINNINGS.get(file.config_path.partition("/")[0]) or "[_self_]"
    remedy = f"begin it with defaults: {beginning}, and give it keys such as name: NAME"
    return mistake(
        Origin(file=file.name, line=1),
        f"{what}, where {package or 'a configuration'} needs keys",
        remedy,
    )


def _in_file(
    file: YamlFile, key: str, error: OmegaConfBaseException, request: Request
) -> CompositionError:
    packages = [
        default.package or ""
        for default in request.composer.defaults(request.overrides).defaults
        if default.config_path == file.config_path
    ]
    for package in packages:
        if not isinstance(file.root, yaml.MappingNode):
            kind = "a list" if isinstance(file.root, yaml.SequenceNode) else "a text"
            return _begun_otherwise(file, package, kind)
        if isinstance(error, ConfigKeyError | ConfigAttributeError):
            for one, written, value, line in file.dotted():
                if key == (f"{package}.{one}" if package else one):
                    origin = Origin(file=file.name, line=line)
                    remedy = f"nest it: {nested(written, text_of(value))}"
                    return mistake(origin, f"{key}: a key with dots", remedy)
        # Without a key, it is a mapping that something else stands for.
        full = key or _misfit(file, package) or ""
        found = file.find(full.removeprefix(f"{package}.") if package else full)
        if found is not None:
            node, line = found
            origin = Origin(file=file.name, line=line)
            if isinstance(error, ConfigKeyError | ConfigAttributeError):
                return mistake(origin, f"{full}: unknown key", key_like(full, error.object_type))
            return _wrong_value(origin, full, text_of(node), error)
    # A key of the package that the file's first line names.
    origin = Origin(file=file.name, line=1)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return mistake(origin, f"{key}: unknown key", key_like(key, error.object_type))
    return mistake(origin, f"{key}: {_first_line(error)}")


def _elsewhere(schema: str, request: Request) -> CompositionError | None:
    """A file whose package is not its group's, so that its schema goes where another is."""
    group = schema.removeprefix("schema/").partition("/")[0]
    for default in request.composer.defaults(request.overrides).defaults:
        path = str(default.config_path)
        file = request.composer.file(path) if path.startswith(f"{group}/") else None
        header = None if file is None else file.header()
        if file is not None and header is not None:
            text, line = header
            problem = f"{text}: the keys of this file belong to {group}"
            return mistake(Origin(file=file.name, line=line), problem, "leave the line out")
    return None


def _misfit(file: YamlFile, package: str) -> str | None:
    """The key of a file that is no mapping where the schema has one, or one where it has a list."""
    for full, type_ in schema_types().items():
        kind = typing.get_origin(type_)
        if not (is_dataclass(type_) or kind in (dict, list)):
            continue
        found = file.find(full.removeprefix(f"{package}.") if package else full)
        # A list's own mistakes come with the key.
        if found is not None and isinstance(found[0], yaml.MappingNode) == (kind is list):
            return full
    return None


def _on_the_line(key: str, error: OmegaConfBaseException, request: Request) -> CompositionError:
    override = next(
        override
        for override in reversed(request.parsed())
        if f"{key}.".startswith(f"{override.key_or_group}.")
        or override.key_or_group.startswith(f"{key}.")
    )
    word = str(override.input_line)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown_on_the_line(key, error.object_type, word, request)
    typed, _, value = word.lstrip("+").partition("=")
    if override.is_choice_sweep():
        value = next((one for one in values(override) if f"'{one}'" in str(error)), value)
    if is_dataclass(schema_types().get(key)) and word in request.swept:
        # The whole sweep is meant to choose.
        word = request.swept[word]
        value = word.partition("=")[2]
    if re.fullmatch(r"\w+(,\w+)*", value) and is_dataclass(schema_types().get(key)):
        meant = choice_like(request.composer, typed, value, known_choices(request))
        if meant is not None:
            problem = f"{word}: a choice of files, written as a value"
            return mistake(Origin(override=word), problem, f"did you mean {meant}?")
    return _wrong_value(Origin(override=word), key, value, error)


def _unknown_on_the_line(key: str, schema: Any, word: str, request: Request) -> CompositionError:
    typed, _, value = word.lstrip("+~").partition("=")
    origin = Origin(override=word)
    if typing.get_origin(schema_types().get(key.rpartition(".")[0])) is dict:
        return mistake(origin, f"{word}: not there yet", f"did you mean +{word}?")
    if typed in known_choices(request) and not request.composer.is_group(typed):
        remedy = f"put it into {typed}/{value}.yaml of a folder given with --config-dir"
        return mistake(origin, f"{word}: no such {typed}", remedy)
    if "." not in key:
        longer = [one for one in schema_types() if one.endswith(f".{typed}")]
        if longer:
            remedy = f"did you mean {' or '.join(f'{one}={value}' for one in longer)}?"
            return mistake(origin, f"{typed}: unknown key", remedy)
        meant = choice_like(request.composer, typed, value, known_choices(request))
        if meant is not None:
            problem = f"{word}: {key} is no key and no group"
            return mistake(origin, problem, f"did you mean {meant}?")
    return mistake(origin, f"{key}: unknown key", key_like(key, schema))


def _wrong_value(
    origin: Origin, key: str, value: str, error: OmegaConfBaseException
) -> CompositionError:
    what = wanted(key)
    if what is None:
        return mistake(origin, f"{key}: {_first_line(error)}")
    if not value:
        return mistake(origin, f"{key}: no value is given", f"it takes {what}")
    if what.startswith("a list of "):
        return mistake(origin, f"{key}: {value} is not {what}", _as_list(origin, key, value))
    names = what.removeprefix("one of ").removesuffix(", or null").split(", ")
    close = nearest(value, names) if what.startswith("one of ") else None
    return mistake(origin, f"{key}: {value} is not {what}", close and f"did you mean {close}?")


def _as_list(origin: Origin, key: str, value: str) -> str | None:
    """What is written for a list of one value."""
    numbers = schema_types()[key] == list[int]
    if value[0] in "[{" or "\\" in value or (numbers and not value.isdigit()):
        return None
    text = re.fullmatch(r"(['\"])(.*)\1", value)
    entry = value if numbers else json.dumps(text[2] if text else value, ensure_ascii=False)
    if origin.override is None:
        return f"write {key.rpartition('.')[2]}: [{entry}]"
    return f"write {shlex.quote(f'{key}=[{entry}]')}"


def _unresolved(
    key: str, error: InterpolationResolutionError, request: Request
) -> CompositionError:
    remedy = None
    if found := re.search(r"Interpolation key '([^']+)' not found", str(error)):
        close = nearest(found[1], schema_types())
        remedy = close and f"did you mean ${{{close}}}?"
    if remedy is None and key in ("task.prompts", "task.texts"):
        remedy = f"a text with ${{...}} in it goes into a file, for {key}_file"
    return mistake(origins(request).get(key, Origin()), f"{key}: {_first_line(error)}", remedy)


def _unreadable(key: str, error: GrammarParseError, request: Request) -> CompositionError:
    """A text with ``${`` that is no interpolation; the key is without the file's package."""
    for file in request.files():
        for one, node, line in file.settings():
            if f".{one}".endswith(f".{key}") and "${" in text_of(node):
                problem = f"{one}: {text_of(node)} is no interpolation: {_first_line(error)}"
                return mistake(Origin(file=file.name, line=line), problem)
    return mistake(Origin(), f"{key}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
