"""How the next token is chosen from logits, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from builder.schema import SamplingConfig
from models.errors import ConfigError

Logits = npt.NDArray[np.float32]


def check_sampling(sampling: SamplingConfig) -> None:
    """Checks the settings against their ranges.

    Raises:
        ConfigError: If one is out of range.
    """
    for key, value, valid, wanted in (
        (
            "temperature",
            sampling.temperature,
            sampling.temperature == 0 or 1e-3 <= sampling.temperature <= 1e3,
            "0 (greedy) or from 0.001 to 1000",
        ),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (all) or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1 (all)"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 (all) to 1"),
        ("seed", sampling.seed, sampling.seed >= 0, "0 or more"),
    ):
        if not valid:
            raise ConfigError(f"task.sampling.{key}: {value} is not {wanted}")
    if sampling.temperature > 0:
        return
    for key, value, unset in (
        ("top_k", sampling.top_k, 0),
        ("top_p", sampling.top_p, 1),
        ("min_p", sampling.min_p, 0),
    ):
        if value != unset:
            raise ConfigError(
                f"task.sampling.{key}: {value} has no effect at temperature 0, which is greedy\n"
                "  what works: task.sampling.temperature=1"
            )


class Sampler:
    """Chooses one request's tokens.

    The generator is the request's own, so what it draws does not depend on the batch.

    Args:
        sampling: The settings.
        index: The request's position among the prompts.
    """

    def __init__(self, sampling: SamplingConfig, index: int) -> None:
        self.sampling = sampling
        self._generator = np.random.default_rng((sampling.seed, index))

    def choose(self, logits: Logits) -> int:
        """The next token.

        Args:
            logits: float32 ``[vocabulary]``.
        """
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        ids, probabilities = candidates(logits, self.sampling)
        return int(self._generator.choice(ids, p=probabilities))


def candidates(
    logits: Logits, sampling: SamplingConfig
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that may be chosen, most likely first, and their probabilities.

    In the order of Hugging Face's logits processors: temperature, then top_k, then top_p, then
    min_p, each over what the one before left.

    Args:
        logits: float32 ``[vocabulary]``.
        sampling: The settings; the temperature is above 0.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    count = len(scaled) if sampling.top_k == 0 else min(sampling.top_k, len(scaled))
    kept = np.argpartition(-scaled, count - 1)[:count] if count < len(scaled) else np.arange(count)
    # Ties are broken by the lower id, whatever the partition left.
    ids = kept[np.lexsort((kept, -scaled[kept]))]
    probabilities = _softmax(scaled[ids])
    if sampling.top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        count = int(np.count_nonzero(before < sampling.top_p))
        ids, probabilities = ids[:count], _normalised(probabilities[:count])
    if sampling.min_p > 0:
        likely = probabilities >= sampling.min_p * probabilities[0]
        ids, probabilities = ids[likely], _normalised(probabilities[likely])
    return ids, probabilities


def _softmax(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return _normalised(np.exp(scaled - scaled.max()))


def _normalised(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    normalised: npt.NDArray[np.float64] = weights / weights.sum()
    return normalised


def log_softmax(logits: Logits) -> Logits:
    """Log-probabilities over the last dimension, float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: Logits = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised
