"""Composing as Hydra does, for many configurations of the same folders."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, cast

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import GroupDefault, InputDefault, ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
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
        # It finds the choices of a glob.
        self._parser = OverridesParser.create(config_loader=self._loader)
        # These may add folders.
        folders = [word for word in hydra_overrides if word.startswith("hydra.searchpath=")]
        _, found = self._loader._parse_overrides_and_create_caching_repo(config_name, folders)
        self._files = _OwnFiles(found.delegate)
        self._yaml: dict[str, YamlFile | None] = {}

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """The words of a command line that are not Hydra's, parsed."""
        parsed = self._parser.parse_overrides(list(overrides))
        return [override for override in parsed if not override.is_hydra_override()]

    def parse_word(self, word: str) -> Override | None:
        """One word of a command line, or ``None`` where it can't be read."""
        try:
            return self._parser.parse_overrides([word])[0]
        except HydraException:
            return None

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
        if config_path not in self._yaml:
            self._yaml[config_path] = self._find(config_path)
        return self._yaml[config_path]

    def stored(self, config_path: str) -> Any:
        """What is stored under a name in a defaults list without a file: a schema's defaults.

        Args:
            config_path: The name.
        """
        found = self._files.load_config(config_path)
        return None if found is None else OmegaConf.to_container(found.config)

    def _find(self, config_path: str) -> YamlFile | None:
        source = next((one for one in self.sources if one.is_config(config_path)), None)
        folder = None if source is None else _folder(source)
        if folder is None:
            return None
        path = folder / f"{config_path}.yaml"
        return YamlFile(path, typed_name(path, folder, config_folder()), config_path)

    def typed(self, path: str) -> str:
        """What a person would type for a file of the folders.

        Args:
            path: The file.
        """
        for folder in map(_folder, self.sources):
            if folder is not None and Path(path).is_relative_to(folder):
                return typed_name(Path(path), folder, config_folder())
        return path

    @property
    def primary(self) -> str:
        """The primary file's name."""
        return self._name

    @property
    def sources(self) -> list[ConfigSource]:
        """The folders, as Hydra looks into them in turn."""
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

    swept: Mapping[str, str] = field(default_factory=dict)
    """The words that are one value of a sweep, with the sweep as it was typed."""

    def combinations(self) -> Iterator[Request]:
        """What each job of a sweep is asked, in order; nothing where no word has values to take.

        Raises:
            HydraException: If a search chooses the values as it goes.
        """
        swept: dict[str, str] = {}
        each: list[list[str]] = []
        for word in self.overrides:
            override = self.composer.parse_word(word)
            each.append([word])
            if override is not None and override.is_sweep_override():
                (jobs,) = BasicSweeper.split_arguments([override], None)
                each[-1] = [one for (one,) in jobs]
                swept |= dict.fromkeys(each[-1], word)
        for words in product(*each) if swept else ():
            yield Request(self.composer, words, swept)

    def parsed(self) -> list[Override]:
        """The words that can be read, Hydra's too."""
        parsed = map(self.composer.parse_word, self.overrides)
        return [override for override in parsed if override is not None]

    def files(self) -> Iterator[YamlFile]:
        """The files that the words and the defaults lists name, also where that is a mistake."""
        waiting = [self.composer.primary]
        for override in self.parsed():
            group = override.key_or_group
            waiting += [f"{group}/{name}" for name in values(override)]
        seen = set()
        while waiting:
            config_path = waiting.pop()
            file = None if config_path in seen else self.composer.file(config_path)
            seen.add(config_path)
            if file is not None:
                yield file
                waiting += [entry.config_path for entry in file.defaults()]


def values(override: Override) -> list[str]:
    """What an override gives, each value of a sweep or a list, as text."""
    if override.is_choice_sweep():
        return list(override.sweep_string_iterator())
    given = override.value()
    return [str(one) for one in (given if isinstance(given, list) else [given])]


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
    # As they were given: an interpolation in one is the configuration's.
    words = OmegaConf.to_container(cast("DictConfig", job.overrides), resolve=False)
    assert isinstance(words, dict)
    path = ConfigSearchPathImpl()
    # Of its own configuration: a job that is run again from a file has no loader.
    for source in job.runtime.config_sources:
        path.append(source.provider, f"{source.schema}://{source.path}")
    setup_globals()
    Plugins.instance()
    assert job.job.config_name is not None
    composer = Composer(path, job.job.config_name, words["hydra"])
    return Request(composer, tuple(words["task"]))


def _folder(source: ConfigSource) -> Path | None:
    """Where a source's files lie; ``None`` for what is stored without files."""
    if source.scheme() == "pkg":
        return Path(str(resources.files(source.path)))
    return Path(source.path) if source.scheme() == "file" else None


class _OwnFiles(CachingConfigRepository):
    """Files, each read once, without the choices that they make for Hydra."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        known = f"config_path={config_path}" in self.cache
        found: ConfigResult | None = super().load_config(config_path)
        if found is not None and not known and found.defaults_list is not None:
            found.defaults_list = [one for one in found.defaults_list if not _of_hydra(one)]
        return found


def _of_hydra(default: InputDefault) -> bool:
    return isinstance(default, GroupDefault) and str(default.group).lstrip("/").startswith("hydra/")


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
