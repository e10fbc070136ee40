"""What set each value of a composed configuration: a line of a file, an override, or nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import MISSING

from builder.loading import Request, running_request
from builder.origin import CompositionError, Origin
from builder.schema import Config
from models.errors import ConfigError

_KEY = re.compile(r"(?:model|deployment|task)(?:\.\w+)+")
"""A key that a message begins with."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value of a configuration."""

    value: Any
    """The value, in JSON's terms."""

    origin: Origin
    """What set it."""

    def as_json(self) -> dict[str, Any]:
        """The entry of plan.json."""
        by = {"by": self.origin.by}
        return {"value": self.value, **by, **dataclasses.asdict(self.origin)}


def provenance(config: Config, request: Request | None = None) -> dict[str, Setting]:
    """Every key of a configuration, with its value and what set it.

    Args:
        config: The configuration.
        request: What it was composed of; by default what the running job was asked.
    """
    found = origins(request or running_request())
    parts = {"model": config.model, "deployment": config.deployment, "task": config.task}
    return {
        key: Setting(value=value, origin=_origin_of(key, found))
        for name, part in parts.items()
        for key, value in _leaves(name, part)
    }


def origins(request: Request) -> dict[str, Origin]:
    """What set each key that anything sets: the last file in order, or else an override.

    Args:
        request: The words, and the folders that they choose from.
    """
    composed = request.composer.defaults(request.overrides)
    found: dict[str, Origin] = {}
    for default in composed.defaults:
        assert default.config_path is not None
        file = request.composer.file(default.config_path)
        package = f"{default.package}." if default.package else ""
        if file is not None:
            for key, _, line in file.settings():
                _set(found, f"{package}{key}", Origin(file=file.name, line=line))
            continue
        # A schema that comes later sets its defaults again.
        for key, value in _leaves("", request.composer.stored(default.config_path)):
            if value != MISSING and value != {}:
                _forget(found, f"{package}{key.lstrip('.')}")
    for override in composed.config_overrides:
        _override(found, override)
    return found


def with_provenance(error: ConfigError, request: Request | None = None) -> ConfigError:
    """A mistake, with a further line that says what set the key that it begins with.

    A mistake of composition has said so already, and a default is told only where it is the
    mistake.

    Args:
        error: The mistake.
        request: What was asked; by default what the running job was asked.
    """
    message = str(error)
    key = _KEY.match(message)
    if key is None or isinstance(error, CompositionError):
        return error
    origin = _origin_below(key[0], origins(request or running_request()))
    if origin.by == "file":
        told = f"set in {origin}"
    elif origin.by == "override":
        told = f"set by {origin} on the command line"
    elif "missing" in message.splitlines()[0]:
        told = "by default: nothing sets it"
    else:
        return error
    return type(error)(f"{message}\n  {told}").with_traceback(error.__traceback__)


def _override(found: dict[str, Origin], override: Override) -> None:
    key = override.key_or_group
    if override.is_delete():
        _forget(found, key)
        return
    origin = Origin(override=override.input_line)
    value = override.value()
    if not isinstance(value, Mapping):
        _set(found, key, origin)
        return
    # A mapping is merged into what there is.
    for below, _ in _leaves(key, value):
        _set(found, below, origin)


def _set(found: dict[str, Origin], key: str, origin: Origin) -> None:
    _forget(found, key)
    found[key] = origin


def _forget(found: dict[str, Origin], key: str) -> None:
    for one in [one for one in found if one == key or one.startswith(f"{key}.")]:
        del found[one]


def _origin_of(key: str, found: Mapping[str, Origin]) -> Origin:
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (origin := found.get(".".join(parts[:end]))) is not None:
            return origin
    return Origin()


def _origin_below(key: str, found: Mapping[str, Origin]) -> Origin:
    """What set a key; or all that is set below it, where that is one file or one override."""
    below = [origin for one, origin in found.items() if one.startswith(f"{key}.")]
    if below and len({(origin.file, origin.override) for origin in below}) == 1:
        return below[0]
    return _origin_of(key, found)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each value below a key, in JSON's terms; lists and empty mappings are one value."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}", below)
    else:
        yield path, value.value if isinstance(value, Enum) else value
