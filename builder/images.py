"""Images from files to the crops that a model's encoder sees, and to the tokens they stand for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from builder.resolve import Plan
from builder.tokenizer import TextTokenizer
from models.errors import ConfigError
from models.settings import VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PreparedImage:
    """An image as the encoder sees it."""

    crops: tuple[Pixels, ...]
    """float32 ``[channels, side, side]``: its parts row by row, and the whole last."""

    rows: int
    """Rows of parts; 0 where it is not split."""

    columns: int
    """Parts of a row."""


def image_hash(pixels: Pixels) -> int:
    """A number that no other image has, below 2 to the 63rd.

    Args:
        pixels: One crop.
    """
    digest = hashlib.sha256(np.ascontiguousarray(pixels).data).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class ImagePreparer:
    """Prepares images as the checkpoint's own processor does.

    Args:
        plan: The plan of a deployment that takes images.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.settings.vision is not None
        self.settings: VisionSettings = plan.settings.vision
        self._folder = plan.checkpoint.path
        self._is_configured = "image_processor" in plan.checkpoint.config

    def prepare_file(self, name: str, file: str) -> PreparedImage:
        """Reads and prepares an image.

        Args:
            name: The entry's name, for messages.
            file: The image's file.

        Raises:
            ConfigError: If it can't be read as an image, or not be prepared.
        """
        from PIL import Image, UnidentifiedImageError

        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"{name}: no such image: {path}")
        try:
            with Image.open(path) as image:
                image.load()
                return self.prepare(name, image)
        except UnidentifiedImageError as error:
            raise ConfigError(f"{name}: {path} is no image that Pillow knows") from error
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ConfigError(f"{name}: {path} can't be read as an image: {error}") from error

    def prepare(self, name: str, image: Image) -> PreparedImage:
        """Prepares an image.

        Args:
            name: The entry's name, for messages.
            image: The image.

        Raises:
            ConfigError: If the checkpoint doesn't say how, or the processor can't.
        """
        from PIL import ImageOps

        try:
            made = self._processor(
                [[ImageOps.exif_transpose(image).convert("RGB")]],
                return_row_col_info=True,
                return_tensors="np",
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name}: the image can't be prepared: {error}") from error
        crops = np.asarray(made["pixel_values"][0], np.float32)
        settings = self.settings
        shape = (settings.num_channels, settings.crop_size, settings.crop_size)
        if crops.shape[1:] != shape:
            raise ConfigError(
                f"{name}: the image is prepared as {list(crops.shape[1:])}, but the encoder takes "
                f"{list(shape)}\n  the processor's settings don't fit the model's"
            )
        return PreparedImage(tuple(crops), int(made["rows"][0][0]), int(made["cols"][0][0]))

    @cached_property
    def _processor(self) -> Any:
        if not self._is_configured:
            raise ConfigError(
                f"model.source: {self._folder} has no preprocessor_config.json, which says how "
                "images are prepared"
            )
        # The one that needs no PyTorch; SmolVLM's is the same.
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil,
        )

        return Idefics3ImageProcessorPil.from_pretrained(self._folder)


def check_image_tokens(
    name: str, ids: Sequence[int], images: Sequence[PreparedImage], settings: VisionSettings
) -> None:
    """A prompt has as many image tokens as its images become.

    Args:
        name: The entry's name, for messages.
        ids: The prompt.
        images: Its images.
        settings: The encoder.

    Raises:
        ConfigError: If it has more or fewer.
    """
    found = sum(token == settings.image_token_id for token in ids)
    crops = [len(image.crops) for image in images]
    each = settings.tokens_per_crop
    needed = sum(crops) * each
    if found == needed:
        return
    if not images:
        raise ConfigError(
            f"{name}: {found} image tokens ({settings.image_token_id}), but no images\n"
            "  what works: {prompt: ..., images: [FILE]}"
        )
    sizes = " + ".join(map(str, crops))
    raise ConfigError(
        f"{name}: {found} image tokens ({settings.image_token_id}), but its {len(images)} images "
        f"are {sizes} crops of {each} tokens = {needed}"
    )


class ImageText:
    """How images stand in a text.

    Args:
        tokenizer: The checkpoint's tokenizer.
        settings: The encoder.

    Raises:
        ConfigError: If the tokenizer has none of the tokens that stand around images.
    """

    AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
    """What HF's ``Idefics3Processor`` puts around an image's parts, and before the whole."""

    def __init__(self, tokenizer: TextTokenizer, settings: VisionSettings) -> None:
        marker = tokenizer.backend.id_to_token(settings.image_token_id)
        known = [tokenizer.backend.token_to_id(token) for token in (self.AROUND, self.WHOLE)]
        if marker is None or None in known:
            raise ConfigError(
                "model.tokenizer: it has no tokens for images "
                f"({settings.image_token_id}, {self.AROUND}, {self.WHOLE})"
            )
        self.marker: str = marker
        """What stands for an image in a prompt's text."""
        self._settings = settings

    def check(self, name: str, text: str, num_images: int) -> bool:
        """Whether a text says where its images are; otherwise they come before it.

        Raises:
            ConfigError: If it names more or fewer.
        """
        found = text.count(self.marker)
        if found not in (0, num_images):
            raise ConfigError(
                f"{name}: {found} times {self.marker}, but {num_images} images\n"
                f"  what works: one {self.marker} where each image is, or none: they come first"
            )
        return found > 0

    def expand(self, text: str, images: Sequence[PreparedImage]) -> str:
        """Replaces each marker by the tokens of its image, as ``Idefics3Processor`` does."""
        from transformers.models.smolvlm import processing_smolvlm

        prompt_of: Any = processing_smolvlm.get_image_prompt_string
        remaining = iter(images)

        def tokens(_: re.Match[str]) -> str:
            image = next(remaining)
            return str(
                prompt_of(
                    image.rows,
                    image.columns,
                    self._settings.tokens_per_crop,
                    fake_token_around_image=self.AROUND,
                    image_token=self.marker,
                    global_image_token=self.WHOLE,
                )
            )

        return re.sub(re.escape(self.marker), tokens, text)
