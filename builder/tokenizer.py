"""Text to token ids and back, from the checkpoint's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from models.checkpoints import Checkpoint, GGUFCheckpoint, read_json_object
from models.errors import ConfigError

_CONTROL_TOKEN, _USER_TOKEN = 3, 4
"""Token types in GGUF's ``tokenizer.ggml.token_type``."""

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def _digits_then_bytes() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )


def _words_then_bytes(words: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _digits_then_bytes,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(False),
    "qwen2": lambda: _words_then_bytes(_QWEN2_WORDS),
    "llama-bpe": lambda: _words_then_bytes(_LLAMA3_WORDS),
}
"""How each ``tokenizer.ggml.pre`` splits text (llama.cpp, ``llama-vocab.cpp``)."""


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes, decodes, and renders chats."""

    backend: Backend
    """The tokenizers library's object."""

    stop_ids: frozenset[int]
    """The ids that end a continuation."""

    chat_template: str | None = None
    """The checkpoint's Jinja template."""

    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template may name, such as ``bos_token``."""

    prefix_ids: tuple[int, ...] = ()
    """Ids before a raw text, where the backend's post-processor does not add them."""

    def encode(self, text: str) -> list[int]:
        """A raw text's ids, with the special tokens that the checkpoint adds."""
        return [*self.prefix_ids, *self.backend.encode(text).ids]

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a text that has its special tokens already."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def render_chat(self, text: str, num_images: int = 0, *, parts: bool = False) -> str:
        """A chat as the checkpoint's template writes it, up to where the assistant answers.

        Args:
            text: What the user says.
            num_images: Images before it.
            parts: Whether the template takes a message in parts, as those for images do.

        Raises:
            ConfigError: If the template refuses the message.
        """
        assert self.chat_template is not None
        content: Any = text
        if parts:
            content = [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        try:
            rendered = environment.from_string(self.chat_template).render(
                messages=[{"role": "user", "content": content}],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.template_variables,
            )
        except Exception as error:
            raise ConfigError(f"task.chat: the chat template fails: {error}") from error
        return rendered

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self.backend)


class TextStream:
    """Decodes ids as they come; text appears once its bytes are whole."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that one more id completes."""
        return self._stream.step(self._backend, token) or ""


class _GenerationTag(Extension):
    """``{% generation %}``, which marks the assistant's words for training, as its contents."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def load_tokenizer(checkpoint: Checkpoint, override: str | None) -> TextTokenizer | None:
    """The checkpoint's tokenizer, or the one of ``model.tokenizer``.

    Returns:
        ``None`` where a Hugging Face folder has no tokenizer files: it is used with token ids.

    Raises:
        ConfigError: If the tokenizer is of a kind that can't be read.
    """
    if override is not None:
        folder = Path(override).expanduser()
        found = _from_folder("model.tokenizer", folder, checkpoint)
        if found is None:
            raise ConfigError(f"model.tokenizer: {folder} has no tokenizer.json")
        return found
    if isinstance(checkpoint, GGUFCheckpoint):
        return _from_gguf(checkpoint)
    return _from_folder("model.source", checkpoint.path, checkpoint)


def stop_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """The ids that end a continuation, by the checkpoint's own configuration."""
    wanted: Any = checkpoint.config.get("eos_token_id")
    if isinstance(checkpoint, GGUFCheckpoint):
        turn_end = checkpoint.metadata.get("tokenizer.ggml.eot_token_id")
        wanted = [wanted, turn_end]
    generation = checkpoint.path / "generation_config.json"
    if generation.is_file():
        wanted = read_json_object(generation).get("eos_token_id", wanted)
    ids = [
        token for token in (wanted if isinstance(wanted, list) else [wanted]) if token is not None
    ]
    if not all(type(token) is int for token in ids):
        raise ConfigError(
            f"model.source: {checkpoint.path}: eos_token_id is {wanted!r}, no token id"
        )
    return frozenset(ids)


def _from_folder(key: str, folder: Path, checkpoint: Checkpoint) -> TextTokenizer | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = read_json_object(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several templates by name; the one for plain chats is "default".
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if (folder / "chat_template.json").is_file():
        template = read_json_object(folder / "chat_template.json").get("chat_template", template)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    variables = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return TextTokenizer(_backend(key, file), stop_ids(checkpoint), template, variables)


def _backend(key: str, file: Path) -> Backend:
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{key}: {file} is no tokenizer: {error}") from error
    # Training settings that some files keep; a prompt is neither cut nor filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _from_gguf(checkpoint: GGUFCheckpoint) -> TextTokenizer:
    metadata = checkpoint.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"model.source: {checkpoint.path} has a tokenizer that can't be rebuilt: "
            f"model {kind}, pre-tokenizer {pre}\n"
            f"  what works: gpt2 with {', '.join(_PRE_TOKENIZERS)}; or model.tokenizer=FOLDER "
            "with the original tokenizer.json"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_TOKEN
        ]
    )
    named = {
        f"{name}_token": tokens[index]
        for name in ("bos", "eos")
        if (index := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    # llama.cpp adds it for this pre-tokenizer unless the file says otherwise.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    if adds_bos and "bos_token" not in named:
        raise ConfigError(f"model.source: {checkpoint.path} adds a bos token and names none")
    return TextTokenizer(
        backend,
        stop_ids(checkpoint),
        metadata.get("tokenizer.chat_template"),
        named,
        (metadata["tokenizer.ggml.bos_token_id"],) if adds_bos else (),
    )
