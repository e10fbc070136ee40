"""A task's prompts or texts as token ids, checked against the deployment."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _parse_entry(name: str, entry: Any, adapters: Collection[str]) -> tuple[Any, str]:
    """An entry's text or ids, and the adapter it asks for."""
    if not isinstance(entry, dict):
        return entry, ""
    unknown = sorted(set(entry) - {"prompt", "adapter"})
    if unknown or "prompt" not in entry:
        problem = f"unknown key {unknown[0]!r}" if unknown else "no prompt"
        raise ConfigError(f"{name}: {problem}\n  what works: {{prompt: ..., adapter: ...}}")
    adapter = entry.get("adapter") or ""
    if adapter and adapter not in adapters:
        served = ", ".join(adapters) or "none; name some in deployment.lora.adapters"
        raise ConfigError(f"{name}: adapter {adapter!r} is not served\n  served: {served}")
    return entry["prompt"], adapter


def tokenize(
    entries: Sequence[tuple[str, Any]],
    *,
    tokenizer: TextTokenizer | None,
    encode: Callable[[str], list[int]],
    vocab_size: int,
    max_length: int,
    room: int,
    adapters: Collection[str] = (),
) -> list[Prompt]:
    """Turns entries into token ids.

    Args:
        entries: Each entry's name in messages, and the entry.
        tokenizer: The checkpoint's tokenizer; ``None`` where it has none.
        encode: Makes a text's ids.
        vocab_size: The ids end below it.
        max_length: The longest sequence served.
        room: Tokens that have to fit behind an entry.
        adapters: The adapters that an entry may ask for.

    Raises:
        ConfigError: If an entry is empty, too long, of a wrong type, or text without a tokenizer.
    """
    prompts = []
    for name, given in entries:
        entry, adapter = _parse_entry(name, given, adapters)
        if isinstance(entry, str):
            if not entry.strip():
                raise ConfigError(f"{name}: empty")
            if tokenizer is None:
                raise ConfigError(
                    f"{name}: text, but the checkpoint has no tokenizer\n"
                    "  what works: a list of token ids, or model.tokenizer=FOLDER"
                )
            ids = encode(entry)
        elif isinstance(entry, list) and all(type(token) is int for token in entry):
            ids = entry
        else:
            raise ConfigError(f"{name}: {entry!r} is neither text nor a list of token ids")
        if not ids:
            raise ConfigError(f"{name}: empty")
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            hint = "" if ids is entry else "\n  model.tokenizer belongs to another model"
            raise ConfigError(
                f"{name}: token id {wrong[0]} is not in the vocabulary, 0 to {vocab_size - 1}{hint}"
            )
        if len(ids) + room > max_length:
            raise ConfigError(
                f"{name}: {len(ids)} tokens{f' + {room} to generate' if room else ''} exceed "
                f"max_length {max_length}\n"
                f"  what works: at most {max_length - room} tokens, or a larger "
                "deployment.max_length"
            )
        prompts.append(Prompt(entry, ids, adapter))
    return prompts
