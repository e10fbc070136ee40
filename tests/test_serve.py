"""MAX's own commands with our decoder: the same ids, in OpenAI's protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from conftest import REFERENCE, compiled_alone, expected, greedy_ids, limited, plan_for
from max.driver import DeviceSpec
from max.graph.weights import WeightData, Weights, load_weights
from max.nn.transformer import ReturnHiddenStates
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.arch_lookup import ARCH_LOOKUP, import_custom_architectures
from max.pipelines.lib.config import MAXModelConfig, PipelineConfig
from max.pipelines.lib.interfaces.pipeline_model import ModelInputs, ModelOutputs
from max.pipelines.lib.pipeline_runtime_config import PipelineRuntimeConfig
from openai import OpenAI
from test_command import rolecall
from test_parallel import random_prompts
from tokenizers import Tokenizer, models, pre_tokenizers

from builder.build import build
from builder.compile import Compiled, process_session
from builder.serving import (
    ARCHITECTURES,
    check_servable,
    max_command,
    served_folder,
    server_arguments,
)
from models.architectures import ServedConfig, ServedDecoder, canonical_state_dict
from models.checkpoints import open_checkpoint
from models.contract import resolve_contract
from models.errors import ConfigError
from models.families import FAMILIES
from models.registration_graph_api import GraphApiDecoderPipelineModel
from models.weights import WeightLoader

# The graph that other tests compile too; requests have to wait for each other.
LIMITS = ("deployment.batch.max_batch_size=4",)
START_SECONDS = 300


def words(ids: Iterable[int]) -> str:
    return " ".join(f"t{token}" for token in ids)


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def spoken(ids: list[int]) -> list[int]:
    """What of a continuation is text: up to the stop token, without the other special ones."""
    whole = ids[: ids.index(2)] if 2 in ids else ids
    return [token for token in whole if token > 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llama with a tokenizer, whose words are t3 to t255 behind three special ones."""
    made = tmp_path_factory.mktemp("served") / "tiny_llama"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REFERENCE / "tiny_llama" / name, made)
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: at for at, word in enumerate([*special, *words(range(3, 256)).split()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(made / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 512,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


@pytest.fixture(scope="module")
def overrides(folder: Path) -> tuple[str, ...]:
    return ("model=local", "model.name=tiny", f"model.source={folder}", *LIMITS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(
    overrides: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A server's address, and that of its metrics."""
    compiled_alone(*overrides)  # MAX's server finds the graph in the cache.
    job = tmp_path_factory.mktemp("serve") / "job"
    port, metrics_port = free_port(), free_port()
    ports = [f"task.port={port}", f"task.metrics_port={metrics_port}"]
    command = [sys.executable, "-m", "builder", f"hydra.run.dir={job}", "task=serve"]
    with subprocess.Popen(
        [*command, *overrides, *ports], cwd=job.parent, env=dict(os.environ)
    ) as process:
        began = time.monotonic()
        while not (job / "server.json").is_file():
            assert process.poll() is None
            assert time.monotonic() < began + START_SECONDS, (job / "server.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert json.loads((job / "status.json").read_text())["status"] == "ok"


@pytest.fixture
def client(server: tuple[str, str]) -> OpenAI:
    return OpenAI(base_url=f"{server[0]}/v1", api_key="none")


def ask(client: OpenAI, ids: list[int], count: int) -> list[int]:
    answer = client.completions.create(
        model="tiny", prompt=words(ids), max_tokens=count, temperature=0
    )
    return ids_of(answer.choices[0].text)


def test_architectures_are_those_of_our_families() -> None:
    import_custom_architectures([ARCHITECTURES])
    for family in FAMILIES:
        for name in family.architectures:
            found = ARCH_LOOKUP.resolve(name)
            ours = found is not None and issubclass(
                found.pipeline_model, GraphApiDecoderPipelineModel
            )
            assert ours is not family.takes_images


def test_completion_has_hugging_faces_ids(client: OpenAI) -> None:
    values = expected("tiny_llama")
    for i in range(4):
        wanted = spoken(values[f"greedy_{i}"].tolist())
        assert ask(client, values[f"prompt_{i}"].tolist(), 16) == wanted


def test_chat_is_answered_and_streamed(client: OpenAI) -> None:
    ids = expected("tiny_llama")["prompt_0"].tolist()
    wanted = ask(client, ids, 8)
    messages = [{"role": "user", "content": words(ids)}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(**asked)
    assert ids_of(answer.choices[0].message.content) == wanted
    parts = client.chat.completions.create(**asked, stream=True)
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert len([text for text in texts if text]) > 1
    assert ids_of("".join(texts)) == wanted


def test_log_probabilities_are_those_of_the_logits(client: OpenAI) -> None:
    values = expected("tiny_llama")
    ids = values["prompt_0"].tolist()
    answer = client.completions.create(
        model="tiny", prompt=words(ids), max_tokens=1, temperature=0, logprobs=2
    )
    logits = values["logits_0"][0].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum())
    best = np.argsort(wanted)[::-1][:2]
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs[0] == pytest.approx(wanted.max(), abs=1e-4)
    assert found.top_logprobs[0] == pytest.approx(
        {f"t{token}": wanted[token] for token in best}, abs=1e-4
    )


def test_sixteen_requests_at_once_get_the_ids_of_one_by_one(
    client: OpenAI, overrides: tuple[str, ...]
) -> None:
    prompts = [[3 + token % 253 for token in ids] for ids in random_prompts(range(1, 65, 4), 256)]
    alone = [greedy_ids(compiled_alone(*overrides), [ids], 12)[0] for ids in prompts]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda ids: ask(client, ids, 12), prompts))
    assert found == [spoken(ids) for ids in alone]


def test_prompts_that_begin_alike_get_the_ids_of_one_that_shares_nothing(
    client: OpenAI, overrides: tuple[str, ...]
) -> None:
    begin, *ends = ([3 + t % 253 for t in ids] for ids in random_prompts((256, 9, 9, 1), 256))
    prompts = [begin + end for end in ends] + [begin + ends[0]]
    compiled = limited(compiled_alone(*overrides), prefix_caching=False)
    for prompt in prompts:
        (wanted,) = greedy_ids(compiled, [prompt], 8)
        assert ask(client, prompt, 8) == spoken(wanted)


@pytest.mark.parametrize(("asked", "argument"), [("true", "--"), ("false", "--no-")])
def test_the_server_shares_pages_where_the_deployment_does(
    folder: Path, overrides: tuple[str, ...], asked: str, argument: str
) -> None:
    plan = plan_for(*overrides, f"deployment.kv.prefix_caching={asked}")
    assert f"{argument}enable-prefix-caching" in server_arguments(plan, folder)


def test_health_and_metrics_answer(server: tuple[str, str]) -> None:
    address, metrics = server
    with urlopen(f"{address}/health", timeout=10) as answer:
        assert answer.status == 200
    with urlopen(f"{metrics}/metrics", timeout=10) as answer:
        assert b"maxserve_" in answer.read()


def test_port_that_is_taken_is_refused(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = rolecall(tmp_path, *overrides, "task=serve", f"task.port={port}", status=2)
    assert f"task.port: 127.0.0.1:{port} can't be listened on" in done.stderr


REFUSED = {
    "devices": (["deployment=tp2"], "deployment.devices.count: task=serve can't serve 2 simulated"),
    "adapters": (["+lora=rank16"], "deployment.lora: task=serve can't serve adapters"),
    "constants": (["deployment.constants=[token_embedding]"], "deployment.constants: task=serve"),
    "artifact": (["deployment.artifact=somewhere"], "deployment.artifact: task=serve can't serve"),
    "logits": (["deployment.return_logits=all"], "deployment.return_logits: task=serve"),
    "pages": (["deployment.kv.num_pages=9"], "deployment.kv.num_pages: task=serve"),
    "tokenizer": (["model=tiny_llama"], "has no tokenizer, which a server needs"),
    "images": (["model=tiny_idefics3"], "can't serve idefics3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(
    overrides: tuple[str, ...], name: str
) -> None:
    more, message = REFUSED[name]
    model = () if any(part.startswith("model=") for part in more) else overrides
    with pytest.raises(ConfigError) as caught:
        check_servable(plan_for(*model, *more))
    assert message in str(caught.value)


def test_a_folder_is_made_of_what_is_none(folder: Path, tmp_path: Path) -> None:
    source = REFERENCE / "tiny_llama"
    os.environ["ROLECALL_CACHE_DIR"] = str(tmp_path)
    try:
        plan = plan_for("model=tiny_llama", f"model.tokenizer={folder}")
        made = served_folder(plan)
        assert served_folder(plan) == made
    finally:
        del os.environ["ROLECALL_CACHE_DIR"]
    assert f"--model-path={made}" in server_arguments(plan, made)
    written, read = open_checkpoint(made), open_checkpoint(source)
    assert written.settings == read.settings
    assert set(written.tensors) == set(read.tensors)
    for name in read.tensors:
        np.testing.assert_array_equal(written.read(name), read.read(name))
    assert Tokenizer.from_file(str(made / "tokenizer.json")).encode("t7 t9").ids == [7, 9]


def max_generate(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--custom-architectures", ARCHITECTURES, "--model-path", str(folder)]
    arguments += ["--devices", "cpu", "--quantization-encoding", "float32", "--max-batch-size=4"]
    return subprocess.run(
        max_command("generate", *arguments, "--max-new-tokens=8", "--top-k=1", *more),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=dict(os.environ),
        check=False,
    )


def test_max_generate_gives_the_same_ids(folder: Path, overrides: tuple[str, ...]) -> None:
    ids = [5, 6, 7]
    (wanted,) = greedy_ids(compiled_alone(*overrides), [ids], 8)
    done = max_generate(folder, "--prompt", words(ids), "--no-enable-prefix-caching")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "".join(words([token]) for token in spoken(wanted)) in done.stdout + done.stderr


def test_replicas_that_are_no_devices_are_a_value_error_of_max_generate(folder: Path) -> None:
    done = max_generate(folder, "--prompt", "t5", "--data-parallel-degree=2")
    assert done.returncode != 0
    assert "ValueError: data_parallel_degree=2 over 1 devices: each device needs" in (
        done.stdout + done.stderr
    )


def test_the_registered_class_gives_hidden_states_that_project_to_hugging_faces_logits() -> None:
    registration = build(plan_for("model=tiny_llama"))
    plan, config = registration.plan, registration.pipeline_config
    source = {"model_path": str(REFERENCE / "tiny_llama")}
    config = config.model_copy(update={"models": {"main": config.model.model_copy(update=source)}})
    model = ServedDecoder(
        config,
        process_session(),
        registration.devices,
        config.model.kv_cache,
        WeightLoader(plan.checkpoint),
        memory_plan=registration.memory_plan,
        return_hidden_states=ReturnHiddenStates.ALL_NORMALIZED,
        max_batch_size=plan.deployment.batch.max_batch_size,
    )
    rows: list[np.ndarray] = []
    execute = model.execute

    def kept(inputs: ModelInputs) -> ModelOutputs:
        outputs = execute(inputs)
        assert outputs.hidden_states is not None
        rows.append(outputs.hidden_states.to_numpy().copy())
        return outputs

    model.execute = kept  # type: ignore[method-assign]
    values = expected("tiny_llama")
    compiled = Compiled(registration, process_session(), model, cache_hit=False)
    greedy_ids(compiled, [values["prompt_0"]], 1)
    logits = rows[0] @ plan.checkpoint.read("lm_head.weight").T
    np.testing.assert_allclose(logits, values["all_0"], atol=1e-4, rtol=0)


def test_a_tensor_that_max_does_not_hand_over_is_named_before_anything_is_compiled() -> None:
    registration = build(plan_for("model=tiny_llama"))
    checkpoint, folder = registration.plan.checkpoint, REFERENCE / "tiny_llama"
    main = registration.pipeline_config.model.model_copy(update={"model_path": str(folder)})
    config = registration.pipeline_config.model_copy(update={"models": {"main": main}})

    def renamed(state: Mapping[str, Weights], **_: object) -> dict[str, WeightData]:
        found = canonical_state_dict(checkpoint.family, state)
        return {name: values for name, values in found.items() if name != "norm.weight"}

    def compiled(*_: object) -> None:
        raise AssertionError("compiled")

    model_cls = type("Model", (ServedDecoder,), {"graph_loader": staticmethod(compiled)})
    with pytest.raises(ConfigError, match=r"the checkpoint has no tensor norm\.weight"):
        model_cls(
            config,
            process_session(),
            registration.devices,
            config.model.kv_cache,
            load_weights(sorted(folder.glob("*.safetensors"))),
            renamed,
            memory_plan=registration.memory_plan,
        )


def test_accelerators_are_served_with_the_inputs_that_the_plan_says() -> None:
    plan = plan_for(
        *("model=tiny_deepseek_v3", "deployment=b200_x2_dp2_ep2", "deployment.max_length=256"),
        *LIMITS,
    )
    arguments = server_arguments(plan, REFERENCE / "tiny_deepseek_v3")
    wanted = {"--devices=gpu:0,1", "--data-parallel-degree=2", "--ep-size=2"}
    assert wanted | {"--quantization-encoding=bfloat16"} <= set(arguments)
    # The same as MAX makes of these arguments.
    model = MAXModelConfig(
        model_path=str(REFERENCE / "tiny_deepseek_v3"),
        device_specs=[DeviceSpec.accelerator(n) for n in (0, 1)],
        quantization_encoding="bfloat16",
        max_length=256,
        data_parallel_degree=2,
        kv_cache=KVCacheConfig(enable_prefix_caching=False),
    )
    runtime = PipelineRuntimeConfig(ep_size=2, max_batch_size=4, max_batch_input_tokens=512)
    config = PipelineConfig(models={"main": model}, runtime=runtime)
    (served,) = ServedConfig.initialize(config, max_seq_len=256).stages
    (stage,) = plan.stages
    assert resolve_contract(served).leaves == stage.contract.leaves


def test_several_stages_are_not_served() -> None:
    plan = plan_for("model=tiny_llama", "deployment=h100_x4_pp2_tp2")
    with pytest.raises(ConfigError, match=r"deployment.parallel.pipeline: .* several stages"):
        check_servable(plan)
