"""The Mojo kernels compute what numpy does, for every size of tile and remainder."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from max import tree
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import BufferType, DeviceRef, Graph, TensorType

from builder.compile import process_session
from models.kernels import (
    expert_products,
    gated_delta,
    kernel_library,
    latent_attention,
    latent_context,
    matmul,
    patch_attention,
    place_rows,
)
from models.kv_cache import HostMLAKVCacheParams

CPU = DeviceRef.CPU()


@cache
def _matmul() -> Model:
    types = [TensorType(DType.float32, shape, CPU) for shape in (["m", "k"], ["n", "k"])]
    with Graph("matmul", input_types=types, custom_extensions=[kernel_library()]) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(matmul(x, weight))
    return process_session().load(graph)


# Rows in tiles of 4 and blocks of 32, columns in tiles of 4, both over two threads.
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 32, 33, 70])
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (3, 16), (4, 15), (37, 51), (960, 576)])
def test_matmul_of_any_size_is_numpys(rows: int, columns: int, inner: int) -> None:
    generator = np.random.default_rng(rows + columns)
    x = generator.standard_normal((rows, inner), np.float32)
    weight = generator.standard_normal((columns, inner), np.float32)
    (found,) = _matmul().execute(Buffer.from_numpy(x), Buffer.from_numpy(weight))
    np.testing.assert_allclose(found.to_numpy(), x @ weight.T, atol=1e-4 * inner**0.5)


@cache
def _expert_products() -> Model:
    types = [
        TensorType(DType.float32, ["rows", "k"], CPU),
        TensorType(DType.int32, ["tokens", "choices"], CPU),
        TensorType(DType.float32, ["experts_n", "k"], CPU),
    ]
    with Graph("experts", input_types=types, custom_extensions=[kernel_library()]) as graph:
        x, experts, weight = (value.tensor for value in graph.inputs)
        graph.output(expert_products(x, experts, weight, NUM_COLUMNS))
    return process_session().load(graph)


NUM_EXPERTS, NUM_COLUMNS, INNER = 5, 37, 51


def _experts(x: np.ndarray, chosen: np.ndarray, weight: np.ndarray) -> np.ndarray:
    buffers = (Buffer.from_numpy(np.ascontiguousarray(a)) for a in (x, chosen, weight))
    (found,) = _expert_products().execute(*buffers)
    return found.to_numpy()


# Rows per expert in tiles of 4 and blocks of 32, none of some; a row per token, or per choice.
@pytest.mark.parametrize("per_choice", [False, True])
@pytest.mark.parametrize(("tokens", "choices"), [(0, 2), (1, 1), (1, 3), (7, 2), (150, 3)])
def test_expert_products_are_numpys(tokens: int, choices: int, per_choice: bool) -> None:
    generator = np.random.default_rng(tokens)
    chosen = generator.integers(-1, NUM_EXPERTS, (tokens, choices)).astype(np.int32)
    x = generator.standard_normal((tokens * choices if per_choice else tokens, INNER), np.float32)
    weight = generator.standard_normal((NUM_EXPERTS, NUM_COLUMNS, INNER), np.float32)
    found = _experts(x, chosen, weight.reshape(-1, INNER))
    rows = x if per_choice else np.repeat(x, choices, axis=0)
    wanted = np.einsum("ai,ani->an", rows, weight[chosen.reshape(-1)])
    wanted[chosen.reshape(-1) < 0] = 0
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_weights_of_experts_that_nothing_chose_are_not_read() -> None:
    x = np.ones((2, INNER), np.float32)
    weight = np.full((NUM_EXPERTS, NUM_COLUMNS, INNER), np.nan, np.float32)
    weight[3] = 1
    found = _experts(x, np.full((2, 1), 3, np.int32), weight.reshape(-1, INNER))
    np.testing.assert_array_equal(found, np.full((2, NUM_COLUMNS), INNER, np.float32))


def test_an_expert_that_is_not_there_is_an_error() -> None:
    x = np.ones((1, INNER), np.float32)
    weight = np.ones((NUM_EXPERTS * NUM_COLUMNS, INNER), np.float32)
    with pytest.raises(ValueError, match="expert 5 of 5"):
        _experts(x, np.full((1, 1), 5, np.int32), weight)


@cache
def _latent_attention() -> Model:
    types = [
        TensorType(DType.float32, ["tokens", HEADS * (NOPE + ROPE)], CPU),
        TensorType(DType.float32, [HEADS * (NOPE + VALUE), RANK], CPU),
        TensorType(DType.int32, [1], CPU),
        TensorType(DType.uint32, ["offsets"], CPU),
        BufferType(DType.float32, ["capacity", RANK + ROPE], CPU),
        *tree.leaves(LATENTS.get_symbolic_inputs()),
    ]
    with Graph("latent", input_types=types, custom_extensions=[kernel_library()]) as graph:
        queries, weight, length, offsets = (value.tensor for value in graph.inputs[:4])
        workspace = graph.inputs[4].buffer
        (kv,) = LATENTS.unflatten_kv_inputs(iter(graph.inputs[5:]))
        latent_context(workspace, kv, offsets, 1, length)
        graph.output(
            latent_attention(
                queries,
                weight,
                workspace,
                kv,
                offsets,
                num_heads=HEADS,
                value_dim=VALUE,
                page_size=PAGE,
                scale=0.3,
            )
        )
    return process_session().load(graph)


HEADS, NOPE, ROPE, VALUE, RANK, PAGE = 3, 19, 6, 13, 37, 8
LATENTS = HostMLAKVCacheParams(
    dtype=DType.float32,
    head_dim=RANK + ROPE,
    num_layers=2,
    page_size=PAGE,
    devices=[CPU],
    num_q_heads=HEADS,
)


def _attend(
    lengths: list[int], new: list[int], length: int | None = None, capacity: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernels make of sequences whose pages lie anywhere, and what numpy does."""
    generator = np.random.default_rng(sum(lengths))
    pages = generator.standard_normal((40, 1, 2, PAGE, 1, RANK + ROPE), np.float32)
    table = generator.permutation(40)[: 4 * len(lengths)].reshape(len(lengths), 4)
    weight = generator.standard_normal((HEADS * (NOPE + VALUE), RANK), np.float32)
    queries = generator.standard_normal((sum(new), HEADS * (NOPE + ROPE)), np.float32)
    aligned = sum(-(-n // PAGE) * PAGE for n in lengths)
    inputs = [
        queries,
        weight,
        np.array([aligned if length is None else length], np.int32),
        np.cumsum([0, *new]).astype(np.uint32),
        np.full((capacity, RANK + ROPE), np.nan, np.float32),
        pages,
        np.array([n - now for n, now in zip(lengths, new, strict=True)], np.uint32),
        table.astype(np.uint32),
        np.array([max(new)], np.uint32),
        np.array([max(lengths)], np.uint32),
        np.array([pages[0].size], np.int64),
    ]
    (found,) = _latent_attention().execute(*map(Buffer.from_numpy, inputs))
    rows = []
    heads = weight.reshape(HEADS, NOPE + VALUE, RANK)
    query = iter(queries.reshape(-1, HEADS, NOPE + ROPE))
    for sequence, (total, now) in enumerate(zip(lengths, new, strict=True)):
        latents = pages[table[sequence], 0, 1, :, 0].reshape(-1, RANK + ROPE)[:total]
        keys = np.einsum("sr,hdr->hsd", latents[:, :RANK], heads[:, :NOPE])
        values = np.einsum("sr,hdr->hsd", latents[:, :RANK], heads[:, NOPE:])
        for seen in range(total - now + 1, total + 1):
            q = next(query)
            scores = np.einsum("hd,hsd->hs", q[:, :NOPE], keys[:, :seen])
            scores = 0.3 * (scores + q[:, NOPE:] @ latents[:seen, RANK:].T)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            rows.append(np.einsum("hs,hsd->hd", weights, values[:, :seen]).reshape(-1))
    return found.to_numpy(), np.stack(rows)


@pytest.mark.parametrize(
    ("lengths", "new"),
    [([1], [1]), ([8], [8]), ([9, 17], [1, 17]), ([31, 5, 8, 1], [2, 5, 1, 1])],
)
def test_latent_attention_is_numpys(lengths: list[int], new: list[int]) -> None:
    found, wanted = _attend(lengths, new)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_context_lengths_that_are_not_the_batchs_are_an_error() -> None:
    with pytest.raises(ValueError, match="say 16 tokens, its pages hold 24"):
        _attend([9, 3], [1, 3], length=16)


def test_context_that_the_workspace_does_not_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match="24 tokens of context for a workspace of 16"):
        _attend([9, 3], [1, 3], capacity=16)


PATCH_HEADS, PATCHES, WIDTH = 3, 21, 20
VALUE_HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, SLOTS = 4, 2, 12, 19, 3


@cache
def _vision_and_delta() -> Model:
    """Three kernels in one graph, which compiles in the time of one."""
    delta_width = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    types = [
        TensorType(DType.float32, ["patches", 3 * PATCH_HEADS * WIDTH], CPU),
        *(TensorType(DType.float32, [rows, 5], CPU) for rows in ("tokens", "rows")),
        TensorType(DType.int32, ["rows"], CPU),
        BufferType(DType.float32, [SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM], CPU),
        *(
            TensorType(DType.float32, ["steps", width], CPU)
            for width in (delta_width, VALUE_HEADS, VALUE_HEADS)
        ),
        TensorType(DType.uint32, ["offsets"], CPU),
        TensorType(DType.uint32, ["sequences"], CPU),
        TensorType(DType.bool, ["sequences"], CPU),
    ]
    with Graph(
        "vision_and_delta", input_types=types, custom_extensions=[kernel_library()]
    ) as graph:
        qkv, x, rows, at, pool, *delta = graph.inputs
        graph.output(
            patch_attention(qkv.tensor, PATCH_HEADS, PATCHES, 0.3),
            place_rows(x.tensor, rows.tensor, at.tensor),
            gated_delta(pool.buffer, *(value.tensor for value in delta)),
        )
    return process_session().load(graph)


def _attended(qkv: np.ndarray) -> np.ndarray:
    parts = qkv.astype(np.float64).reshape(-1, PATCHES, 3, PATCH_HEADS, WIDTH)
    queries, keys, values = np.moveaxis(parts, 2, 0)
    scores = np.exp(0.3 * np.einsum("ilhd,imhd->ihlm", queries, keys))
    weights = scores / scores.sum(-1, keepdims=True)
    return np.einsum("ihlm,imhd->ilhd", weights, values).reshape(len(qkv), PATCH_HEADS * WIDTH)


def _remembered(
    memory: np.ndarray, qkv: np.ndarray, decay: np.ndarray, beta: np.ndarray, head: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The rule as the paper writes it, for one head of one sequence, in float64."""
    read, at = [], head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    for row, kept, near in zip(qkv.astype(np.float64), decay[:, head], beta[:, head], strict=True):
        query = row[at : at + KEY_DIM]
        key = row[KEY_HEADS * KEY_DIM + at : KEY_HEADS * KEY_DIM + at + KEY_DIM]
        value = row[2 * KEY_HEADS * KEY_DIM :].reshape(VALUE_HEADS, VALUE_DIM)[head]
        query, key = (x / np.sqrt(x @ x + 1e-6) for x in (query, key))
        memory = memory * np.exp(kept)
        memory = memory + np.outer(key, near * (value - key @ memory))
        read.append(query / np.sqrt(KEY_DIM) @ memory)
    return memory, read


@pytest.mark.parametrize("images", [0, 1, 4])
def test_vision_and_delta_kernels_are_numpys(images: int) -> None:
    generator = np.random.default_rng(images)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32)

    qkv, x, rows = normal(images * PATCHES, 3 * PATCH_HEADS * WIDTH), normal(9, 5), normal(4, 5)
    at = np.array([8, -1, 0, -1], np.int32)
    pool = normal(SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    memories = pool.astype(np.float64)
    step = normal(8, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
    decay, beta = -np.abs(normal(8, VALUE_HEADS)), np.abs(normal(8, VALUE_HEADS))
    offsets, slots = np.array([0, 7, 8], np.uint32), np.array([2, 0], np.uint32)
    started = np.array([False, True])
    memories[2] = 0  # What the slot held before is none of the sequence's.
    inputs = (qkv, x, rows, at, pool, step, decay, beta, offsets, slots, started)
    outputs = _vision_and_delta().execute(*map(Buffer.from_numpy, inputs))
    attended, placed, remembered = (output.to_numpy() for output in outputs)
    np.testing.assert_allclose(attended, _attended(qkv), atol=1e-5)
    x[8], x[0] = rows[0], rows[2]
    np.testing.assert_array_equal(placed, x)
    for sequence, slot in enumerate(slots):
        part = slice(offsets[sequence], offsets[sequence + 1])
        for head in range(VALUE_HEADS):
            memory, read = _remembered(
                memories[slot, head], step[part], decay[part], beta[part], head
            )
            found = remembered.reshape(8, VALUE_HEADS, VALUE_DIM)[part, head]
            np.testing.assert_allclose(found, read, atol=1e-5)
            np.testing.assert_allclose(pool[slot, head], memory, atol=1e-5)
