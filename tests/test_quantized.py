"""Products with quantized and 16 bit weights are those with what the weights stand for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import gguf
import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import Model
from max.graph import DeviceRef, Graph, TensorType

from builder.compile import process_session
from models.arena import Arena
from models.kernels import Matrix, kernel_library, matmul
from models.storage import EXACT_STORAGES, STORAGES, Blocks

CPU = DeviceRef.CPU()
OURS = [name for name, storage in STORAGES.items() if isinstance(storage, Blocks)]

# Outputs that are no multiple of a panel's 16, on one thread and, from 2**17 products on, on all;
# and more than the 18 blocks that are unpacked at once.
CASES = [(name, *shape) for name in OURS for shape in ((37, 96), (421, 640))]
WIDTHS = sorted({columns for _, _, columns in CASES})

# What a row gathers: the first and the last of a panel, in any order, and the last of all.
GATHERED = np.array([36, 0, 15, 16, 0, 31], np.int64)


@cache
def _stored(encoding: str, rows: int, columns: int) -> np.ndarray:
    """Random rows as a file has them, uint8 [rows, bytes]."""
    kind = gguf.GGMLQuantizationType[encoding]
    generator = np.random.default_rng(rows)
    return gguf.quantize(generator.standard_normal((rows, columns), np.float32), kind)


@cache
def _values(encoding: str, rows: int, columns: int) -> np.ndarray:
    """What these rows stand for."""
    kind = gguf.GGMLQuantizationType[encoding]
    return gguf.dequantize(_stored(encoding, rows, columns), kind).astype(np.float64)


@cache
def _products() -> tuple[Model, list[Buffer]]:
    """Both products with every matrix, and rows that are gathered from it."""
    packed, types = [], []
    for encoding, rows, columns in CASES:
        storage = STORAGES[encoding]
        blocks = _stored(encoding, rows, columns).reshape(rows, -1, storage.block_bytes)
        packed.append(Buffer.from_numpy(storage.pack(blocks, Arena())))
        types.append(storage.type(rows, columns, CPU))
    types += [TensorType(DType.float32, ["tokens", columns], CPU) for columns in WIDTHS]
    types.append(TensorType(DType.int64, ["gathered"], CPU))
    with Graph("quantized", input_types=types, custom_extensions=[kernel_library()]) as graph:
        *inputs, at = (value.tensor for value in graph.inputs)
        x = dict(zip(WIDTHS, inputs[len(CASES) :], strict=True))
        rounding, exact = (
            [
                Matrix(values, rows, columns, kept[encoding])
                for values, (encoding, rows, columns) in zip(inputs, CASES, strict=False)
            ]
            for kept in (STORAGES, EXACT_STORAGES)
        )
        graph.output(
            *(matrix.product(x[matrix.columns]) for matrix in (*rounding, *exact)),
            *(matrix.gather(at) for matrix in exact),
        )
    return process_session().load(graph), packed


def _run(x: dict[int, np.ndarray], weights: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
    """All products with the matrices, or with others that are packed alike."""
    model, packed = _products()
    if weights is not None:
        packed = [Buffer.from_numpy(values) for values in weights]
    buffers = [Buffer.from_numpy(Arena().place(x[columns])) for columns in WIDTHS]
    return [o.to_numpy() for o in model.execute(*packed, *buffers, Buffer.from_numpy(GATHERED))]


@cache
def _random(tokens: int) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
    """Activations whose blocks are of very different sizes, and all products with them."""
    generator = np.random.default_rng(tokens)
    x = {}
    for columns in WIDTHS:
        sizes = np.repeat(10.0 ** generator.integers(-3, 3, (tokens, columns // 32)), 32, axis=1)
        x[columns] = (sizes * generator.standard_normal((tokens, columns))).astype(np.float32)
    return x, _run(x)


# A tile's rows, one by one, and panels, on which the last outputs are none's.
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 13, 33])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_that_does_not_round_activations_is_numpys(
    case: tuple[str, int, int], tokens: int
) -> None:
    every, outputs = _random(tokens)
    x, values = every[case[2]].astype(np.float64), _values(*case)
    found = outputs[len(CASES) + CASES.index(case)]
    assert found.shape == (tokens, case[1])
    error = np.abs(found - x @ values.T)
    # Float32 sums: each term and each addition is off by one in 2**24.
    assert (error <= 1e-6 * (np.abs(x) @ np.abs(values).T)).all()


# Tiles of 8 and 4 rows, and single ones; unpacked from 12 on, in blocks of 64.
@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 11, 13, 83])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_is_off_by_the_rounding_of_activations_to_8_bits(
    case: tuple[str, int, int], tokens: int
) -> None:
    encoding, _, columns = case
    every, outputs = _random(tokens)
    x, found = every[columns].astype(np.float64), outputs[CASES.index(case)]
    values = _values(*case)
    # Half of one of 127 steps to the largest of a block, for each of its weights.
    block = STORAGES[encoding].block
    steps = np.abs(x).reshape(tokens, -1, block).max(-1) / 127
    weights = np.abs(values).reshape(len(values), -1, block).sum(-1)
    rounding = np.abs(x) @ np.abs(values).T * 1e-6
    bound = 0.5 * steps @ weights.T + rounding
    assert found.shape == bound.shape
    assert (np.abs(found - x @ values.T) <= bound).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_has_the_same_product_whatever_rows_are_beside_it(case: tuple[str, int, int]) -> None:
    x, together = _random(83)
    at = CASES.index(case)
    for row in (0, 17, 63, 64, 82):
        alone = _run({columns: x[columns][row : row + 1] for columns in WIDTHS})
        np.testing.assert_array_equal(alone[at][0], together[at][row])


@pytest.mark.parametrize("tokens", [1, 16])
def test_the_largest_integers_are_summed_without_loss(tokens: int) -> None:
    """Sums of 16 bits, where a kernel has these, hold a block of 15 times 127, or -127."""
    x = {columns: np.full((tokens, columns), 127, np.float32) for columns in WIDTHS}
    for values in x.values():
        values[:, 32:] *= -1
    stored = {}
    for case in CASES:
        encoding, rows, columns = case
        storage = STORAGES[encoding]
        blocks = np.full((rows, columns // 32, storage.block_bytes), 0xFF, np.uint8)
        # The scale, and the minimum where there is one: 1.
        scales = 2 if encoding == "Q4_1" else 1
        blocks[..., : 2 * scales] = np.ones(scales, np.float16).view(np.uint8)
        if encoding == "Q8_0":
            blocks[..., 2:] = 127
        stored[case] = blocks
    found = _run(x, [STORAGES[case[0]].pack(blocks, Arena()) for case, blocks in stored.items()])
    for case, blocks in stored.items():
        kind = gguf.GGMLQuantizationType[case[0]]
        values = gguf.dequantize(blocks.reshape(case[1], -1), kind).astype(np.float64)
        wanted = x[case[2]].astype(np.float64) @ values.T
        np.testing.assert_allclose(found[CASES.index(case)], wanted, rtol=1e-6)


@cache
def _whole() -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
    """Activations that 8 bits hold: whole numbers, the largest of each block 127."""
    generator = np.random.default_rng(0)
    x = {}
    for columns in WIDTHS:
        blocks = generator.integers(-127, 128, (5, columns // 32, 32)).astype(np.float32)
        blocks[..., 3] = 127
        x[columns] = blocks.reshape(5, columns)
    return x, _run(x)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_with_activations_of_8_bits_is_exact(case: tuple[str, int, int]) -> None:
    every, outputs = _whole()
    x, values = every[case[2]].astype(np.float64), _values(*case)
    error = np.abs(outputs[CASES.index(case)] - x @ values.T)
    assert (error <= 1e-5 * (np.abs(x) @ np.abs(values).T)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_are_gathered_are_what_the_weights_stand_for(
    case: tuple[str, int, int],
) -> None:
    gathered = dict(zip(CASES, _whole()[1][2 * len(CASES) :], strict=True))
    # Bit by bit: a scale of float16 times an integer is exact.
    np.testing.assert_array_equal(gathered[case], _values(*case)[GATHERED])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_are_not_hidden(wrong: float) -> None:
    x = {columns: np.ones((3, columns), np.float32) for columns in WIDTHS}
    for values in x.values():
        values[1, 40] = wrong
    for case, found in zip(CASES, _run(x), strict=False):
        assert np.isnan(found[1]).all(), case
        assert np.isfinite(found[[0, 2]]).all(), case
    for case, found in zip(CASES, _run(x)[len(CASES) :], strict=False):
        assert not np.isfinite(found[1]).any(), case
        assert np.isfinite(found[[0, 2]]).all(), case


HALVES = (DType.bfloat16, DType.float16)


@cache
def _halves() -> Model:
    types = [TensorType(DType.float32, ["m", "k"], CPU)]
    types += [TensorType(dtype, ["n", "k"], CPU) for dtype in HALVES]
    with Graph("halves", input_types=types, custom_extensions=[kernel_library()]) as graph:
        x, *weights = (value.tensor for value in graph.inputs)
        graph.output(*(matmul(x, weight) for weight in weights))
    return process_session().load(graph)


# Few rows are streamed over, from 4 on they are tiles, and from 12 on panels.
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 11, 12, 33])
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (3, 17), (37, 51), (961, 575)])
def test_matmul_with_16_bit_weights_is_numpys(rows: int, columns: int, inner: int) -> None:
    generator = np.random.default_rng(rows + columns)
    x = generator.standard_normal((rows, inner), np.float32)
    weight = generator.standard_normal((columns, inner), np.float32)
    upper = (weight.view(np.uint32) >> 16).astype(np.uint16)
    half = weight.astype(np.float16)
    buffers = [
        Buffer.from_numpy(bits).view(dtype, bits.shape)
        for bits, dtype in zip((upper, half.view(np.uint16)), HALVES, strict=True)
    ]
    outputs = _halves().execute(Buffer.from_numpy(x), *buffers)
    widened = ((upper.astype(np.uint32) << 16).view(np.float32), half)
    for found, values in zip(outputs, widened, strict=True):
        wanted = x.astype(np.float64) @ values.astype(np.float64).T
        np.testing.assert_allclose(found.to_numpy(), wanted, atol=1e-5 * inner**0.5)
