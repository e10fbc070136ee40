"""Images: prepared as Hugging Face prepares them, encoded once, placed among the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    REFERENCE,
    VISION,
    VISION_PARALLEL,
    assert_refused,
    compiled_alone,
    compiled_for,
    greedy_ids,
    plan_for,
)
from max.dtype import DType
from max.graph import DeviceRef, TensorType
from PIL import Image
from test_command import read, rolecall
from test_parallel import STEPS, assert_equal
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from builder.compare import compare, random_image_prompts, random_prompts, record
from builder.images import ImagePreparer, ImageText
from builder.prompts import Prompt, PromptReader, RefusedPrompt
from builder.report import contract_json
from builder.run import Request, Runner
from builder.sampling import Sampler
from builder.schema import SamplingConfig
from builder.tokenizer import TextTokenizer
from models.errors import ConfigError
from models.layers.vision import patch_positions
from models.settings import VisionSettings

MODEL = REFERENCE / "tiny_idefics3"
IMAGES = {name: str(MODEL / "images" / f"{name}.png") for name in ("wide", "tall", "small")}
HOST = DeviceRef.CPU()
PARALLEL = pytest.mark.parametrize("overrides", VISION_PARALLEL, ids=lambda o: o[1])
EVERY = pytest.mark.parametrize("overrides", [VISION, *VISION_PARALLEL], ids=lambda o: o[1])


def settings() -> VisionSettings:
    found = plan_for(*VISION).settings.vision
    assert found is not None
    return found


def wanted() -> dict[str, np.ndarray]:
    with np.load(MODEL / "images.npz") as values:
        return dict(values)


def prompts_of(values: dict[str, np.ndarray]) -> list[Prompt]:
    reader = PromptReader(plan_for(*VISION), None, room=8)
    return [
        reader.read(
            "prompt",
            {
                "prompt": values[f"prompt_{i}"].tolist(),
                "images": [IMAGES[name] for name in values[f"images_{i}"]],
            },
        )
        for i in range(3)
    ]


# In one step each, and in chunks that end within images.
@pytest.mark.parametrize("tokens", [512, 20])
def test_prompts_with_images_match_hugging_face_in_one_batch(tokens: int) -> None:
    values = wanted()
    prompts = prompts_of(values)
    forced = [[*values[f"forced_{i}"].tolist(), 0] for i in range(3)]
    crops = [prompt.crops for prompt in prompts]
    given = [prompt.ids for prompt in prompts]
    _, found = record(compiled_for(*VISION), given, 6, tokens, forced=forced, crops=crops)
    for i in range(3):
        np.testing.assert_allclose(found[i], values[f"logits_{i}"], atol=1e-4, rtol=0)


@EVERY
def test_ids_of_prompts_with_images_match_hugging_face(overrides: tuple[str, ...]) -> None:
    values = wanted()
    found = continued(overrides, prompts_of(values), [16] * 3)
    assert found == [values[f"greedy_{i}"].tolist() for i in range(3)]


def continued(
    overrides: tuple[str, ...], prompts: Sequence[Prompt], counts: Sequence[int]
) -> list[list[int]]:
    requests = [
        Request(prompt.ids, count, Sampler(SamplingConfig(), 0), crops=prompt.crops)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    Runner(compiled_for(*overrides)).run(requests)
    return [request.ids for request in requests]


def mixed_prompts() -> list[Prompt]:
    """Prompts with and without images, in turn."""
    text = random_prompts((5, 60, 17, 130, 33, 2), 256, settings())
    pictured = random_image_prompts((2, 1, 5, 1, 3, 1), 256, settings())
    pairs = zip([(ids, ()) for ids in text], pictured, strict=True)
    return [Prompt(ids, ids, crops=crops) for pair in pairs for ids, crops in pair]


@PARALLEL
@pytest.mark.parametrize("tokens", [40, 13])
def test_logits_equal_the_plain_deployments(overrides: tuple[str, ...], tokens: int) -> None:
    prompts = mixed_prompts()
    given, crops = [p.ids for p in prompts], [p.crops for p in prompts]
    ids, plain = record(compiled_for(*VISION), given, STEPS, tokens, crops=crops)
    deployed = compiled_for(*overrides)
    _, found = record(deployed, given, STEPS, tokens, forced=ids, crops=crops)
    assert_equal(compare(plain, found))
    # Every crop was taken to its last row, and forgotten.
    assert deployed.model.images is not None
    assert deployed.model.images._kept == {}


@EVERY
def test_requests_that_replace_others_get_the_ids_of_one_by_one(overrides: tuple[str, ...]) -> None:
    prompts = mixed_prompts()
    counts = [1 + (5 * number) % 7 for number in range(len(prompts))]
    alone = [
        continued(overrides, [prompt], [count])[0]
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    assert continued(overrides, prompts, counts) == alone


def test_crops_of_a_request_that_is_stopped_are_forgotten() -> None:
    compiled = compiled_for(*VISION)
    (ids, crops), *_ = random_image_prompts((5,), 256, settings())
    request = Request(ids, 1, Sampler(SamplingConfig(), 0), crops=crops)
    runner = Runner(compiled)
    runner.limit_step(13)
    asked = iter([False, True])
    runner.run([request], should_stop=lambda: next(asked))
    assert request.finish == "interrupted"
    assert compiled.model.images is not None
    assert compiled.model.images._kept == {}


def test_a_crop_is_encoded_once_however_its_tokens_are_chunked() -> None:
    compiled = compiled_for(*VISION)
    ((ids, crops),) = random_image_prompts((4,), 256, settings())
    encoded = []
    original = compiled.model._encode

    def encode(inputs: Any) -> Any:
        encoded.append(inputs.patches[0].shape[0])
        return original(inputs)

    compiled.model._encode = encode  # type: ignore[method-assign]
    try:
        record(compiled, [ids], 1, 8, crops=[crops])
    finally:
        del compiled.model._encode  # type: ignore[attr-defined]
    assert sum(encoded) == 4


def test_images_are_prepared_as_the_processor_does() -> None:
    processor = Idefics3ImageProcessorPil.from_pretrained(MODEL)
    preparer = ImagePreparer(plan_for(*VISION))
    for file in IMAGES.values():
        made = processor([[Image.open(file)]], return_tensors="np")["pixel_values"][0]
        found = preparer.prepare_file("image", file)
        np.testing.assert_array_equal(np.stack(found.crops), made)


def test_text_with_images_has_the_ids_of_idefics3s_processor() -> None:
    around = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    special = ["<image>", *around, *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2))]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: at for at, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(special)
    tokenizer = TextTokenizer(backend, frozenset())
    preparer = ImagePreparer(plan_for(*VISION))
    images = [preparer.prepare_file("image", IMAGES[name]) for name in ("wide", "tall")]
    text = "See <image> and <image>, please."
    found = tokenizer.encode(ImageText(tokenizer, settings()).expand(text, images))
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(MODEL),
        PreTrainedTokenizerFast(tokenizer_object=backend),
        image_seq_len=settings().tokens_per_crop,
    )
    pictures = [Image.open(IMAGES[name]) for name in ("wide", "tall")]
    assert found == processor(text=[text], images=[pictures])["input_ids"][0]


# torch.bucketize of Hugging Face's fractional coordinates, for a table of so many a side.
@pytest.mark.parametrize(
    ("table", "wanted_columns"),
    [
        (6, [0, 1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 3, 4, 5]),
        (9, [0, 1, 3, 4, 6, 7]),
        (4, [0, 0, 1, 2, 2, 3]),
    ],
)
def test_patches_are_spread_over_the_table_of_positions(
    table: int, wanted_columns: list[int]
) -> None:
    changed = {**settings().__dict__, "table_side": table}
    found = patch_positions(VisionSettings(**changed)).reshape(6, 6)
    assert (found[0] % table).tolist() == wanted_columns
    assert (found[:, 0] // table).tolist() == wanted_columns


def test_contract_has_embeddings_and_indices_for_each_device_of_the_first_stage() -> None:
    for overrides, devices in ((VISION, 1), *((o, 2) for o in VISION_PARALLEL)):
        (stage,) = plan_for(*overrides).stages
        vision = stage.contract.inputs.vision
        assert vision is not None
        rows = TensorType(DType.float32, ["num_image_tokens", 64], HOST)
        assert vision.embeddings == (rows,) * devices
        assert vision.scatter_indices == (TensorType(DType.int32, ["num_image_tokens"], HOST),) * (
            devices
        )
    first, second = plan_for(VISION[0], "deployment=pp2", "deployment.vision=true").stages
    assert first.contract.inputs.vision is not None
    assert second.contract.inputs.vision is None


def test_a_step_without_images_passes_no_rows() -> None:
    model = compiled_for(*VISION).model
    assert model.images is not None
    found = model.images.inputs(model.images.step([[]]), model._encode, None)
    assert found.embeddings[0].shape == (0, 64)
    assert found.scatter_indices[0].shape == (0,)


def test_plan_shows_the_bytes_of_the_encoder() -> None:
    hidden, inner, layers = 64, 96, 2
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + hidden + inner + 4 * hidden
    embedding = hidden * 3 * 4 * 4 + hidden + 7 * 7 * hidden
    connector = 4 * hidden * 64
    whole = 4 * (embedding + layers * layer + 2 * hidden + connector)
    plan = plan_for(*VISION, keeps=False)
    assert [share.vision for share in plan.devices] == [whole]
    assert sum(share.weights + share.vision for share in plan.devices) == plan.weights.total
    # Each of two devices has half of the layers' matrices, and what reads them whole.
    shared = 4 * layers * (4 * hidden * hidden + 3 * hidden + 2 * hidden * inner + inner) // 2
    # One of them adds the biases of what is summed.
    once = 4 * layers * 2 * hidden
    found = [share.vision for share in plan_for(*VISION_PARALLEL[0], keeps=False).devices]
    assert found == [whole - shared, whole - shared - once]


def test_text_deployments_of_a_model_with_images_do_without_the_encoder() -> None:
    plan = plan_for(VISION[0])
    assert plan.devices[0].vision == 0
    assert "vision" not in contract_json(plan)
    assert plan.stages[0].contract.inputs.vision is None


REFUSED = {
    "heads": (
        [VISION[0], "deployment=vision_tp2", "deployment.parallel.tensor=8"],
        "the image encoder's 4 heads do not divide over tensor=8",
    ),
    "text": (
        ["model=tiny_qwen3", "deployment=vision"],
        "deployment.vision: true, but qwen3 takes text alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_images_is_refused(name: str) -> None:
    overrides, message = REFUSED[name]
    assert_refused(
        [*overrides, "deployment.devices.count=8"] if name == "heads" else overrides, message
    )


def read_prompt(overrides: Sequence[str], entry: object) -> Prompt:
    return PromptReader(plan_for(*overrides), None, room=1).read("task.prompts[0]", entry)


IDS = [5, *[0] * 27, 6]


def test_prompts_that_do_not_fit_their_images_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(IMAGES["tall"]).read_bytes()[:200])
    (tmp_path / "text.png").write_text("no image")
    tall = [IMAGES["tall"]]
    for overrides, entry, message in (
        (VISION, {"prompt": IDS, "images": [str(tmp_path / "text.png")]}, "is no image that"),
        (VISION, {"prompt": IDS, "images": [str(broken)]}, "can't be read as an image"),
        (VISION, {"prompt": IDS, "images": [str(tmp_path / "none.png")]}, "no such image"),
        (VISION, {"prompt": IDS, "images": "a.png"}, "'a.png' is no list of files"),
        (
            VISION,
            {"prompt": IDS[1:], "images": [IMAGES["wide"], IMAGES["tall"]]},
            "27 image tokens (0), but its 2 images are 5 + 3 crops of 9 tokens = 72",
        ),
        (VISION, IDS, "27 image tokens (0), but no images"),
        (VISION[:1], {"prompt": IDS, "images": tall}, "deployment.vision is false"),
        (("model=tiny_llama",), {"prompt": IDS, "images": tall}, "llama takes text alone"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_prompt(overrides, entry)
        assert str(caught.value).startswith("task.prompts[0]: ")
        assert message in str(caught.value)
    assert len(read_prompt(VISION, {"prompt": IDS, "images": tall}).crops) == 3


def test_other_requests_of_a_batch_are_unharmed(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    values = wanted()
    entries = [
        {"prompt": IDS, "images": [str(tmp_path / "text.png")]},
        {"prompt": values["prompt_1"].tolist(), "images": [IMAGES["small"]]},
        {"prompt": IDS, "images": [IMAGES["wide"]]},
    ]
    reader = PromptReader(plan_for(*VISION), None, room=1)
    given = reader.read_each([(f"prompt {n}", entry) for n, entry in enumerate(entries)])
    good = [prompt for prompt in given if isinstance(prompt, Prompt)]
    assert [type(prompt) for prompt in given] == [RefusedPrompt, Prompt, RefusedPrompt]
    assert continued(VISION, good, [16]) == [values["greedy_1"].tolist()]


def test_command_computes_the_prompts_that_it_can(tmp_path: Path) -> None:
    compiled = compiled_alone("model=tiny_llama")
    entries = [
        [5, 6, 7],
        {"prompt": [5, 6], "images": [IMAGES["wide"]]},
        {"prompt": [8, 9, 10]},
        {"prompt": [5, 6], "adapter": "none_such"},
    ]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    arguments = ["model=tiny_llama", f"task.prompts_file={lines}", "task.max_new_tokens=4"]
    done = rolecall(tmp_path, *arguments, "task.ignore_eos=true", status=2)
    assert "2 of 4 prompts can't be computed; the others are" in done.stderr
    assert "error: task.prompts_file: line 2: images, but llama takes text alone" in done.stderr
    assert "task.prompts_file: line 4: adapter 'none_such' is not served" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "job" / "generations.jsonl").open()]
    assert [row["finish"] for row in rows] == ["length", "error", "length", "error"]
    assert "takes text alone" in rows[1]["error"]
    found = [row["ids"] for row in rows if row["finish"] == "length"]
    assert found == greedy_ids(compiled, [[5, 6, 7], [8, 9, 10]], 4)
    assert read(tmp_path, "status.json")["status"] == "error"


def test_plan_lists_what_the_encoders_graph_takes() -> None:
    inputs = contract_json(plan_for(*VISION_PARALLEL[0]))["vision"]["inputs"]
    assert [leaf["path"] for leaf in inputs] == ["patches.0", "signals.0", "signals.1"]
    # 512 tokens reach 56 crops of 9 whole, and parts of two of each of 8 sequences.
    assert inputs[0]["max_bytes"] == (56 + 16) * 36 * 48 * 4


def test_fragments_add_images_and_adapters_to_any_deployment() -> None:
    (stage,) = plan_for(VISION[0], "deployment=tp2", "+lora=rank16", "+vision=images").stages
    fields = {field.name: len(field.leaves) for field in stage.contract.fields if field.present}
    # On each of two devices an A and a B of seven products in four layers, behind the routing.
    assert fields["lora"] == 3 + 2 * 4 * 7 * 2
    assert fields["vision"] == 4
    (golden,) = plan_for(VISION[0], "deployment=lora_tp2").stages
    assert golden.contract.inputs.lora == stage.contract.inputs.lora
