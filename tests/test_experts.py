"""Mixtures of experts: the layer, expert parallelism, and the exchange between devices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import (
    TOGETHER,
    assert_refused,
    compiled_for,
    expected,
    forced_logits,
    load_together,
    plan_for,
)
from max import tree
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType
from test_parallel import LENGTHS, STEPS, TOKENS_PER_STEP, assert_equal, compared

from builder.compare import compare, random_prompts, record
from builder.compile import process_session
from models.collectives import collectives_for
from models.config import DecoderConfig
from models.exchange.host import HostExchange, HostExchangeBuffers, exchange_types
from models.kernels import kernel_library
from models.layers.experts import MixtureOfExperts
from models.placement import Placement
from models.registration_graph_api import GraphApiDecoderPipelineModel
from models.weights import DeclaredWeight, WeightLoader, declared_weights

MODEL = "model=tiny_deepseek_v3"
EXPERT_PARALLEL = ("ep2", "ep2_tp2", "ep4_dp4")
(EXPERT_GROUP,) = (group for group in TOGETHER if (MODEL, "deployment=ep2") in group)
CPU = DeviceRef.CPU()


@pytest.fixture(params=EXPERT_PARALLEL)
def deployment(request: pytest.FixtureRequest) -> str:
    return f"deployment={request.param}"


def test_logits_equal_the_plain_deployments_in_a_chunked_mixed_batch(deployment: str) -> None:
    assert_equal(compared(deployment, LENGTHS, MODEL))


def test_one_sequence_leaves_the_other_replicas_empty(deployment: str) -> None:
    assert_equal(compared(deployment, [70], MODEL))


def test_logits_match_hugging_face(deployment: str) -> None:
    values = expected("tiny_deepseek_v3")
    sequences = [(values[f"prompt_{i}"], values[f"forced_{i}"]) for i in range(4)]
    found = forced_logits(compiled_for(MODEL, deployment), sequences)
    for i in range(4):
        np.testing.assert_allclose(found[i], values[f"logits_{i}"], atol=1e-4, rtol=0)


ADDED = {
    "ep2": {"signals", "ep"},
    "ep2_tp2": {"signals", "ep"},
    "ep4_dp4": {"signals", "ep", "host_input_row_offsets", "data_parallel_splits"},
}


@pytest.mark.parametrize("name", EXPERT_PARALLEL)
def test_contract_adds_the_exchange_in_its_own_tree(name: str) -> None:
    (stage,) = plan_for("model=tiny_mixtral", f"deployment={name}").stages
    present = {field.name for field in stage.contract.fields if field.present}
    assert present == {"tokens", "input_row_offsets", "return_n_logits", "kv"} | ADDED[name]
    exchange = HostExchangeBuffers([stage.config])
    assert stage.contract.inputs.ep == exchange.input_tree()
    exchange.initialize(process_session())
    types, structure = tree.flatten(exchange.input_tree())
    buffers, allocated = tree.flatten(exchange.model_inputs())
    assert allocated == structure
    for buffer, wanted in zip(buffers, types, strict=True):
        assert buffer.dtype == wanted.dtype
        assert list(buffer.shape) == [int(dim) for dim in wanted.shape]


def test_experts_without_expert_parallelism_need_no_exchange() -> None:
    for name in ("cpu", "tp2", "dp2", "pp2"):
        for stage in plan_for("model=tiny_mixtral", f"deployment={name}").stages:
            assert stage.contract.inputs.ep is None


def test_placement_of_experts_and_their_columns() -> None:
    def held(name: str) -> list[tuple[range, range]]:
        shares = plan_for("model=tiny_mixtral", f"deployment={name}").devices
        return [(share.experts, share.expert_columns) for share in shares]

    whole = range(32)
    assert held("cpu") == [(range(8), whole)]
    assert held("tp2") == [(range(8), range(16)), (range(8), range(16, 32))]
    assert held("dp2") == [(range(8), whole)] * 2
    assert held("ep2") == [(range(4), whole), (range(4, 8), whole)]
    assert held("ep2_tp2") == held("ep2")
    assert held("ep4_dp4") == [(range(i, i + 2), whole) for i in (0, 2, 4, 6)]


REFUSED = {
    "experts": (
        ["model=tiny_mixtral", "deployment.parallel.expert=3", "deployment.devices.count=3"],
        "8 experts do not divide over expert=3\n  what works: deployment.parallel.expert=1 or 2",
    ),
    "dense": (["model=tiny_llama", "deployment=ep2"], "llama is dense"),
    "devices": (
        ["model=tiny_mixtral", "deployment=ep2", "deployment.devices.count=4"],
        "4, but expert=2 x pipeline=1 = 2",
    ),
    "some of the devices": (
        ["model=tiny_mixtral", "deployment=tp4", "deployment.parallel.expert=2"],
        "tensor=4 x data=1 = 4 devices: experts are divided over all devices of a stage",
    ),
    "columns of an expert": (
        ["model=tiny_olmoe", "deployment.parallel.tensor=32", "deployment.devices.count=32"],
        "4 heads do not divide over tensor=32",
    ),
    "heads with latents": (
        [MODEL, "deployment.parallel.tensor=8", "deployment.devices.count=8"],
        "4 heads do not divide over tensor=8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_with_the_arithmetic(name: str) -> None:
    assert_refused(*REFUSED[name])


def test_exchange_is_set_up_before_graphs_load(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for(MODEL, "deployment=ep2")
    happened: list[tuple[str, InferenceSession | None]] = []
    initialize = HostExchangeBuffers.initialize
    graph_specs = GraphApiDecoderPipelineModel.graph_specs

    def initialized(self: HostExchangeBuffers, session: InferenceSession) -> None:
        happened.append(("exchange", session))
        initialize(self, session)

    def specified(self: GraphApiDecoderPipelineModel, model_config: object) -> object:
        happened.append(("graphs", None))
        return graph_specs(self, model_config)

    monkeypatch.setattr(HostExchangeBuffers, "initialize", initialized)
    monkeypatch.setattr(GraphApiDecoderPipelineModel, "graph_specs", specified)
    load_together(EXPERT_GROUP)
    # The plain deployment has no exchange.
    each = [("exchange", process_session()), ("graphs", None)]
    assert happened == [("graphs", None), *each * len(EXPERT_PARALLEL)]


def test_every_token_to_the_last_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WeightLoader.load

    def load(self: WeightLoader, weights: dict[str, DeclaredWeight]) -> dict[str, np.ndarray]:
        made = dict(original(self, weights))
        for name, values in made.items():
            if name.endswith("correction_bias"):
                # It is for the choice only: every token takes the four last experts.
                made[name] = np.where(np.arange(8) < 4, 0, 9).astype(values.dtype)
        return made

    prompts = random_prompts(LENGTHS, 256)
    usual, _ = record(compiled_for(MODEL, "deployment=cpu"), prompts, STEPS, TOKENS_PER_STEP)
    monkeypatch.setattr(WeightLoader, "load", load)
    compiled = load_together(EXPERT_GROUP)
    plain = compiled.pop((MODEL, "deployment=cpu"))
    assert plain.cache_hit
    ids, wanted = record(plain, prompts, STEPS, TOKENS_PER_STEP)
    assert ids != usual
    assert len(compiled) == len(EXPERT_PARALLEL)
    for deployed in compiled.values():
        _, found = record(deployed, prompts, STEPS, TOKENS_PER_STEP, forced=ids)
        assert_equal(compare(wanted, found))


# The layer alone, with one choice per token and a router that the first dimensions of x drive.

HIDDEN, INNER, NUM_EXPERTS, MAX_TOKENS = 12, 5, 8, 16
PLACEMENTS = {
    "data": Placement(devices=(CPU,) * 4, data=4, expert=4, layers=range(1)),
    "experts alone": Placement(devices=(CPU,) * 2, expert=2, layers=range(1)),
}


def _layer_config(placement: Placement) -> DecoderConfig:
    config = plan_for("model=tiny_mixtral").stages[0].config
    assert config.settings.experts is not None
    experts = replace(config.settings.experts, top_k=1, intermediate_size=INNER)
    settings = replace(config.settings, hidden_size=HIDDEN, experts=experts)
    return replace(config, settings=settings, placement=placement)


class _Random:
    """A checkpoint of random values whose router reads the first dimensions."""

    keeps = False

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        if name.endswith("gate.weight"):
            return np.eye(NUM_EXPERTS, HIDDEN, dtype=np.float32)
        shape = (HIDDEN, INNER) if ".down_proj." in name else (INNER, HIDDEN)
        generator = np.random.default_rng(sum(map(ord, name)))
        return generator.standard_normal(shape, np.float32)[rows]


@cache
def _layer(name: str) -> Model:
    placement = PLACEMENTS[name]
    config = _layer_config(placement)
    experts = config.settings.experts
    assert experts is not None
    layer = MixtureOfExperts(config, experts, 0)
    weights = declared_weights(layer)
    dims = [f"replica_{replica}" for replica in range(placement.data)]
    total = TensorType(DType.int64, ["total_seq_len"], CPU)
    xs = [TensorType(DType.float32, [dim, HIDDEN], CPU) for dim in dims]
    buffers = exchange_types(experts, placement, HIDDEN, MAX_TOKENS)
    flat, structure = tree.flatten(buffers)
    with Graph(
        "layer", input_types=[total, *xs, *flat], custom_extensions=[kernel_library()]
    ) as graph:
        values = [value.tensor for value in graph.inputs[1 : 1 + len(xs)]]
        received = tree.unflatten(structure, [v.buffer for v in graph.inputs[1 + len(xs) :]])
        devices = [values[placement.replica(d)] for d in range(len(placement.devices))]
        found = layer(
            devices,
            collectives_for(placement, None),
            HostExchange(experts, placement, received),
        )
        graph.output(*(found[first] for first in placement.firsts))
    values = dict(WeightLoader(_Random()).load(weights))
    return process_session().load(graph, weights_registry=values)


def _routed(name: str, per_replica: list[np.ndarray]) -> list[np.ndarray]:
    placement = PLACEMENTS[name]
    experts = _layer_config(placement).settings.experts
    assert experts is not None
    types = tree.leaves(exchange_types(experts, placement, HIDDEN, MAX_TOKENS))
    # What was in the buffers before does not matter.
    garbage = {DType.float32: np.nan, DType.int32: 10**6}
    buffers = [
        np.full([int(d) for d in t.shape], garbage[t.dtype], t.dtype.to_numpy()) for t in types
    ]
    total = np.zeros(sum(map(len, per_replica)), np.int64)
    inputs = [Buffer.from_numpy(a) for a in (total, *per_replica, *buffers)]
    return [found.to_numpy() for found in _layer(name).execute(*inputs)]


def _wanted(x: np.ndarray) -> np.ndarray:
    reader, rows = _Random(), []
    for row in x:
        expert = int(row[:NUM_EXPERTS].argmax())
        names = (f"layers.0.mlp.experts.{expert}.{w}.weight" for w in ("gate_proj", "up_proj"))
        gate, up = (reader.read(name) @ row for name in names)
        down = reader.read(f"layers.0.mlp.experts.{expert}.down_proj.weight")
        # One choice, normalised: its weight is 1.
        rows.append(down @ (gate / (1 + np.exp(-gate)) * up))
    return np.stack(rows) if rows else np.zeros_like(x)


@pytest.mark.parametrize("to", [None, 0, NUM_EXPERTS - 1])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_token_is_lost_however_uneven_the_routing(name: str, to: int | None) -> None:
    generator = np.random.default_rng(0)
    counts = [MAX_TOKENS, 0, 7, 1][: PLACEMENTS[name].data]
    per_replica = [generator.standard_normal((n, HIDDEN), np.float32) for n in counts]
    if to is not None:
        for x in per_replica:
            x[:, to] = 9
    for found, x in zip(_routed(name, per_replica), per_replica, strict=True):
        np.testing.assert_allclose(found, _wanted(x), atol=1e-4)


def test_more_tokens_than_the_exchange_holds_is_an_error() -> None:
    x = np.ones((MAX_TOKENS + 1, HIDDEN), np.float32)
    with pytest.raises(ValueError, match="17 tokens do not fit the 16 rows"):
        _routed("experts alone", [x])
