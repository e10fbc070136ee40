"""What fits into accelerators: published models, checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import assert_refused, plan_for
from published import DEEPSEEK_V3, LLAMA_31_70B, QWEN3_30B_A3B, published

from builder.capacity import Capacity
from models.errors import ConfigError

MIB = 2**20
H100, B200 = 81559 * MIB, 183359 * MIB
"""What nvidia-smi reports."""

SIGNALS = 294387728
"""The size of a signal buffer of MAX 26.7."""

CONTEXT = 8192
PAGES = CONTEXT // 128
PAGE = 128


def largest(total: Callable[[int], int], memory: int) -> int:
    """The most sequences whose sum is at most nine tenths of the memory."""
    batch = 0
    while total(batch + 1) <= memory * 9 // 10:
        batch += 1
    return batch


def capacity(folder: Path, config: dict[str, object], batch: int, *more: str) -> Capacity:
    limits = (
        f"deployment.max_length={CONTEXT}",
        f"deployment.batch.max_batch_size={batch}",
    )
    found = published(folder, config, *more, *limits).capacity
    assert found is not None
    return found


def llama_70b(devices: int) -> Callable[[int], int]:
    """Bytes of one of so many devices that share Llama-3.1-70B's layers."""
    hidden, inner, layers, vocabulary = 8192, 28672, 80, 128256
    attention = 2 * hidden * 64 * 128 + 2 * hidden * 8 * 128
    divided = layers * (attention + 3 * hidden * inner) + 2 * vocabulary * hidden
    norms = (2 * layers + 1) * hidden
    rotations = 4 * CONTEXT * 128
    weights = 2 * (divided // devices + norms) + rotations
    page = PAGE * 2 * layers * 8 * 128 * 2 // devices
    feed_forward = 512 * (hidden + 2 * inner // devices) * 2

    def total(batch: int) -> int:
        # The feed-forward of a step's tokens, or the logits of its sequences.
        activations = max(feed_forward, batch * vocabulary * 4)
        return weights + SIGNALS + activations + (batch * PAGES + 1) * page

    return total


@pytest.mark.parametrize(("devices", "batch"), [(2, 4), (4, 61)])
def test_llama_31_70b_on_h100(tmp_path: Path, devices: int, batch: int) -> None:
    total = llama_70b(devices)
    assert largest(total, H100) == batch
    split = (
        "deployment=h100_x2_tp2",
        f"deployment.devices.count={devices}",
        f"deployment.parallel.tensor={devices}",
    )
    found = capacity(tmp_path, LLAMA_31_70B, batch, *split)
    assert (found.needed, found.largest_batch) == (total(batch), batch)
    with pytest.raises(ConfigError) as caught:
        capacity(tmp_path, LLAMA_31_70B, batch + 1, *split)
    assert f"{total(batch + 1) / 2**30:.2f} GiB" in str(caught.value)
    assert f"deployment.batch.max_batch_size={batch}" in str(caught.value)


def test_qwen3_30b_a3b_on_one_h100(tmp_path: Path) -> None:
    hidden, layers, vocabulary = 2048, 48, 151936
    attention = 2 * hidden * 32 * 128 + 2 * hidden * 4 * 128 + 2 * 128
    experts, router = 128 * 3 * hidden * 768, 128 * hidden
    layer = attention + experts + 2 * hidden
    # The router is computed in float32.
    weights = 2 * (layers * layer + hidden + 2 * vocabulary * hidden) + 4 * layers * router
    rotations = 4 * CONTEXT * 128
    page = PAGE * 2 * layers * 4 * 128 * 2
    # Eight experts of each of a step's tokens: what goes in, and the gate and what it gates.
    activations = 512 * 8 * (hidden + 2 * 768) * 2

    def total(batch: int) -> int:
        return weights + rotations + activations + (batch * PAGES + 1) * page

    assert largest(total, H100) == 19
    found = capacity(tmp_path, QWEN3_30B_A3B, 19, "deployment=h100_x1")
    assert (found.needed, found.largest_batch) == (total(19), 19)


def deepseek_v3(attention_parts: int) -> Callable[[int], int]:
    """Bytes of the first of eight devices of DeepSeek-V3, whose experts they divide."""
    hidden, heads, layers, sparse, vocabulary = 7168, 128, 61, 58, 129280
    divided = heads * 192 * 1536 + heads * 256 * 512 + hidden * heads * 128
    compressed = 1536 * hidden + 1536 + 576 * hidden + 512
    expert, dense = 3 * hidden * 2048, 3 * hidden * 18432
    # One shared expert in each sparse layer.
    shared = (layers * divided + 3 * dense + sparse * expert) // attention_parts
    norms = (2 * layers + 1) * hidden
    whole = layers * compressed + shared + norms + sparse * 32 * expert
    tables = 2 * vocabulary * hidden // attention_parts
    router = sparse * (256 * hidden + 256)
    weights = 2 * (whole + tables) + 4 * router + 4 * CONTEXT * 64
    page = PAGE * layers * (512 + 64) * 2
    # A device sends 64 of a step's 512 tokens: what it sends, receives for each expert, and gets
    # back of eight choices; two groups of that, and of counters.
    token = 2 * hidden
    exchange = 2 * (64 * token + 256 * 64 * token + 8 * 64 * token + 4 * (10 * 256 + 320))
    # Eight choices of each device's 64 tokens may all be experts of one.
    experts = 8 * 8 * 64 * (hidden + 2 * 2048) * 2

    def total(batch: int) -> int:
        # Prefill makes keys and values of all latents.
        unpacked = batch * CONTEXT * (heads // attention_parts) * (128 + 128) * 2
        return weights + SIGNALS + exchange + max(experts, unpacked) + (batch * PAGES + 1) * page

    return total


def test_deepseek_v3_in_bfloat16_fits_eight_b200_only_where_attention_is_divided_too(
    tmp_path: Path,
) -> None:
    whole, divided = deepseek_v3(1), deepseek_v3(8)
    # 1.3 TB of experts over eight devices are 164 GB each; the attention of all layers is 23 GB.
    assert largest(whole, B200) == 0
    with pytest.raises(ConfigError) as caught:
        capacity(tmp_path, DEEPSEEK_V3, 1, "deployment=b200_x8_ep8")
    assert f"{whole(1) / 2**30:.2f} GiB" in str(caught.value)
    assert "more devices" in str(caught.value)
    batch = 3
    assert largest(divided, B200) == batch
    found = capacity(tmp_path, DEEPSEEK_V3, batch, "deployment=b200_x8_ep8_tp8")
    assert (found.needed, found.largest_batch) == (divided(batch), batch)


def test_largest_length_is_the_last_whole_page_that_fits(tmp_path: Path) -> None:
    split = ("deployment=h100_x2_tp2", "deployment.batch.max_batch_size=4")
    found = published(tmp_path, LLAMA_31_70B, *split).capacity
    assert found is not None
    longest = found.largest_length
    assert longest >= CONTEXT
    limit = f"deployment.max_length={longest}"
    assert published(tmp_path, LLAMA_31_70B, *split, limit).capacity
    with pytest.raises(ConfigError, match="needs"):
        published(tmp_path, LLAMA_31_70B, *split, f"deployment.max_length={longest + PAGE}")


MISTAKES = {
    "accelerators on the CPU": (
        ["deployment.devices.accelerator=h100"],
        "deployment.devices.accelerator: h100, but the devices are the CPU",
    ),
    "an accelerator that is not known": (
        ["deployment=h100_x1", "deployment.devices.accelerator=h900"],
        "what works: a100, h100, h200",
    ),
    "no accelerator": (
        ["deployment.devices.kind=virtual"],
        "deployment.devices.api: missing",
    ),
    "no memory": (
        [
            *("deployment.devices.kind=gpu", "deployment.devices.api=cuda"),
            "deployment.devices.arch=sm_80",
        ],
        "deployment.devices.memory_gib: missing",
    ),
    "a target that MAX has not": (
        ["deployment=h100_x1", "deployment.devices.arch=sm_12"],
        "api=cuda with arch=sm_12 is no target",
    ),
    "more memory than there is": (
        ["deployment=h100_x1", "deployment.devices.memory_utilization=1.5"],
        "memory_utilization: 1.5 is not between 0 and 1",
    ),
    "memory that is no number": (
        ["deployment=h100_x1", "deployment.devices.memory_gib=nan"],
        "deployment.devices.memory_gib: nan is not a number above 0",
    ),
    "no memory at all": (
        ["deployment=h100_x1", "deployment.devices.memory_gib=0"],
        "deployment.devices.memory_gib: 0.0 is not a number above 0",
    ),
    "more than the collectives reach": (
        [
            *("deployment=h100_x2_dp2", "deployment.devices.count=16"),
            "deployment.parallel.data=16",
        ],
        "deployment.parallel.data: 16 accelerators in a stage",
    ),
    "an encoding of the CPU's": (
        ["deployment=h100_x1", "model.encoding=float32"],
        "what works: model.encoding=bfloat16",
    ),
    "a page that the kernels do not take": (
        ["deployment=h100_x1", "deployment.kv.page_size=16"],
        "what works: 128 or 256",
    ),
    "images": (
        ["model=tiny_idefics3", "deployment=h100_x1", "deployment.vision=true"],
        "deployment.vision: images are encoded on the CPU only",
    ),
    "short convolutions": (
        ["model=tiny_lfm2", "deployment=h100_x1"],
        "has short convolutions",
    ),
    "the delta rule": (
        ["model=tiny_qwen3_next", "deployment=h100_x1"],
        "has the gated delta rule",
    ),
    "experts over stages": (
        ["model=tiny_deepseek_v3", "deployment=h100_x4_pp2_tp2", "deployment.parallel.expert=2"],
        "pipeline=1, or expert=1",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_accelerators_cannot_do_is_refused(mistake: str) -> None:
    assert_refused(*MISTAKES[mistake])


def test_each_stage_on_accelerators_has_its_own_copy_of_a_shared_table() -> None:
    table = ("model=tiny_qwen2", "deployment.constants=[token_embedding]")
    held = [share.constants for share in plan_for(*table, "deployment=h100_x4_pp2_tp2").devices]
    assert held[0] == held[2] > 0
    assert [share.constants for share in plan_for(*table, "deployment=pp2").devices][1] == 0


def test_given_memory_counts_before_a_known_one() -> None:
    found = plan_for("model=tiny_llama", "deployment=h100_x1", "deployment.devices.memory_gib=40")
    assert found.capacity is not None
    assert found.capacity.usable == 36 * 2**30
