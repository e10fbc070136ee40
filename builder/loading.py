"""Composing as Hydra does, for many configurations of the same folders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import GroupDefault, InputDefault, ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from builder.yaml_lines import YamlFile, typed_name

HYDRA_STUB = "schema/hydra"
"""The stored node that takes what files say to Hydra, which composing here does without."""


def config_folder() -> Path:
    """The folder of our YAML: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    beside = package.parent / "conf"
    return beside if beside.is_dir() else package / "conf"


class Composer:
    """Composes configurations from the folders of one command, reading each file once.

    What it gives equals Hydra's, without the node of Hydra's own configuration: to compose that
    each time is most of the work.

    Args:
        search_path: The folders.
        config_name: The primary file's name.
        hydra_overrides: The words of the command line that are Hydra's.
    """

    def __init__(
        self,
        search_path: ConfigSearchPath,
        config_name: str = "config",
        hydra_overrides: Sequence[str] = (),
    ) -> None:
        self._name = config_name
        self._loader = ConfigLoaderImpl(search_path)
        self._parser = OverridesParser.create()
        # These may add folders.
        folders = [word for word in hydra_overrides if word.startswith("hydra.searchpath=")]
        _, found = self._loader._parse_overrides_and_create_caching_repo(config_name, folders)
        self._files = _OwnFiles(found.delegate)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """The words of a command line that are not Hydra's, parsed."""
        parsed = self._parser.parse_overrides(list(overrides))
        return [override for override in parsed if not override.is_hydra_override()]

    def defaults(self, overrides: Sequence[str]) -> DefaultsList:
        """Which files make up a configuration, in order, and the overrides of keys."""
        return create_defaults_list(
            repo=self._files,
            config_name=self._name,
            overrides_list=self.parse(overrides),
            prepend_hydra=False,
            skip_missing=False,
        )

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Composes one configuration.

        Args:
            overrides: What the command line would say.
        """
        parsed = self.parse(overrides)
        self._loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        found = self.defaults(overrides)
        stub = ResultDefault(config_path=HYDRA_STUB, package="")
        composed = self._loader._compose_config_from_defaults_list(
            [stub, *found.defaults], _Copies(self._files)
        )
        OmegaConf.set_struct(composed, True)
        self._loader._apply_overrides_to_config(found.config_overrides, composed)
        with open_dict(composed):
            del composed["hydra"]
        return composed

    def file(self, config_path: str) -> YamlFile | None:
        """The YAML file of a name in a defaults list, where it is one.

        Args:
            config_path: The name, from the folders' root.
        """
        for source in self.sources:
            if source.is_config(config_path):
                folder = _folder(source)
                path = folder / f"{config_path}.yaml"
                if not path.is_file():
                    return None
                name = typed_name(path, folder, config_folder())
                return YamlFile(path, name, config_path)
        return None

    @property
    def primary(self) -> str:
        """The primary file's name."""
        return self._name

    @property
    def sources(self) -> list[ConfigSource]:
        """The folders, those of the command line first."""
        return self._files.get_sources()

    def is_group(self, group: str) -> bool:
        """Whether any folder has choices of a group."""
        return self._files.group_exists(group)

    def choices(self, group: str) -> tuple[str, ...]:
        """The choices of a group."""
        return tuple(self._files.get_group_options(group, ObjectType.CONFIG))

    def groups(self, parent: str = "") -> list[str]:
        """The groups below another, Hydra's last."""
        below = self._files.get_group_options(parent, ObjectType.GROUP)
        names = [f"{parent}/{name}".lstrip("/") for name in below if name != "schema"]
        return [name for name in names if name != "hydra"] + [
            each for name in names if name == "hydra" for each in self.groups(name)
        ]


@dataclass(frozen=True)
class Request:
    """What was asked: words of a command line, and the folders that they choose from."""

    composer: Composer
    """The folders."""

    overrides: tuple[str, ...]
    """The words."""


def folders(own: str | None = None, ours: str | None = None) -> ConfigSearchPath:
    """The folders that a command looks into.

    Args:
        own: What ``--config-dir`` says.
        ours: What is in place of our folder.
    """
    version.setbase("1.3")
    setup_globals()
    path = create_config_search_path(ours or str(config_folder()))
    if own is not None:
        before = SearchPathQuery(provider="schema")
        path.prepend(provider="command-line", path=f"file://{Path(own).absolute()}", anchor=before)
    return path


def command_request(arguments: Sequence[str]) -> Request:
    """What a command line asks for.

    Args:
        arguments: Its words, options too.
    """
    known = get_args_parser().parse_args(list(arguments))
    overrides = tuple(known.overrides)
    path = folders(known.config_dir, known.config_path)
    return Request(Composer(path, known.config_name or "config", overrides), overrides)


def running_request() -> Request:
    """What the running job was asked, also in another process."""
    job = HydraConfig.get()
    own, hydras = tuple(job.overrides.task), tuple(job.overrides.hydra)
    path = GlobalHydra.instance().config_loader().get_search_path()
    assert job.job.config_name is not None
    return Request(Composer(path, job.job.config_name, hydras), own)


def _folder(source: ConfigSource) -> Path:
    if source.scheme() == "file":
        return Path(source.path)
    # A package's folder; nowhere for what is in no folder.
    return Path(str(resources.files(source.path))) if source.scheme() == "pkg" else Path()


class _OwnFiles(CachingConfigRepository):
    """Files, each read once, without the choices that they make for Hydra."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        known = f"config_path={config_path}" in self.cache
        found: ConfigResult | None = super().load_config(config_path)
        if found is not None and not known and found.defaults_list is not None:
            found.defaults_list = [one for one in found.defaults_list if not _of_hydra(one)]
        return found


def _of_hydra(default: InputDefault) -> bool:
    return isinstance(default, GroupDefault) and f"{default.group}/".lstrip("/").startswith(
        "hydra/"
    )


class _Copies(CachingConfigRepository):
    """What another repository has read, in copies to merge: merging takes nodes over."""

    def __init__(self, files: CachingConfigRepository) -> None:
        self.delegate = files
        self.cache = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        found: ConfigResult | None = self.delegate.load_config(config_path)
        if found is None:
            return None
        found = copy.copy(found)
        found.config = copy.deepcopy(found.config)
        return found
