"""The embeddings of the images of requests under way, and which of them a step takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.pipelines.context import TextAndVisionContext, TextContext

from models.config import VisionConfig
from models.role_contracts import ImageInputs, VisionInputs
from models.settings import VisionSettings

CropKey = tuple[Hashable, int]
"""A crop: its request, and its position among the request's."""


@dataclass(frozen=True)
class Taken:
    """Consecutive rows of one crop's embeddings that a step takes."""

    crop: CropKey
    """The crop."""

    first: int
    """The first of its rows."""

    places: npt.NDArray[np.int32]
    """The tokens of its replica's step that the rows stand for."""

    is_last: bool
    """Whether no later step takes any."""


@dataclass(frozen=True)
class StepImages:
    """What a step needs of its requests' images."""

    new: tuple[tuple[CropKey, ...], ...]
    """Per replica, the crops to encode."""

    patches: tuple[npt.NDArray[np.float32], ...]
    """Per replica, their values, float32 ``[crops, patches, values]``."""

    taken: tuple[tuple[Taken, ...], ...]
    """Per replica, what its tokens take."""


class ImageStore:
    """Encodes each crop when a step first reaches it, and keeps it until its last row is taken.

    Args:
        config: The encoder's configuration.
    """

    def __init__(self, config: VisionConfig) -> None:
        self._config = config
        self._kept: dict[CropKey, tuple[Buffer, ...]] = {}

    def step(self, batches: Sequence[Sequence[TextContext]]) -> StepImages:
        """What a step needs.

        Args:
            batches: Each replica's requests, in order, as far as this step computes them.
        """
        settings = self._config.settings
        new: list[tuple[CropKey, ...]] = []
        patches, taken = [], []
        for batch in batches:
            row, rows, crops = 0, list[Taken](), dict[CropKey, npt.NDArray[np.float32]]()
            for context in batch:
                if isinstance(context, TextAndVisionContext):
                    reached = _reached(context, settings, row)
                    rows += reached
                    crops |= {
                        part.crop: context.images[part.crop[1]].pixel_values
                        for part in reached
                        if part.crop not in self._kept
                    }
                row += context.tokens.active_length
            new.append(tuple(crops))
            patches.append(patches_of(list(crops.values()), settings))
            taken.append(tuple(rows))
        return StepImages(tuple(new), tuple(patches), tuple(taken))

    def inputs(
        self,
        step: StepImages,
        encode: Callable[[ImageInputs[Buffer, Buffer]], Sequence[Buffer]],
        signals: tuple[Buffer, ...] | None,
    ) -> VisionInputs[Buffer]:
        """The decoder's inputs of one step; what is new is encoded first.

        Each device has the rows of its own replica, in as many as the replica with the most has;
        the rest are nowhere.

        Args:
            step: What the step needs.
            encode: Runs the VISION graph.
            signals: The signal buffers that it takes.
        """
        placement = self._config.placement
        if any(step.new):
            self._encode(step, encode, signals)
        count = max(sum(len(part.places) for part in rows) for rows in step.taken)
        embeddings, indices = [], []
        for holder, device in enumerate(placement.devices):
            taken = step.taken[placement.replica(holder)]
            rank = holder % placement.group
            values = np.zeros((count, self._config.hidden_size), np.float32)
            places = np.full(count, -1, np.int32)
            row = 0
            for part in taken:
                end = row + len(part.places)
                kept = self._kept[part.crop][rank].to_numpy()
                values[row:end] = kept[part.first : part.first + len(part.places)]
                places[row:end] = part.places
                row = end
            embeddings.append(Buffer.from_numpy(values).to(device.to_device()))
            indices.append(Buffer.from_numpy(places).to(device.to_device()))
        for part in (part for rows in step.taken for part in rows if part.is_last):
            del self._kept[part.crop]
        return VisionInputs(embeddings=tuple(embeddings), scatter_indices=tuple(indices))

    def release(self, request: Hashable) -> None:
        """Forgets a request's crops; one that has none is none of the store's."""
        for crop in [crop for crop in self._kept if crop[0] == request]:
            del self._kept[crop]

    def _encode(
        self,
        step: StepImages,
        encode: Callable[[ImageInputs[Buffer, Buffer]], Sequence[Buffer]],
        signals: tuple[Buffer, ...] | None,
    ) -> None:
        placement, length = self._config.placement, self._config.settings.tokens_per_crop
        patches = tuple(
            Buffer.from_numpy(values).to(placement.devices[first].to_device())
            for values, first in zip(step.patches, placement.firsts, strict=True)
        )
        outputs = encode(ImageInputs(patches=patches, signals=signals))
        for replica, crops in enumerate(step.new):
            first = replica * placement.group
            own = outputs[first : first + placement.group]
            for number, crop in enumerate(crops):
                rows = slice(number * length, (number + 1) * length)
                self._kept[crop] = tuple(output[rows, :] for output in own)


def _reached(context: TextAndVisionContext, settings: VisionSettings, row: int) -> list[Taken]:
    """What the tokens of one request's step take, which begin at a row of its replica's."""
    begin, end = context.tokens.processed_length, context.tokens.current_position
    reached = []
    for number, image in enumerate(context.images):
        if image.end_idx <= begin or image.start_idx >= end:
            continue
        ids = context.tokens.all[image.start_idx : image.end_idx]
        places = image.start_idx + np.flatnonzero(ids == settings.image_token_id)
        assert len(places) == settings.tokens_per_crop, "a request's image tokens are its crops'"
        now = (places >= begin) & (places < end)
        if now.any():
            reached.append(
                Taken(
                    crop=(context.request_id, number),
                    first=int(now.argmax()),
                    places=(places[now] - begin + row).astype(np.int32),
                    is_last=bool(places[-1] < end),
                )
            )
    return reached


def patches_of(
    crops: Sequence[npt.NDArray[np.float32]], settings: VisionSettings
) -> npt.NDArray[np.float32]:
    """Cuts crops into patches; pixels behind the last whole patch of a row or column are left out.

    Args:
        crops: Each float32 ``[channels, crop_size, crop_size]``.
        settings: The encoder.

    Returns:
        float32 ``[crops, patches, values]``, a patch's values by channel, row and column.
    """
    channels, side, size = settings.num_channels, settings.patches_per_side, settings.patch_size
    if not crops:
        return np.zeros((0, settings.num_patches, settings.patch_values), np.float32)
    pixels = np.stack(crops)[:, :, : side * size, : side * size]
    cut = pixels.reshape(len(crops), channels, side, size, side, size)
    return np.ascontiguousarray(
        cut.transpose(0, 2, 4, 1, 3, 5).reshape(
            len(crops), settings.num_patches, settings.patch_values
        ),
        dtype=np.float32,
    )
