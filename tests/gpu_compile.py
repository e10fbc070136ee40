"""Every golden accelerator deployment that MAX 26.7 can compile: ``make gpu-compile``.

No accelerator is needed. Cold, each takes minutes; they are compiled one after the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_accelerators import LLAMA, assert_compiles
from test_command import files, rolecall

DEPLOYMENTS = (
    *("h100_x1", "h100_x2_tp2", "h100_x2_dp2", "h100_x4_pp2_tp2"),
    *("b200_x2_dp2_ep2", "b200_lora"),
)
FAILING = {
    "adapters on H100": (
        ("deployment=h100_x1", "+lora=rank16"),
        "MAX can't compile this for cuda:sm_90a: ",
        "constraint failed: Coord is not a value type",
    ),
    "MI300X": (
        ("deployment=mi300x_x2_tp2",),
        "MAX can't compile this for hip:gfx942: ",
        "constraint failed: MMA shape requires CDNA4 or newer",
    ),
}
"""What MAX 26.7 can't compile: what it is, what is told, and MAX's own reason."""


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_golden_deployment_compiles(tmp_path: Path, deployment: str) -> None:
    assert_compiles(tmp_path, deployment)


@pytest.mark.parametrize("name", FAILING)
def test_what_max_cannot_compile_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    overrides, told, reason = FAILING[name]
    done = rolecall(tmp_path, LLAMA, *overrides, "task=compile", status=2, timeout=3000)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert told in line
    assert line.endswith(reason)
    assert files(tmp_path) == {"status.json"}
