"""Weights are made in the background, each source once, and waited for where they are taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import REFERENCE, plan_for
from max.dtype import DType
from max.graph import DeviceRef

from builder.shared import Shared
from models.weights import DeclaredWeight, FromCheckpoint, Piece, WeightLoader


class Held:
    """Gives tensors of one row once it is let, says at once which is absent, and counts."""

    keeps = False

    def __init__(self) -> None:
        self.let = threading.Event()
        self.asked: list[str] = []

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        self.asked.append(name)
        if name == "absent":
            raise KeyError(name)
        assert self.let.wait(60)
        return np.arange(12, dtype=np.float32).reshape(4, 3)[rows]

    def read_stored(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        raise AssertionError(f"{name}[{rows}] is converted")


@pytest.fixture
def held() -> Iterator[Held]:
    reader = Held()
    yield reader
    # The threads that wait are let go.
    reader.let.set()


def _weight(tensor: str, holder: int = 0) -> DeclaredWeight:
    source = FromCheckpoint((Piece(tensor, rows=(1, 3), columns=(0, 2)),))
    return DeclaredWeight("w", DType.float32, (2, 2), DeviceRef.CPU(), source, holder)


def test_loader_makes_the_values_of_one_source_once(held: Held) -> None:
    held.let.set()
    made = WeightLoader(held).load({"a": _weight("t"), "b": _weight("t", holder=1)})
    np.testing.assert_array_equal(made["a"], [[3, 4], [6, 7]])
    assert made["a"] is made["b"]
    assert held.asked == ["t"]


def test_loading_waits_only_where_a_value_is_taken(held: Held) -> None:
    loader = WeightLoader(held)
    loader.begin([_weight("t")])
    made = loader.load({"a": _weight("t"), "b": _weight("u")})
    assert set(made) == {"a", "b"}
    held.let.set()
    np.testing.assert_array_equal(made["b"], [[3, 4], [6, 7]])
    assert sorted(held.asked) == ["t", "u"]


def test_what_reading_raises_is_raised_where_the_value_is_taken(held: Held) -> None:
    held.let.set()
    made = WeightLoader(held).load({"a": _weight("t"), "b": _weight("absent")})
    assert made["a"].shape == (2, 2)
    with pytest.raises(KeyError, match="absent"):
        made["b"]


def test_waiting_for_all_raises_what_reading_raised_and_reads_nothing_more(held: Held) -> None:
    loader = WeightLoader(held)
    loader.begin([_weight("absent"), *(_weight(str(number)) for number in range(1000))])
    with pytest.raises(KeyError, match="absent"):
        loader.wait()
    held.let.set()
    assert len(held.asked) < 900


def test_a_loader_that_is_stopped_reads_nothing_more(held: Held) -> None:
    loader = WeightLoader(held)
    loader.begin([_weight(str(number)) for number in range(1000)])
    loader.stop()
    held.let.set()
    # A value that it left is made when it is asked for.
    made = loader.load({"a": _weight("999")})
    np.testing.assert_array_equal(made["a"], [[3, 4], [6, 7]])
    assert len(held.asked) < 900


def test_every_tensor_of_a_plan_is_begun_before_anything_is_built() -> None:
    shared = Shared(several=False)
    checkpoint = shared.checkpoint(REFERENCE / "tiny_idefics3")
    plan = plan_for("model=tiny_idefics3", "deployment=vision", checkpoint=checkpoint)
    with shared.weights(plan) as weights:
        begun = {piece.tensor for source, *_ in weights._made for piece in source.pieces}
    assert begun == set(checkpoint.tensors)


def test_a_build_that_fails_reads_nothing_more() -> None:
    shared = Shared(several=False)
    checkpoint = shared.checkpoint(REFERENCE / "tiny_llama")
    plan = plan_for("model=tiny_llama", checkpoint=checkpoint)
    with pytest.raises(ZeroDivisionError), shared.weights(plan) as weights:
        raise ZeroDivisionError
    assert all(value.done() or value.running() for value in weights._made.values())
