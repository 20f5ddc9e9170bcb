"""Transformers' common model tests with seqtile applied to every model that they build: ``make test-peers``.

    python tests/peers.py [--families llama,gpt2] [--options '{"tile": 4}'] [--write docs/integrations.md]

The tests come from the source distribution of the installed version, which has those of all models but no model's own:
models and inputs are this project's tiny ones. They run twice, without and with seqtile, in a folder of their own. What
passes without only is printed, and the exit code is 1. Needs a package index.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel

import seqtile
import zoo
from newest import Counts, with_row
from seqtile.blocks.instance import installed_forwards

FAMILIES = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi3", "olmo2", "mixtral", "qwen3_moe",
    "deepseek_v3", "gpt_oss",
)  # fmt: skip
ASKS_FOR_OTHER_TESTS = "test_generation_tester_mixin_inheritance"
NAME = "| `make test-peers` |"
ROWS, LENGTH = 3, 11


class Tester:
    """What Transformers' tests ask of a family."""

    batch_size, seq_length, is_training = ROWS, LENGTH, True

    def __init__(self, family: str) -> None:
        self._config = config = zoo.causal_lm(family).config
        self.num_hidden_layers, self.num_attention_heads = config.num_hidden_layers, config.num_attention_heads
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size

    def get_config(self) -> Any:
        return type(self._config).from_dict(self._config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(self.vocab_size, (ROWS, LENGTH))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def cases(*bases: type) -> dict[str, type]:
    """A class of tests for each family, to be put into a module of the distribution's ``tests``."""
    return {f"Test_{family}": _case(family, bases) for family in os.environ["PEERS_FAMILIES"].split(",")}


def _case(family: str, bases: tuple[type, ...]) -> type:
    config = type(AutoConfig.for_model(family))
    attributes = {
        "all_model_classes": (MODEL_MAPPING[config], MODEL_FOR_CAUSAL_LM_MAPPING[config]),
        "setUp": lambda self: setattr(self, "model_tester", Tester(family)),
    }
    return type(f"Test_{family}", bases, attributes)


class Tiled:
    """A plugin of pytest: applies seqtile to each model before its first call, and counts those that ran tiles.

    By the class's ``__call__``: a hook on every module would see tiles, so that blocks would run whole.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self.models = options, 0
        self._seen, self._acted = weakref.WeakSet[nn.Module](), weakref.WeakSet[nn.Module]()

    def pytest_sessionstart(self) -> None:
        PreTrainedModel.__call__ = lambda model, *args, **kwargs: self._call(model, *args, **kwargs)

    def _call(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if model not in self._seen:
            self._seen.update(model.modules())
            seqtile.apply(model, **self._options)
        output = nn.Module.__call__(model, *args, **kwargs)
        if model not in self._acted and any(forward.acted for forward in installed_forwards(model)):
            self._acted.update(model.modules())
            self.models += 1
        return output


class Outcomes(Counts):
    """A plugin of pytest that keeps what passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def run(folder: Path, options: dict[str, Any] | None) -> tuple[Outcomes, Tiled]:
    outcomes, tiled = Outcomes(), Tiled(options or {})
    arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "-k", f"not {ASKS_FOR_OTHER_TESTS}"]
    file = folder / "tests" / "test_families.py"
    pytest.main([*arguments, "--rootdir", str(folder), str(file)], [outcomes] if options is None else [outcomes, tiled])
    return outcomes, tiled


def unpack(folder: Path) -> None:
    """Put the distribution's tests into ``folder``, with stand-ins for what it lacks, and what they import beside."""
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "install", "--target", str(folder), "parameterized"], check=True)
    source = [f"transformers=={transformers.__version__}", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    subprocess.run([*pip, "download", "-d", str(folder), *source], check=True)
    [archive] = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, [m for m in files if m.name.split("/")[1:2] == ["tests"]], filter="data")
    (folder / archive.name.removesuffix(".tar.gz") / "tests").rename(folder / "tests")
    for module, name in (("generation/test_utils", "Generation"), ("exporters/test_export", "Export")):
        file = folder / "tests" / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        for package in (file.parent, folder / "tests"):
            (package / "__init__.py").touch()
        file.write_text(f"class {name}TesterMixin: pass\n")
    (folder / "tests" / "test_families.py").write_text(
        "import unittest\nimport peers\nfrom .test_modeling_common import ModelTesterMixin\n"
        "globals().update(peers.cases(ModelTesterMixin, unittest.TestCase))\ndel ModelTesterMixin\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--options", type=json.loads, default={"tile": 4})
    parser.add_argument("--write", type=Path, help="a page whose table gets a row")
    arguments = parser.parse_args()
    os.environ["PEERS_FAMILIES"] = arguments.families
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(folder)
        sys.path.insert(0, str(folder))
        without, _ = run(folder, None)
        within, tiled = run(folder, arguments.options)
    lost = sorted(without.passed - within.passed)
    print(f"without seqtile: {without}; with {arguments.options} on {tiled.models:,} models: {within}")
    print(*(f"passes without seqtile only: {test}" for test in lost), sep="\n")
    if arguments.write:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        ran = f"{arguments.families.replace(',', ', ')}: {within}; {tiled.models:,} models ran tiles"
        row = f"{NAME} {versions} | {ran} | {datetime.date.today()} |"
        arguments.write.write_text(with_row(arguments.write.read_text("utf-8"), row), "utf-8")
    return 1 if lost or not tiled.models else 0


if __name__ == "__main__":
    sys.exit(main())
