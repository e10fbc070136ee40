"""Makes the reference checkpoints and the values Hugging Face transformers computes from them.

    pip install -e '.[reference]'
    python tests/reference/make_reference.py [NAME ...]

Each checkpoint is a tiny random model in Hugging Face's layout, stored as bfloat16 (so that
reading it is exact) and computed here in float32. Beside it, expected.npz holds, per prompt i:

    prompt_i   int64 [n]            the prompt, of lengths that cross a KV page of 128 tokens
    forced_i   int64 [m]            a continuation that is fed token by token
    logits_i   float32 [m + 1, V]   after the prompt, and after each forced token
    greedy_i   int64 [16]           the greedy continuation
    all_0      float32 [n, V]       every token's logits of the first prompt

A model that keeps state has long_prompt, long_forced and long_logits too: a long decode.
A model that takes images has images.npz too: the same of prompts with images (images_i names
them), without all_0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, Idefics3ForConditionalGeneration
from transformers.generation import logits_process
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

FOLDER = Path(__file__).parent
VOCABULARY = 256
PROMPT_LENGTHS = (7, 1, 125, 200)
NUM_FORCED = 6

KEEPING_STATE = ("tiny_lfm2", "tiny_qwen3_next")
NUM_DECODED = 64

# One kernel shape for all: heads of 64, four for queries and two for keys and values.
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Three layers, the least that three pipeline stages take.
EXPERTS = {"num_hidden_layers": 3, "moe_intermediate_size": 32}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}

LATENT = EXPERTS | {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
}

# The position of a model is its seed: add new ones at the end.
MODELS = {
    "tiny_llama": {"model_type": "llama", "tie_word_embeddings": False},
    "tiny_mistral": {
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "sliding_window": 128,
    },
    "tiny_qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "tiny_qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "tiny_mixtral": EXPERTS
    | {
        "model_type": "mixtral",
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "tiny_qwen3_moe": EXPERTS
    | {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        # The second layer is dense.
        "mlp_only_layers": [1],
    },
    "tiny_olmoe": EXPERTS
    | {
        "model_type": "olmoe",
        # It norms whole projections, which fixes the width of its heads.
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": None,
        "intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "clip_qkv": 2.0,
    },
    "tiny_deepseek_v2": LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "tiny_deepseek_v3": LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "tiny_lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 4,
        "conv_bias": True,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "block_auto_adjust_ff_dim": False,
    },
    "tiny_gpt2": {
        "model_type": "gpt2",
        # Heads of 64, all with keys and values of their own.
        "n_embd": 128,
        "n_head": 2,
        "n_layer": 3,
        "n_inner": 96,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
    },
    "tiny_idefics3": {
        "model_type": "idefics3",
        "text_config": SHARED | {"model_type": "llama"},
        # Seven by seven positions for six by six patches.
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 4,
        },
        "scale_factor": 2,
        "image_token_id": 0,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    },
    "tiny_qwen3_next": EXPERTS
    | {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}

# Their widths and heights.
IMAGES = {"wide": (40, 22), "tall": (13, 37), "small": (9, 9)}
IMAGE_PROMPTS = (("wide", "tall"), ("small",), ("tall", "wide", "tall"))
IMAGE_PROCESSOR = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

SAMPLINGS = (
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.8, "min_p": 0.0},
    {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter values that matter: logits of a few units, norms away from one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            values = 0.5 * noise - 2  # So that a memory outlasts a few tokens.
        elif parameter.dim() >= 2:
            scale = 1.0 if "embed" in name else 1.4 * parameter.shape[-1] ** -0.5
            values = scale * noise
        elif name.endswith("bias"):
            values = 0.3 * noise
        else:
            values = 1 + 0.2 * noise
        parameter.data = values.to(torch.bfloat16).float()
        if name == "lm_head.weight" and hasattr(model, "image_token_id"):
            # Never the most likely one: a sequence that is continued has no further images.
            parameter.data[model.image_token_id] = 0
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            noise = 0.2 * torch.randn(buffer.shape, generator=generator)
            buffer.data = noise.to(torch.bfloat16).float()


def logits_of(
    model: torch.nn.Module, ids: list[int], images: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), **(images or {})).logits[0].float()


def greedy(
    model: torch.nn.Module,
    prompt: list[int],
    count: int,
    images: dict[str, torch.Tensor] | None = None,
) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(model, ids, images)[-1].argmax()))
    return ids[len(prompt) :]


def random_model(name: str, seed: int) -> torch.nn.Module:
    # These name the same differently, or elsewhere.
    shared = {} if name in ("tiny_gpt2", "tiny_idefics3") else SHARED
    facts = shared | MODELS[name]
    if name == "tiny_gpt2":
        facts["vocab_size"] = VOCABULARY
    if facts.get("head_dim") is None:  # The configuration derives it.
        facts.pop("head_dim", None)
    config = AutoConfig.for_model(**facts)
    config._attn_implementation = "eager"
    if name == "tiny_idefics3":
        model = Idefics3ForConditionalGeneration(config).float().eval()
    else:
        model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed)
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2Moe":
            # Transformers 5.12 reads it where groups are limited, and does not set it.
            module.num_experts = config.n_routed_experts
    if config.tie_word_embeddings:
        model.tie_weights()
    return model


def random_sequences(seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, each with a continuation."""
    generator = np.random.default_rng(seed)
    return [
        tuple(generator.integers(3, VOCABULARY, count).tolist() for count in (length, NUM_FORCED))
        for length in PROMPT_LENGTHS
    ]


def is_stable(model: torch.nn.Module, sequences: list[tuple[list[int], list[int]]]) -> bool:
    """Whether float64 gives the same logits: where two experts' scores almost tie, it does not."""
    single = [logits_of(model, prompt + forced) for prompt, forced in sequences]
    model.config._experts_implementation = "eager"  # The others have no float64.
    model.double()
    double = [logits_of(model, prompt + forced) for prompt, forced in sequences]
    model.float()
    pairs = zip(single, double, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) < 1e-3


def make_model(name: str) -> None:
    seed = list(MODELS).index(name)
    model, sequences = random_model(name, seed), random_sequences(seed)
    while not is_stable(model, sequences):
        seed += len(MODELS)
        model, sequences = random_model(name, seed), random_sequences(seed)
    expected: dict[str, np.ndarray] = {}
    for index, (prompt, forced) in enumerate(sequences):
        length = len(prompt)
        rows = logits_of(model, prompt + forced)
        expected[f"prompt_{index}"] = np.array(prompt)
        expected[f"forced_{index}"] = np.array(forced)
        expected[f"logits_{index}"] = rows[length - 1 :].numpy()
        expected[f"greedy_{index}"] = np.array(greedy(model, prompt, 16))
        if index == 0:
            expected["all_0"] = logits_of(model, prompt).numpy()
    if name in KEEPING_STATE:
        generator = np.random.default_rng(seed)
        prompt, forced = (generator.integers(3, VOCABULARY, count) for count in (9, NUM_DECODED))
        rows = logits_of(model, [*prompt.tolist(), *forced.tolist()])
        expected |= {"long_prompt": prompt, "long_forced": forced}
        expected["long_logits"] = rows[len(prompt) - 1 :].numpy()
    folder = FOLDER / name
    if name == "tiny_idefics3":
        make_images(model, folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    np.savez_compressed(folder / "expected.npz", **expected)
    print(f"{name}: logits from {min(v.min() for k, v in expected.items() if 'logits' in k):.1f}")


def make_images(model: torch.nn.Module, folder: Path) -> None:
    """Images, how they are prepared, and prompts with them."""
    generator = np.random.default_rng(len(MODELS))
    files = {name: folder / "images" / f"{name}.png" for name in IMAGES}
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, (width, height) in IMAGES.items():
        pixels = generator.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(files[name])
    processor = Idefics3ImageProcessorPil(**IMAGE_PROCESSOR)
    processor.save_pretrained(folder)

    def prepared(*names: str) -> dict[str, torch.Tensor]:
        pictures = [[Image.open(files[name]).convert("RGB") for name in names]]
        return dict(processor(pictures, return_tensors="pt"))

    lengths = {}
    for name in IMAGES:
        with torch.no_grad():
            rows = model.get_image_features(**prepared(name)).pooler_output
        lengths[name] = rows.flatten(0, 1).shape[0]
    expected = {}
    for index, names in enumerate(IMAGE_PROMPTS):
        prompt = generator.integers(3, VOCABULARY, 3).tolist()
        for name in names:
            prompt += [model.config.image_token_id] * lengths[name]
            prompt += generator.integers(3, VOCABULARY, 4).tolist()
        forced = generator.integers(3, VOCABULARY, NUM_FORCED).tolist()
        rows = logits_of(model, prompt + forced, prepared(*names))
        expected[f"images_{index}"] = np.array(names)
        expected[f"prompt_{index}"] = np.array(prompt)
        expected[f"forced_{index}"] = np.array(forced)
        expected[f"logits_{index}"] = rows[len(prompt) - 1 :].numpy()
        expected[f"greedy_{index}"] = np.array(greedy(model, prompt, 16, prepared(*names)))
    np.savez_compressed(folder / "images.npz", **expected)


ADAPTERS = {
    # All products, a rank below what the tests' stacks hold.
    "all": {
        "r": 6,
        "lora_alpha": 12,
        "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
    },
    # Some products of some layers, and the scale of rank-stabilized LoRA.
    "some": {
        "r": 16,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "layers_to_transform": [0, 2],
    },
}


def make_adapters() -> None:
    """Adapters of tiny_llama in PEFT's layout, each with the logits of the first prompts."""
    with np.load(FOLDER / "tiny_llama" / "expected.npz") as values:
        sequences = [(values[f"prompt_{i}"], values[f"forced_{i}"]) for i in range(4)]
    for number, (name, facts) in enumerate(ADAPTERS.items()):
        base = AutoModelForCausalLM.from_pretrained(
            FOLDER / "tiny_llama", dtype=torch.float32, attn_implementation="eager"
        )
        model = peft.get_peft_model(base, peft.LoraConfig(**facts)).eval()
        generator = torch.Generator().manual_seed(number)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                scale = 0.5 if "lora_B" in key else parameter.shape[-1] ** -0.5
                values = scale * torch.randn(parameter.shape, generator=generator)
                parameter.data = values.to(torch.bfloat16).float()
        expected = {}
        for index, (prompt, forced) in enumerate(sequences):
            rows = logits_of(model, [*prompt.tolist(), *forced.tolist()])
            expected[f"logits_{index}"] = rows[len(prompt) - 1 :].numpy()
        folder = FOLDER / "tiny_llama_adapters" / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        file = folder / "adapter_config.json"
        config = json.loads(file.read_text()) | {"base_model_name_or_path": "tiny_llama"}
        file.write_text(json.dumps(config, indent=1) + "\n")
        np.savez_compressed(folder / "expected.npz", **expected)


def make_rope() -> None:
    cases = {}
    for name, parameters in ROPES.items():
        config = AutoConfig.for_model(
            "llama",
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters=dict(parameters),
        )
        if name == "default":
            dims = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
            frequencies, factor = 1.0 / (parameters["rope_theta"] ** dims), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        cases[name] = {
            "rope_parameters": parameters,
            "inverse_frequencies": frequencies.tolist(),
            "attention_factor": float(factor),
        }
    (FOLDER / "rope.json").write_text(json.dumps(cases, indent=1) + "\n")


def make_sampling() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    cases = []
    for sampling in SAMPLINGS:
        scores = logits[None].clone()
        processors = [logits_process.TemperatureLogitsWarper(sampling["temperature"])]
        if sampling["top_k"]:
            processors.append(logits_process.TopKLogitsWarper(sampling["top_k"]))
        if sampling["top_p"] < 1:
            processors.append(logits_process.TopPLogitsWarper(sampling["top_p"]))
        if sampling["min_p"]:
            processors.append(logits_process.MinPLogitsWarper(sampling["min_p"]))
        for processor in processors:
            scores = processor(torch.zeros((1, 1), dtype=torch.long), scores)
        cases.append({"sampling": sampling, "probabilities": scores.softmax(-1)[0].tolist()})
    contents = {"logits": logits.tolist(), "cases": cases}
    (FOLDER / "sampling.json").write_text(json.dumps(contents) + "\n")


def main() -> None:
    names = sys.argv[1:] or list(MODELS)
    for name in names:
        make_model(name)
    make_adapters()
    make_rope()
    make_sampling()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (FOLDER / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
