"""Where each key and each default of a YAML file is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

_ENTRY = re.compile(r"(?:optional +|override +)*(?P<group>[^@]*)(?:@.*)?")

_SHOWN = 60
"""How much is shown of a value."""


@dataclass(frozen=True, kw_only=True)
class DefaultsEntry:
    """One entry of a defaults list."""

    text: str
    """As it is written, such as ``/devices@devices: cpu_x2``."""

    config_path: str
    """The file that it names, from the folder's root and without ``.yaml``."""

    line: int
    """Its line, from 1."""


@dataclass(frozen=True)
class YamlFile:
    """One file of a folder of configurations."""

    path: Path
    """Where it lies."""

    name: str
    """What a person would type."""

    config_path: str
    """What a defaults list calls it, from the folder's root."""

    @cached_property
    def root(self) -> yaml.Node | None:
        """Its contents, marked with lines; ``None`` where it is empty or can't be read."""
        try:
            loader = yaml.SafeLoader(self.path.read_text(encoding="utf-8"))
            try:
                node = loader.get_single_node()
                _merge_anchors(loader, node)
            finally:
                loader.dispose()
        except (yaml.YAMLError, OSError, UnicodeDecodeError, RecursionError):
            # Composing has told it, or has no need of the file.
            return None
        return node

    def header(self) -> tuple[str, int] | None:
        """The comment that names its package, and its line, where it has one."""
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"#\s*@package\b", line):
                return line.strip(), number
        return None

    def undecodable(self) -> int | None:
        """The line of the first byte that is not UTF-8, where there is one."""
        contents = self.path.read_bytes()
        try:
            contents.decode("utf-8")
        except UnicodeDecodeError as error:
            return contents.count(b"\n", 0, error.start) + 1
        return None

    def settings(self) -> Iterator[tuple[str, yaml.Node, int]]:
        """Each key that it sets, with its value and its line; lists are one value."""
        if isinstance(self.root, yaml.MappingNode):
            pairs = [pair for pair in self.root.value if pair[0].value != "defaults"]
            yield from _leaves("", pairs)

    def dotted(self) -> Iterator[tuple[str, str, yaml.Node, int]]:
        """Each key that has dots of its own: from the package, as written, its value and line."""
        waiting = [("", self.root)]
        while waiting:
            path, node = waiting.pop()
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                if "." in str(key.value):
                    yield f"{path}{key.value}", key.value, value, key.start_mark.line + 1
                waiting.append((f"{path}{key.value}.", value))

    def find(self, key: str) -> tuple[yaml.Node, int] | None:
        """The value of a key and the key's line, where the file has it.

        Args:
            key: The key, below the file's package.
        """
        node, line = self.root, 1
        for part in key.split(".") if key else ():
            if not isinstance(node, yaml.MappingNode):
                return None
            # The last of a kind wins: merged anchors come first.
            found = [(name, value) for name, value in node.value if name.value == part]
            if not found:
                return None
            line, node = found[-1][0].start_mark.line + 1, found[-1][1]
        return None if node is None else (node, line)

    def defaults(self) -> list[DefaultsEntry]:
        """Its defaults list, without ``_self_``."""
        found = self.find("defaults")
        if found is None or not isinstance(found[0], yaml.SequenceNode):
            return []
        return [
            entry
            for node in found[0].value
            for entry in self._entries(node)
            if entry.text != "_self_"
        ]

    def _entries(self, node: yaml.Node) -> Iterator[DefaultsEntry]:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            path = node.value.split("@")[0]
            yield DefaultsEntry(text=node.value, config_path=self._absolute(path), line=line)
        elif isinstance(node, yaml.MappingNode) and node.value:
            key, value = node.value[0]
            matched = _ENTRY.fullmatch(str(key.value))
            assert matched is not None
            names = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for name in names:
                path = self._absolute(f"{matched['group']}/{name.value}")
                text = f"{key.value}: {name.value}"
                yield DefaultsEntry(text=text, config_path=path, line=line)

    def _absolute(self, path: str) -> str:
        parent = self.config_path.rpartition("/")[0]
        return path[1:] if path.startswith("/") else f"{parent}/{path}".lstrip("/")


def text_of(node: yaml.Node) -> str:
    """A value as it is written, cut where it is long.

    Args:
        node: The value.
    """
    if isinstance(node, yaml.ScalarNode):
        text = str(node.value)
    else:
        text = node.start_mark.buffer[node.start_mark.pointer : node.end_mark.pointer]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def typed_name(path: Path, folder: Path, ours: Path) -> str:
    """What a person would type for a file.

    Relative to the working directory where it is below it; ``conf/...`` where it is ours.

    Args:
        path: The file.
        folder: The folder of configurations that it is in.
        ours: The folder of ours.
    """
    here = Path(os.path.relpath(path))
    if ".." not in here.parts:
        return str(here)
    return str(Path("conf") / path.relative_to(ours)) if folder == ours else str(path)


def _leaves(
    path: str, pairs: list[tuple[yaml.Node, yaml.Node]]
) -> Iterator[tuple[str, yaml.Node, int]]:
    for key, value in pairs:
        full = f"{path}{key.value}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(f"{full}.", value.value)
        else:
            yield full, value, key.start_mark.line + 1


def _merge_anchors(loader: yaml.SafeLoader, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        for _, value in node.value:
            _merge_anchors(loader, value)
