"""Text to ids and back, against ids that Hugging Face's tokenizers make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REFERENCE, plan_for
from tokenizers import Tokenizer, models, pre_tokenizers

from builder.compose import compose
from builder.prompts import PromptReader, gather
from builder.sources import fetch
from builder.tokenizer import TextTokenizer, load_tokenizer, stop_ids
from models.checkpoints import open_checkpoint
from models.checkpoints.max_weights import LoadedWeights
from models.errors import ConfigError

SMOLLM2 = json.loads((REFERENCE / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> TextTokenizer:
    tokenizer = load_tokenizer(open_checkpoint(fetch(compose([]).model)), None)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("case", SMOLLM2["tokenization"], ids=lambda case: case["text"][:12])
def test_text_to_ids_and_back(smollm2: TextTokenizer, case: dict) -> None:
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["text"]


def test_streamed_text_is_the_whole_text(smollm2: TextTokenizer) -> None:
    for case in SMOLLM2["tokenization"]:
        stream = smollm2.stream()
        assert "".join(stream.push(token) for token in case["ids"]) == case["text"]


def test_chat_template_adds_the_default_system_prompt(smollm2: TextTokenizer) -> None:
    question = "Explain what a KV cache is in two sentences."
    found = smollm2.encode_rendered(smollm2.render_chat(question))
    assert found == SMOLLM2["greedy"][1]["prompt_ids"]
    assert smollm2.stop_ids == {2}


def test_special_tokens_in_text_are_single_ids(smollm2: TextTokenizer) -> None:
    assert smollm2.encode("<|im_start|>user")[0] == 1
    assert smollm2.decode([1, 504, 2]) == "The"


def test_tiny_checkpoint_has_no_tokenizer_but_stop_ids() -> None:
    checkpoint = open_checkpoint(REFERENCE / "tiny_llama")
    assert load_tokenizer(checkpoint, None) is None
    assert stop_ids(checkpoint) == {2}


def test_tokenizer_folder_of_the_users_choice(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}"
                "{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
                "bos_token": {"content": "<s>"},
            }
        )
    )
    checkpoint = open_checkpoint(REFERENCE / "tiny_llama")
    tokenizer = load_tokenizer(checkpoint, str(tmp_path))
    assert tokenizer is not None
    assert tokenizer.encode("b a b") == [1, 0, 1]
    assert tokenizer.template_variables["bos_token"] == "<s>"
    with pytest.raises(ConfigError, match="chat template fails: no"):
        tokenizer.render_chat("bad")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(checkpoint, str(tmp_path / "elsewhere"))


def test_damaged_tokenizer_is_told_with_the_key_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in (REFERENCE / "tiny_llama").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    damaged = tmp_path / "model" / "tokenizer.json"
    damaged.write_text("{}")
    checkpoint = open_checkpoint(tmp_path / "model")
    for key, folder in (("source", None), ("tokenizer", str(damaged.parent))):
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(checkpoint, folder)
        assert str(caught.value).startswith(f"model.{key}: {damaged} is no tokenizer: ")


def test_tensor_that_max_did_not_load_is_told_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^model\.source: the checkpoint has no tensor norm\."):
        LoadedWeights({}).read("norm.weight")


def _ids(tokenizer: TextTokenizer | None, given: object) -> list[int]:
    plan = plan_for("model=tiny_llama", "deployment.max_length=8")
    reader = PromptReader(plan, tokenizer, room=1)
    (prompt,) = reader.read_all(gather("task.prompts", [given], None))
    return prompt.ids


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", r"task\.prompts\[0\]: empty"),
        ("  ", r"task\.prompts\[0\]: empty"),
        ([], r"task\.prompts\[0\]: empty"),
        ([3, 256], r"token id 256 is not in the vocabulary, 0 to 255"),
        ([-1], r"token id -1 is not"),
        ([1.5], r"neither text nor a list of token ids"),
        (7, r"7 is neither text"),
        ([5] * 8, r"8 tokens \+ 1 to generate exceed max_length 8"),
    ],
)
def test_unusable_prompts_are_refused(smollm2: TextTokenizer, given: object, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        _ids(smollm2, given)


def test_longest_prompt_that_fits_is_taken(smollm2: TextTokenizer) -> None:
    assert _ids(smollm2, [5] * 7) == [5] * 7


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="the checkpoint has no tokenizer"):
        _ids(None, "text")


def test_prompts_file_holds_texts_and_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\n\n[1, 2, 3]\n[not a list]\n")
    entries = gather("task.prompts", ["first"], str(file))
    assert [entry for _, entry in entries] == ["first", "Hello", [1, 2, 3], "[not a list]"]
    assert entries[2][0] == "task.prompts_file: line 3"
    with pytest.raises(ConfigError, match="no such file"):
        gather("task.prompts", [], str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"task\.prompts: empty; give at least one"):
        gather("task.prompts", [], None)


def test_bos_is_added_where_gguf_says_so(smollm2: TextTokenizer) -> None:
    assert replace(smollm2, prefix_ids=(1,)).encode("The")[0] == 1
