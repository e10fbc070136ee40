"""The kernels of attention on the host compute what numpy does, wherever the pages lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn.kv_cache.cache_params import PACKED_PAGE_STRIDE

from builder.compile import process_session
from models.kernels import kernel_library, rms_norm

CPU = DeviceRef.CPU()
LAYERS, LAYER = 2, 1


@cache
def _step() -> Model:
    """Both kernels that read and write pages, for every size."""
    types = [
        TensorType(DType.float32, ["tokens", "width"], CPU),
        BufferType(DType.float32, ["pages", 2, LAYERS, "page", "heads", "dim"], CPU),
        TensorType(DType.int64, [1], CPU),
        TensorType(DType.uint32, ["sequences", "most_pages"], CPU),
        TensorType(DType.uint32, ["sequences"], CPU),
        # The most new tokens of a sequence, and the most in all.
        TensorType(DType.uint32, [1], CPU),
        TensorType(DType.uint32, [1], CPU),
        TensorType(DType.uint32, ["offsets"], CPU),
        TensorType(DType.float32, ["positions", "dim"], CPU),
        TensorType(DType.float32, [1], CPU),
        TensorType(DType.int64, [2], CPU),
        # How wide the queries are.
        TensorType(DType.float32, ["query_width"], CPU),
    ]
    with Graph("step", input_types=types, custom_extensions=[kernel_library()]) as graph:
        qkv, pages, stride, table, lengths, *most, offsets, angles, scale, sizes, width = (
            graph.inputs
        )
        result = TensorType(DType.float32, [qkv.tensor.shape[0], width.tensor.shape[0]], CPU)
        values = [qkv, pages, stride, table, lengths, offsets, angles, sizes]
        (queries,) = ops.inplace_custom("rolecall_rotate_and_store", CPU, values, [result])
        values = [queries, pages, stride, table, lengths, *most, offsets, scale, sizes]
        (attended,) = ops.inplace_custom("rolecall_attention", CPU, values, [result])
        graph.output(queries, attended)
    return process_session().load(graph)


@dataclass(frozen=True)
class Heads:
    """How heads are laid out, in the kernels' words."""

    dim: int
    group: int
    """Query heads of a key head."""

    heads: int = 2
    """Key heads."""

    @property
    def query_width(self) -> int:
        return self.dim * self.group * self.heads


def _rotated(heads: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """[tokens, heads, dim], the halves of a head as the parts of complex numbers."""
    half = heads.shape[-1] // 2
    turned = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _check(
    heads: Heads,
    page: int,
    cached: list[int],
    new: list[int],
    window: int = 1 << 20,
    apart: int = 1,
) -> None:
    """Compares a step with numpy: rotated queries, what all pages hold, and the attention.

    Args:
        heads: The heads.
        page: Tokens of a page.
        cached: Tokens that each sequence has in the cache.
        new: Its tokens of this step.
        window: How many tokens back a token sees, itself included.
        apart: How many pages' sizes lie between the beginnings of two pages.
    """
    generator = np.random.default_rng(sum(cached) + sum(new) + page)
    dim, key_heads = heads.dim, heads.heads
    totals = [before + now for before, now in zip(cached, new, strict=True)]
    most = max((-(-total // page) for total in totals), default=1)
    num_pages = most * len(new) + 3
    shape = (apart * num_pages, 2, LAYERS, page, key_heads, dim)
    pool = generator.standard_normal(shape, np.float32)
    pages = pool[::apart]
    stride = PACKED_PAGE_STRIDE if apart == 1 else pages.strides[0] // pages.itemsize
    table = generator.permutation(num_pages)[: most * len(new)].reshape(len(new), most)
    tokens = sum(new)
    width = heads.query_width + 2 * key_heads * dim
    qkv = generator.standard_normal((tokens, width), np.float32)
    frequencies = 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    angle = np.arange(max(totals, default=1))[:, None] * frequencies
    angles = np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(-1, dim)
    wanted = pages.astype(np.float64)
    outputs = _step().execute(
        *map(
            Buffer.from_numpy,
            (
                qkv,
                pool,
                np.array([stride], np.int64),
                table.astype(np.uint32),
                np.array(cached, np.uint32),
                np.array([max(new, default=0)], np.uint32),
                np.array([max(totals, default=0)], np.uint32),
                np.cumsum([0, *new]).astype(np.uint32),
                angles.astype(np.float32),
                np.array([0.2], np.float32),
                np.array([LAYER, window], np.int64),
                np.zeros(heads.query_width, np.float32),
            ),
        )
    )
    queries, attended = (output.to_numpy() for output in outputs)

    places = [
        (row, before + i)
        for row, (before, now) in enumerate(zip(cached, new, strict=True))
        for i in range(now)
    ]
    turn = angle[np.array([position for _, position in places], int)]
    exact = qkv.astype(np.float64).reshape(tokens, width // dim, dim)
    split = np.split(exact, [heads.group * key_heads, -key_heads], axis=1)
    wanted_queries, keys = _rotated(split[0], turn), _rotated(split[1], turn)
    for (row, position), key, value in zip(places, keys, split[2], strict=True):
        at = table[row, position // page]
        wanted[at, 0, LAYER, position % page] = key
        wanted[at, 1, LAYER, position % page] = value
    np.testing.assert_allclose(queries, wanted_queries.reshape(queries.shape), atol=1e-5)
    # Everything else in the cache is as it was.
    np.testing.assert_allclose(pages, wanted, atol=1e-5)

    results = [np.zeros((0, heads.query_width))]
    for (row, position), query in zip(places, wanted_queries, strict=True):
        seen = slice(max(0, position + 1 - window), position + 1)
        # [2, positions, key heads, dim] of the sequence.
        own = np.moveaxis(wanted[table[row], :, LAYER], 1, 0).reshape(2, -1, key_heads, dim)
        key, value = np.repeat(own[:, seen], heads.group, axis=2)
        scores = 0.2 * np.einsum("hd,shd->hs", query, key)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        results.append(np.einsum("hs,shd->hd", weights, value).reshape(1, -1))
    np.testing.assert_allclose(attended, np.concatenate(results), atol=2e-5)


EVERY_HEADS = [Heads(dim, group) for dim in (16, 64, 80) for group in (1, 3, 4)]


# Contexts on both sides of a chunk of 64 and of a part, which has 64 tokens at least.
@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("heads", EVERY_HEADS, ids=str)
def test_decoding_attends_as_numpy(heads: Heads, page: int) -> None:
    _check(heads, page, [0, 62, 63, 64, 127, 300], [1] * 6)
    # A single sequence's context is divided over the threads.
    _check(heads, page, [517], [1])


@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("heads", EVERY_HEADS, ids=str)
def test_several_new_tokens_attend_as_numpy(heads: Heads, page: int) -> None:
    # 96 rows of queries are a block: 24, 32 or 96 tokens.
    _check(heads, page, [0, 0, 60, 130], [2, 97, 9, 66])


def test_sequences_that_decode_beside_others_attend_as_numpy() -> None:
    _check(Heads(64, 3), 16, [5, 0, 200, 64, 31], [1, 70, 1, 2, 1])


def test_a_sequence_without_new_tokens_attends_to_nothing() -> None:
    _check(Heads(16, 3), 16, [5, 20, 7], [1, 0, 3])


def test_a_step_without_tokens_does_nothing() -> None:
    _check(Heads(16, 1), 16, [], [])


def test_pages_may_lie_further_apart_than_they_are_long() -> None:
    _check(Heads(64, 3), 16, [5, 0, 200], [1, 70, 1], apart=3)


@pytest.mark.parametrize("window", [1, 7, 16, 64, 65, 150, 1000])
def test_a_window_hides_what_is_further_back(window: int) -> None:
    _check(Heads(64, 3), 16, [0, 70, 200, 150, 3], [100, 1, 1, 40, 2], window)


@pytest.mark.parametrize("new", [[1], [3]])
def test_scores_that_are_too_large_for_exp_attend_to_the_largest(new: list[int]) -> None:
    heads, page, context = Heads(16, 1), 16, 100
    pages = np.zeros((8, 2, LAYERS, page, heads.heads, heads.dim), np.float32)
    # Every key scores 0 but one, whose score's exp is no float32.
    pages[2, 0, LAYER, 5] = 100
    pages[2, 1, LAYER, 5] = 7
    qkv = np.zeros((new[0], heads.query_width + 2 * heads.heads * heads.dim), np.float32)
    qkv[:, : heads.query_width] = 1
    angles = np.tile(np.array([1, 0], np.float32), (context + 3, heads.dim // 2))
    outputs = _step().execute(
        *map(
            Buffer.from_numpy,
            (
                qkv,
                pages,
                np.array([PACKED_PAGE_STRIDE], np.int64),
                np.arange(8, dtype=np.uint32)[None],
                np.array([context], np.uint32),
                np.array(new, np.uint32),
                np.array([context + new[0]], np.uint32),
                np.array([0, *new], np.uint32),
                angles,
                np.array([1], np.float32),
                np.array([LAYER, 1 << 20], np.int64),
                np.zeros(heads.query_width, np.float32),
            ),
        )
    )
    np.testing.assert_array_equal(outputs[1].to_numpy(), np.full((*new, heads.query_width), 7))


@pytest.mark.parametrize(("most_new", "most"), [(2, 8), (3, 7)])
def test_a_batch_that_outgrows_its_own_limits_is_refused(most_new: int, most: int) -> None:
    inputs = (
        np.zeros((3, 48), np.float32),
        np.zeros((1, 2, LAYERS, 16, 1, 16), np.float32),
        np.array([PACKED_PAGE_STRIDE], np.int64),
        np.array([[0]], np.uint32),
        np.array([5], np.uint32),
        np.array([most_new], np.uint32),
        np.array([most], np.uint32),
        np.array([0, 3], np.uint32),
        np.zeros((8, 16), np.float32),
        np.ones(1, np.float32),
        np.array([LAYER, 1 << 20], np.int64),
        np.zeros(16, np.float32),
    )
    with pytest.raises(ValueError, match="sequence 0 has 3 new tokens behind 5"):
        _step().execute(*map(Buffer.from_numpy, inputs))


@cache
def _rms_norm() -> Model:
    types = [
        TensorType(DType.float32, ["rows", "width"], CPU),
        TensorType(DType.float32, ["width"], CPU),
    ]
    with Graph("norm", input_types=types, custom_extensions=[kernel_library()]) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(*(rms_norm(x, weight, EPSILON, offset) for offset in (0.0, 1.0)))
    return process_session().load(graph)


EPSILON = 1e-3


# Widths beside those of a register of 16, and rows that one thread and both take.
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("width", [1, 15, 16, 37, 576])
def test_rms_norm_is_numpys(rows: int, width: int) -> None:
    generator = np.random.default_rng(rows + width)
    # As small as epsilon, which then matters.
    x = 0.03 * generator.standard_normal((rows, width), np.float32)
    weight = generator.standard_normal(width, np.float32)
    outputs = _rms_norm().execute(Buffer.from_numpy(x), Buffer.from_numpy(weight))
    exact = x.astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPSILON)
    for found, offset in zip(outputs, (0, 1), strict=True):
        np.testing.assert_allclose(found.to_numpy(), normed * (weight + offset), atol=2e-6)
