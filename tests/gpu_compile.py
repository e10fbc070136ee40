"""Every golden accelerator deployment that MAX 26.7 can compile: ``make gpu-compile``.

No accelerator is needed. Cold, each takes minutes; they are compiled one after the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_accelerators import assert_compiles

DEPLOYMENTS = (
    *("h100_x1", "h100_x2_tp2", "h100_x2_dp2", "h100_x4_pp2_tp2"),
    *("mi300x_x2_tp2", "b200_x2_dp2_ep2", "b200_lora"),
)


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_golden_deployment_compiles(tmp_path: Path, deployment: str) -> None:
    assert_compiles(tmp_path, deployment)
