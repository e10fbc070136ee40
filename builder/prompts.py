"""A task's prompts or texts as token ids, checked against the deployment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from builder.images import ImagePreparer, ImageText, Pixels, PreparedImage, check_image_tokens
from builder.resolve import Plan
from builder.tokenizer import TextTokenizer
from models.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    given: str | list[int]
    """As the user gave it."""

    ids: list[int]
    """As the decoder takes it."""

    adapter: str = ""
    """The adapter it asks for; empty for none."""

    images: tuple[str, ...] = ()
    """The files of its images."""

    crops: tuple[Pixels, ...] = ()
    """What the image encoder sees of them."""


@dataclass(frozen=True)
class RefusedPrompt:
    """One prompt that can't be computed."""

    given: Any
    """As the user gave it."""

    error: ConfigError
    """Why."""

    adapter: Any = None
    """The adapter it asks for, as the user gave it; ``None`` for none."""

    images: Any = ()
    """The files of its images, as the user gave them."""


def gather(key: str, given: Sequence[Any], file: str | None) -> list[tuple[str, Any]]:
    """The entries of a list and of a file, each with its name in messages.

    Args:
        key: The config key of the list, such as ``task.prompts``.
        given: The list.
        file: A file with one entry per line.

    Raises:
        ConfigError: If the file can't be read, or there is no entry.
    """
    entries = [(f"{key}[{index}]", entry) for index, entry in enumerate(given)]
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}_file: no such file: {path}")
        try:
            contents = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{key}_file: {path} is not UTF-8: {error}") from error
        # Only line feeds end a line: a prompt may hold the other characters that splitlines ends
        # one at.
        entries += [
            (f"{key}_file: line {number}", _parse_line(line.removesuffix("\r")))
            for number, line in enumerate(contents.split("\n"), 1)
            if line.strip()
        ]
    if not entries:
        raise ConfigError(f"{key}: empty; give at least one, or {key}_file")
    return entries


def _parse_line(line: str) -> Any:
    # A line that is a JSON list of integers is token ids, one that is an object with a prompt says
    # more of it; any other is text.
    if line.lstrip().startswith(("[", "{")):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            return line
        if isinstance(parsed, list) and all(type(token) is int for token in parsed):
            return parsed
        if isinstance(parsed, dict) and "prompt" in parsed:
            return parsed
    return line


_ENTRY = "{prompt: ..., adapter: NAME, images: [FILE, ...]}"


class PromptReader:
    """Makes prompts of a plan's model of what a user gives.

    Args:
        plan: The plan.
        tokenizer: The checkpoint's tokenizer; ``None`` where it has none.
        room: Tokens that have to fit behind a prompt.
        chat: Whether texts are put into the chat template.
    """

    def __init__(
        self, plan: Plan, tokenizer: TextTokenizer | None, *, room: int, chat: bool = False
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._room = room
        self._chat = chat

    def read_all(self, entries: Sequence[tuple[str, Any]]) -> list[Prompt]:
        """Makes prompts of entries.

        Args:
            entries: Each entry's name in messages, and the entry.

        Raises:
            ConfigError: If one can't be computed: it is empty, too long, of a wrong type, text
                without a tokenizer, or asks for what is not served.
        """
        return [self.read(name, given) for name, given in entries]

    def read_each(self, entries: Sequence[tuple[str, Any]]) -> list[Prompt | RefusedPrompt]:
        """The same, with an error in the place of each that can't be computed."""
        found: list[Prompt | RefusedPrompt] = []
        for name, given in entries:
            try:
                found.append(self.read(name, given))
            except ConfigError as error:
                found.append(_refused(given, error))
        return found

    def read(self, name: str, given: Any) -> Prompt:
        """Makes a prompt of one entry."""
        entry, adapter, files = self._parse(name, given)
        images = [self._images(name).prepare_file(name, file) for file in files]
        if isinstance(entry, str):
            ids = self._encode(name, entry, images)
        elif isinstance(entry, list) and all(type(token) is int for token in entry):
            ids = entry
        else:
            raise ConfigError(f"{name}: {entry!r} is neither text nor a list of token ids")
        if not ids:
            raise ConfigError(f"{name}: empty")
        self._check_ids(name, ids, is_text=isinstance(entry, str))
        if self._plan.vision is not None:
            check_image_tokens(name, ids, images, self._plan.vision.settings)
        crops = tuple(crop for image in images for crop in image.crops)
        return Prompt(entry, ids, adapter, tuple(files), crops)

    def _parse(self, name: str, entry: Any) -> tuple[Any, str, list[str]]:
        """An entry's text or ids, and the adapter and images it asks for."""
        if not isinstance(entry, dict):
            return entry, "", []
        unknown = sorted(set(entry) - {"prompt", "adapter", "images"})
        if unknown or "prompt" not in entry:
            problem = f"unknown key {unknown[0]!r}" if unknown else "no prompt"
            raise ConfigError(f"{name}: {problem}\n  what works: {_ENTRY}")
        adapter, adapters = entry.get("adapter") or "", self._plan.adapters
        if adapter and adapter not in adapters:
            served = ", ".join(adapters) or "none; name some in deployment.lora.adapters"
            raise ConfigError(f"{name}: adapter {adapter!r} is not served\n  served: {served}")
        files = entry.get("images") or []
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise ConfigError(f"{name}: images: {files!r} is no list of files")
        return entry["prompt"], adapter, files

    def _images(self, name: str) -> ImagePreparer:
        settings = self._plan.settings
        if settings.vision is None:
            raise ConfigError(f"{name}: images, but {settings.family} takes text alone")
        if self._plan.vision is None:
            raise ConfigError(
                f"{name}: images, but deployment.vision is false\n"
                "  what works: deployment.vision=true"
            )
        return self._preparer

    @cached_property
    def _preparer(self) -> ImagePreparer:
        return ImagePreparer(self._plan)

    def _encode(self, name: str, text: str, images: Sequence[PreparedImage]) -> list[int]:
        if not text.strip() and not images:
            raise ConfigError(f"{name}: empty")
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"{name}: text, but the checkpoint has no tokenizer\n"
                "  what works: a list of token ids, or model.tokenizer=FOLDER"
            )
        takes_images = self._plan.settings.vision is not None
        if self._plan.vision is None:
            if self._chat:
                return tokenizer.encode_rendered(tokenizer.render_chat(text, parts=takes_images))
            return tokenizer.encode(text)
        placed = ImageText(tokenizer, self._plan.vision.settings)
        before = 0 if placed.check(name, text, len(images)) else len(images)
        if self._chat:
            rendered = tokenizer.render_chat(text, before, parts=takes_images)
            return tokenizer.encode_rendered(placed.expand(rendered, images))
        return tokenizer.encode(placed.expand(placed.marker * before + text, images))

    def _check_ids(self, name: str, ids: Sequence[int], is_text: bool) -> None:
        vocab_size, longest = self._plan.settings.vocab_size, self._plan.max_length
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            hint = "\n  model.tokenizer belongs to another model" if is_text else ""
            raise ConfigError(
                f"{name}: token id {wrong[0]} is not in the vocabulary, 0 to {vocab_size - 1}{hint}"
            )
        room = self._room
        if len(ids) + room > longest:
            raise ConfigError(
                f"{name}: {len(ids)} tokens{f' + {room} to generate' if room else ''} exceed "
                f"max_length {longest}\n"
                f"  what works: at most {longest - room} tokens, or a larger "
                "deployment.max_length"
            )


def _refused(given: Any, error: ConfigError) -> RefusedPrompt:
    if not isinstance(given, dict):
        return RefusedPrompt(given, error)
    adapter, images = given.get("adapter") or None, given.get("images") or ()
    return RefusedPrompt(given.get("prompt"), error, adapter, images)
