"""Step 1, compose: YAML and overrides to frozen dataclasses, through Hydra and the schema."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from builder.loading import HYDRA_STUB, Composer, folders
from builder.schema import TASKS, Config, DeploymentConfig, DevicesConfig, ModelConfig
from models.errors import ConfigError


def register_schema() -> None:
    """Stores the schema where the YAML files' defaults lists find it, under ``/schema``."""
    store = ConfigStore.instance()
    store.store(group="schema", name="config", node=_schema_node(Config))
    store.store(group="schema", name="model", node=_schema_node(ModelConfig))
    store.store(group="schema", name="deployment", node=_schema_node(DeploymentConfig))
    store.store(group="schema", name="devices", node=_schema_node(DevicesConfig))
    for name, task in TASKS.items():
        store.store(group="schema/task", name=name, node=_schema_node(task))
    group, name = HYDRA_STUB.split("/")
    store.store(group=group, name=name, node={"hydra": {}})
    OmegaConf.register_new_resolver("repository", _in_repository, replace=True)


def _in_repository(path: str) -> str:
    """``${repository:PATH}``: a file of a checkout of this project."""
    return str(Path(__file__).resolve().parent.parent / path)


def compose(overrides: Sequence[str] = (), own: str | None = None) -> Config:
    """Composes one job's configuration as the command does.

    Args:
        overrides: What the command line would say, such as ``deployment=cpu``.
        own: A folder of configurations beside ours, as for ``--config-dir``.

    Raises:
        ConfigError: If an override or a file is wrong.
    """
    register_schema()
    return compose_again(Composer(folders(own)), overrides)


def compose_again(composer: Composer, overrides: Sequence[str]) -> Config:
    """Composes one more configuration of the same folders.

    Args:
        composer: The folders.
        overrides: What the command line would say.

    Raises:
        ConfigError: If an override or a file is wrong.
    """
    try:
        composed = composer.compose(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error
    return to_config(composed)


def choices(composer: Composer, group: str) -> tuple[str, ...]:
    """The choices of a group: those of ``--config-dir`` where it has any, otherwise ours.

    Args:
        composer: The folders.
        group: The group.
    """
    for provider in ("command-line", "main"):
        names = {
            name
            for source in composer.sources
            if source.provider == provider and source.is_group(group)
            for name in source.list(group, ObjectType.CONFIG)
        }
        if names:
            return tuple(sorted(names))
    return ()


def _schema_node(cls: type[Any]) -> DictConfig:
    # OmegaConf marks frozen dataclasses read-only, but YAML has to be merged into them.
    node = OmegaConf.structured(cls)
    _allow_merging(node)
    assert isinstance(node, DictConfig)
    return node


def _allow_merging(node: Any) -> None:
    if not isinstance(node, DictConfig | ListConfig):
        return
    OmegaConf.set_readonly(node, None)
    if isinstance(node, DictConfig):
        for key in node:
            _allow_merging(node._get_node(key))


def to_config(composed: DictConfig) -> Config:
    """Makes the frozen facts of one job.

    Raises:
        ConfigError: If a value is missing, or a key is none of the schema's.
    """
    _check_keys(composed, "")
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, Config)
    if type(config.task) not in TASKS.values():
        raise ConfigError(
            "task: not a task of ours; its file starts with the defaults "
            f"[/schema/task/NAME@_here_, _self_]\n  NAME is one of {', '.join(TASKS)}"
        )
    for key, value in (("model", config.model), ("deployment", config.deployment)):
        if value is None:
            raise ConfigError(f"{key}: missing; choose one with {key}=CHOICE")
    return config


def _check_keys(node: DictConfig, path: str) -> None:
    # "+key=value" adds keys that the schema does not have.
    schema = OmegaConf.get_type(node)
    for key in map(str, node):
        child = node._get_node(key)
        if is_dataclass(schema) and key not in {f.name for f in fields(schema)}:
            raise _unknown_key(f"{path}{key}", schema)
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing()):
            _check_keys(child, f"{path}{key}.")


def explain(error: BaseException) -> ConfigError:
    """Words an error of composition as a ``ConfigError``.

    Names the key, and the nearest valid one where the key is unknown.

    Args:
        error: What Hydra, OmegaConf or the YAML reader raised.
    """
    for cause in _causes(error):
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
            return _unknown_key(str(cause.full_key), cause.object_type)
        if isinstance(cause, MissingMandatoryValue):
            return ConfigError(f"{cause.full_key}: missing; set it with {cause.full_key}=VALUE")
        if isinstance(cause, InterpolationResolutionError):
            return ConfigError(
                f"{cause.full_key}: {_first_line(cause)}\n"
                "  a text with ${...} in it goes into a file, for task.prompts_file"
            )
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return ConfigError(f"{cause.full_key}: {_first_line(cause)}")
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    return ConfigError("\n  ".join(lines) or type(error).__name__)


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _unknown_key(full_key: str, schema: Any) -> ConfigError:
    *parents, unknown = full_key.split(".")
    valid = sorted(f.name for f in fields(schema)) if is_dataclass(schema) else []
    prefix = ".".join([*parents, ""])
    close = difflib.get_close_matches(unknown, valid, n=1)
    hint = (
        f"did you mean {prefix}{close[0]}?"
        if close
        else f"valid here: {', '.join(f'{prefix}{name}' for name in valid) or 'none'}"
    )
    return ConfigError(f"{full_key}: unknown key\n  {hint}")
