"""Idefics3 and SmolVLM: Llama, and images through a SigLIP encoder and a pixel shuffle.

Source: Hugging Face's ``modeling_idefics3.py``; SmolVLM's is the same.
"""

from __future__ import annotations

from dataclasses import replace

from models.families import llama
from models.families.base import ConfigReader, Family
from models.layers.activations import ACTIVATIONS
from models.settings import ModelSettings, VisionSettings

_TEXT_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""What a nested configuration leaves out where it is ``LlamaConfig``'s default."""


def _settings(reader: ConfigReader) -> ModelSettings:
    text = reader.nested("text_config")
    if text is None:
        raise reader.error("text_config", "missing")
    text.choice("model_type", ("llama",), "llama")
    text = ConfigReader(_TEXT_DEFAULTS | dict(text.config), text.source)
    settings, vision = llama.FAMILY.settings(text), _vision(reader)
    if vision.image_token_id >= settings.vocab_size:
        raise reader.error(
            "image_token_id", f"{vision.image_token_id} is not below {settings.vocab_size}"
        )
    return replace(
        settings,
        family="idefics3",
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        vision=vision,
    )


def _vision(reader: ConfigReader) -> VisionSettings:
    vision = reader.nested("vision_config") or ConfigReader({}, f"{reader.source}: vision_config")
    hidden_size = vision.integer("hidden_size", 1152)
    num_heads = vision.integer("num_attention_heads", 16)
    if hidden_size % num_heads:
        raise vision.error(
            "num_attention_heads", f"{hidden_size} columns do not divide over {num_heads} heads"
        )
    image_size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 32)
    if image_size < patch_size:
        raise vision.error("image_size", f"{image_size} is less than a patch of {patch_size}")
    settings = VisionSettings(
        hidden_size=hidden_size,
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=vision.integer("num_hidden_layers", 12),
        num_heads=num_heads,
        num_channels=vision.integer("num_channels", 3),
        patch_size=patch_size,
        crop_size=_crop_size(reader, image_size),
        table_side=image_size // patch_size,
        hidden_act=vision.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        shuffle=reader.integer("scale_factor", 2),
        image_token_id=reader.integer("image_token_id", 128257, least=0),
    )
    side, shuffle = settings.patches_per_side, settings.shuffle
    if side == 0 or side % shuffle:
        raise reader.error(
            "scale_factor",
            f"a crop of {settings.crop_size} pixels has {side} patches of {patch_size} a side, "
            f"which do not divide into squares of {shuffle}",
        )
    return settings


def _crop_size(reader: ConfigReader, image_size: int) -> int:
    """The side of what the image processor makes; without one, what the encoder is made for."""
    processor = reader.nested("image_processor")
    if processor is None:
        return image_size
    size = processor.nested("max_image_size")
    # Idefics3ImageProcessor's default.
    return 364 if size is None else size.integer("longest_edge")


FAMILY = Family(
    name="idefics3",
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    settings=_settings,
    takes_images=True,
    names=(
        (r"^text_model\.", ""),
        (r"^vision_model\.encoder\.", "vision_model."),
        (r"^(vision_model\..*)\.layer_norm1\.", r"\1.input_layernorm."),
        (r"^(vision_model\..*)\.layer_norm2\.", r"\1.post_attention_layernorm."),
        (r"^(vision_model\..*)\.out_proj\.", r"\1.o_proj."),
        (r"^(vision_model\..*)\.fc1\.", r"\1.up_proj."),
        (r"^(vision_model\..*)\.fc2\.", r"\1.down_proj."),
    ),
)
