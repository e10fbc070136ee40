"""Rotary frequencies match Hugging Face's for each way of stretching them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import REFERENCE
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from builder.compile import process_session
from models.errors import ConfigError
from models.families.base import ConfigReader, rope_settings
from models.layers.rope import inverse_frequencies, rope_table, rotate_first, rotate_last
from models.settings import RopeSettings

CPU = DeviceRef.CPU()
CASES = json.loads((REFERENCE / "rope.json").read_text())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["transformers 5", "transformers 4"])
def test_frequencies_match_hugging_face(name: str, layout: str) -> None:
    parameters = dict(CASES[name]["rope_parameters"])
    if layout == "transformers 5":
        config = {"rope_parameters": parameters}
    else:
        theta = parameters.pop("rope_theta")
        parameters["type"] = parameters.pop("rope_type")
        config = {"rope_theta": theta, "rope_scaling": parameters}
    settings = rope_settings(ConfigReader(config, "config.json"), 131072)
    found = inverse_frequencies(settings, 64)
    np.testing.assert_allclose(found, CASES[name]["inverse_frequencies"], rtol=2e-6)
    assert settings.attention_factor == pytest.approx(CASES[name]["attention_factor"])


def test_table_holds_cosine_and_sine_of_each_angle() -> None:
    table = rope_table(RopeSettings(theta=100.0, attention_factor=2.0), 4, 3)
    # Frequencies 1 and 100^(-1/2) = 0.1; position 2.
    wanted = [np.cos(2.0), np.sin(2.0), np.cos(0.2), np.sin(0.2)]
    np.testing.assert_allclose(table[2], 2 * np.array(wanted), rtol=1e-6)
    assert table.dtype == np.float32
    assert table.shape == (3, 4)


def test_unknown_stretch_is_refused_by_name() -> None:
    reader = ConfigReader({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "config.json")
    with pytest.raises(ConfigError, match="'dynamic' is not one of default, linear, llama3, yarn"):
        rope_settings(reader, 2048)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is no object"),
        ({"rope_theta": "abc"}, "rope_theta: 'abc' is not a number"),
        ({"rope_theta": 0}, "rope_theta: 0 is not a number above 0"),
        ({"rope_scaling": {"type": "linear"}}, "factor: missing"),
        ({"rope_scaling": {"type": "llama3", "factor": "x"}}, "factor: 'x' is not a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "per layer type"),
    ],
)
def test_malformed_rotary_settings_name_the_key(config: dict, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rope_settings(ConfigReader(config, "config.json"), 2048)
    assert wanted in str(caught.value)


def test_scaling_given_by_hand_wins_over_saved_parameters() -> None:
    config = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    }
    settings = rope_settings(ConfigReader(config, "config.json"), 2048)
    assert (settings.rope_type, settings.factor, settings.theta) == ("linear", 2.0, 500.0)


def test_last_dimensions_of_a_head_are_rotated() -> None:
    heads, width, rotated, first, tokens = 3, 16, 6, 4, 5
    types = [
        TensorType(DType.float32, ["tokens", heads, width], CPU),
        TensorType(DType.uint32, ["offsets"], CPU),
        TensorType(DType.uint32, ["sequences"], CPU),
        TensorType(DType.float32, ["positions", rotated], CPU),
    ]
    with Graph("rotate", input_types=types) as graph:
        values = [value.tensor for value in graph.inputs]
        graph.output(rotate_last(*values, True), rotate_last(*values, False), rotate_first(*values))
    x = np.random.default_rng(0).standard_normal((tokens, heads, width), np.float32)
    table = rope_table(RopeSettings(theta=10000.0), rotated, 32)
    inputs = (x, np.array([0, tokens], np.uint32), np.array([first], np.uint32), table)
    outputs = process_session().load(graph).execute(*map(Buffer.from_numpy, inputs))
    pairs, halves, first_halves = (output.to_numpy() for output in outputs)
    cos, sin = (table[first : first + tokens, None, at::2] for at in (0, 1))

    def turned(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return a * cos - b * sin, b * cos + a * sin

    kept, last = x[..., :-rotated], x[..., -rotated:]
    together = np.stack(turned(last[..., 0::2], last[..., 1::2]), -1).reshape(last.shape)
    np.testing.assert_allclose(pairs, np.concatenate([kept, together], -1), atol=1e-6)
    apart = np.concatenate(turned(*np.split(last, 2, axis=-1)), -1)
    np.testing.assert_allclose(halves, np.concatenate([kept, apart], -1), atol=1e-6)
    begin, behind = x[..., :rotated], x[..., rotated:]
    apart = np.concatenate(turned(*np.split(begin, 2, axis=-1)), -1)
    np.testing.assert_allclose(first_halves, np.concatenate([apart, behind], -1), atol=1e-6)
