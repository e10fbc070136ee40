"""A sweep of 36 jobs for the tests of its page: real plans, and results made by hand."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from conftest import plan_for

from builder.report import contract_json, plan_json
from builder.summary import JobRow
from models.errors import ConfigError

MODELS = ("tiny_llama", "tiny_deepseek_v3", "tiny_idefics3")
DEPLOYMENTS = (
    *("cpu", "cpu_variable_logits", "tp2", "dp2", "pp3_uneven", "pp2_tp2"),
    *("ep2_tp2", "lora_tp2", "vision", "h100_x1", "h100_x4_pp2_tp2", "b200_x2_dp2_ep2"),
)
SHARED = "task.max_new_tokens=8"
OWN = "deployment.batch.max_batch_size=4"
TRACEBACK = "\n".join(["RuntimeError: a kernel failed", *(f"  frame {n}" for n in range(30))])

ENDED: dict[tuple[str, str], dict[str, Any]] = {
    ("tiny_llama", "dp2"): {"status": "interrupted"},
    ("tiny_llama", "pp2_tp2"): {"status": "error", "error": TRACEBACK},
    ("tiny_llama", "lora_tp2"): {"status": "running"},
    ("tiny_deepseek_v3", "cpu_variable_logits"): {"status": "killed", "error": "it is gone"},
    ("tiny_deepseek_v3", "tp2"): {"status": "failed", "error": "it differs"},
    ("tiny_deepseek_v3", "dp2"): {"status": "failed", "error": "it differs"},
}
"""The jobs that did not end well; and those of the last model's accelerators did not begin."""

DIFFERENCES = {"cpu": 0.0, "tp2": 3e-3, "dp2": None}
"""The largest differences, where they are not 1e-6."""


@cache
def sweep() -> tuple[JobRow, ...]:
    """The jobs."""
    pairs = [(model, deployment) for model in MODELS for deployment in DEPLOYMENTS]
    return tuple(_row(number, *pair) for number, pair in enumerate(pairs))


def refused(row: JobRow) -> bool:
    """Whether a job was refused before it had a contract."""
    return row.status == "error" and row.contract is None


def _row(number: int, model: str, deployment: str) -> JobRow:
    facts: dict[str, Any] = {
        "job": str(number),
        "model": model,
        "deployment": deployment,
        "task": "verify",
        "overrides": (SHARED, OWN) if number == 5 else (SHARED,),
    }
    if number >= 33:
        return JobRow(**facts, status="not run")
    try:
        plan = plan_for(f"model={model}", f"deployment={deployment}")
    except ConfigError as error:
        return JobRow(**facts, status="error", error=str(error))
    facts["plan"] = json.loads(json.dumps(plan_json(plan)))
    facts["contract"] = json.loads(json.dumps(contract_json(plan)))
    ended = ENDED.get((model, deployment), {"status": "ok"})
    if ended["status"] in ("ok", "failed") and plan.capacity is None:
        facts.update(_results(number, ended["status"] == "ok", deployment))
    return JobRow(**facts, **ended)


def _results(number: int, passed: bool, deployment: str) -> dict[str, Any]:
    largest = 1e-6 if passed and deployment != "cpu" else DIFFERENCES[deployment]
    rate = 40.0 + 7 * number
    return {
        "seconds": {"resolve": 0.1, "build": 0.8, "compile": 20.0 + number, "run": 3.5},
        "verify": {
            "pass": passed,
            "tolerance": 1e-4,
            "encoding": "float32",
            "relative": False,
            "max_abs_diff": largest,
            "max_rel_diff": largest,
            "tokens_equal": passed,
        },
        "metrics": {"generated_tokens": 24, "generated_tok_s": rate, "step_ms": 1e3 / rate},
        "generations": (
            *({"error": None, "ttft_ms": 9.0 * n, "decode_tok_s": rate / n} for n in (1, 2, 3)),
            {"error": "refused", "finish": "error"},
        ),
    }
