"""The kernel for the Hub through transformers' own ``kernelize``, loaded from the local folder by ``kernels``.

It runs in axolotl's environment, which holds a ``kernels`` that its transformers accepts (``make test-frameworks``).
"""

from __future__ import annotations

import os
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(
        "SEQTILE_AXOLOTL" not in os.environ,
        reason="SEQTILE_AXOLOTL is not set: the path of an environment with axolotl (make test-frameworks sets it)",
    ),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_equal_untiled_under_ddp(tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The averaged gradients of two steps are those of an untiled model that sees every rank's rows."""
    python = str(Path(os.environ["SEQTILE_AXOLOTL"], "bin", "python"))
    import_module("make").write(tmp_path / "hub_kernel")
    kernel = str(tmp_path / "hub_kernel")
    started = [
        subprocess.Popen(
            [python, str(HERE / "kernelize_ranks.py"), kernel, str(tmp_path / "store"), str(rank), str(ranks)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for rank in started:
        said, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, said
    with capsys.disabled():
        print("\n" + said.splitlines()[-1])
