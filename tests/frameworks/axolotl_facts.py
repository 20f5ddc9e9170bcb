"""Run in axolotl's environment: prints, as JSON, what the stand-ins claim and what its validation says of some files.

``python axolotl_facts.py MODEL OUTPUT FILE...``
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any

import axolotl.cli.config as config
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.integrations.cut_cross_entropy.args import CutCrossEntropyArgs
from axolotl.integrations.kernels.args import KernelsArgs
from axolotl.integrations.liger.args import LigerArgs
from axolotl.utils.schemas.config import AxolotlInputConfig


def defaults(model: Any) -> dict[str, Any]:
    return {name: field.default for name, field in model.model_fields.items()}


def judge(path: str, model: str, output: str) -> str:
    """axolotl's verdict on a configuration, as on 8 GPUs: "" or why it is refused."""
    PluginManager.get_instance().plugins.clear()
    try:
        config.load_cfg(path, base_model=model, output_dir=output)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        return str(error)
    return ""


def main() -> None:
    model, output, *files = sys.argv[1:]
    os.environ["AXOLOTL_IS_PREPROCESS"] = "1"  # no process group: a DeepSpeed configuration would start one with NCCL
    sys.modules["ring_flash_attn"] = ModuleType("ring_flash_attn")  # it needs flash-attn, and that CUDA
    config.gpu_capabilities = lambda: (
        {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 8, "compute_capability": "sm_90"},
        {"torch_version": version("torch").split("+")[0]},
    )
    verdicts = {path: judge(path, model, output) for path in files}
    facts = {
        "versions": {name: version(name) for name in ("axolotl", "torch", "transformers", "accelerate", "deepspeed")},
        "hooks": {name: list(inspect.signature(value).parameters) for name, value in vars(BasePlugin).items()
                  if inspect.isfunction(value) and not name.startswith("_")},
        "fields": {name: repr(value) for name, value in defaults(AxolotlInputConfig).items()},
        "other_fields": sorted({**defaults(CutCrossEntropyArgs), **defaults(KernelsArgs), **defaults(LigerArgs)}),
        "verdicts": verdicts,
    }  # fmt: skip
    print("FACTS " + json.dumps(facts))


if __name__ == "__main__":
    main()
