"""Step 1, compose: YAML and overrides to frozen dataclasses, through Hydra and the schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from builder.key_words import empty, missing, no_task, unknown_key
from builder.loading import HYDRA_STUB, Composer, Request, folders, running_request
from builder.schema import TASKS, Config, DeploymentConfig, DevicesConfig, ModelConfig
from builder.words import MISTAKES, explain


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
    request = Request(composer, tuple(overrides))
    try:
        composed = composer.compose(overrides)
    except MISTAKES as error:
        raise explain(error, request) from error
    return to_config(composed, request)


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


def to_config(composed: DictConfig, request: Request | None = None) -> Config:
    """Makes the frozen facts of one job.

    Args:
        composed: What was composed.
        request: What it was composed of; by default what the running job was asked.

    Raises:
        ConfigError: If a value is missing, or a key is none of the schema's.
    """
    unknown = next(_unknown_keys(composed, ""), None)
    if unknown is not None:
        raise unknown_key(*unknown, request or running_request())
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error, request or running_request()) from error
    assert isinstance(config, Config)
    if type(config.task) not in TASKS.values():
        raise no_task(request or running_request())
    for key, value in (("model", config.model), ("deployment", config.deployment)):
        if value is None:
            raise missing(f"{key}.name", request or running_request())
    if not config.model.source.strip():
        # As a path, it would be the folder that the command is started in.
        takes = "a Hugging Face folder, a .gguf file or a repository's name"
        raise empty("model.source", takes, request or running_request())
    return config


def _unknown_keys(node: DictConfig, path: str) -> Iterator[tuple[str, Any]]:
    """Keys that the schema does not have, with what has those beside them: ``+`` adds them."""
    schema = OmegaConf.get_type(node)
    for key in map(str, node):
        child = node._get_node(key)
        if is_dataclass(schema) and key not in {f.name for f in fields(schema)}:
            yield f"{path}{key}", schema
        elif isinstance(child, DictConfig) and not (child._is_none() or child._is_missing()):
            yield from _unknown_keys(child, f"{path}{key}.")
