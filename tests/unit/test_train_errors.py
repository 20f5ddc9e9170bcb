"""An error of another library is one sentence in its own words; one of ours keeps its traceback, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

import tiny_run
from refusals import command_refused
from seqtile._errors import OUR_FAULT, is_ours
from seqtile.cli import main
from seqtile.train.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_run.save_model(tmp_path / "model")
    tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    return tmp_path


def command(folder: Path, **recipe: Any) -> list[str]:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    given = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--max-length", "64"]
    more = ["--steps", "1", "--tile", "16", "--output", str(folder / "out"), "--recipe", str(folder / "recipe.yaml")]
    return ["train", *given, *more]


def raise_in(library: bool) -> BaseException:
    """An error that PyTorch raises for a call of seqtile's, or for one of transformers'."""
    try:
        if library:
            AutoConfig.for_model("no-such")
        else:
            from seqtile.tiling import parse_bytes

            parse_bytes(torch.zeros(2))  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        return error
    raise AssertionError


def test_whose_error_it_is() -> None:
    assert not is_ours(raise_in(library=True)) and is_ours(raise_in(library=False))


@pytest.mark.parametrize(
    ("trainer", "refusal"),
    [
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, ("train.first-step-fails",)),
        ({"eos_token": "<nope>"}, ("trainer.rejects", "'<nope>'")),
        ({"activation_offloading": True}, ("trainer.needs-accelerator",)),
        ({"use_liger_kernel": True}, ("trainer.liger-missing", "pip install liger-kernel")),
        ({"push_to_hub": True}, ("trainer.hub-unreachable",)),
        ({"padding_free": True}, ("trainer.padding-free-unpacked",)),
        ({"fp16": True}, ("trainer.needs-accelerator", "fp16")),
    ],
    ids=str,
)
def test_a_setting_that_a_library_refuses(
    trainer: dict[str, Any], refusal: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqtile.train import check_early

    monkeypatch.setattr(check_early, "find_spec", lambda _: None)  # as if liger-kernel were not installed
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    command_refused(command(folder, trainer=trainer), *refusal)


def test_adapters_are_no_model(folder: Path) -> None:
    (folder / "model" / "config.json").rename(folder / "model" / "adapter_config.json")
    command_refused(command(folder), "model.adapters-only")


def test_what_a_checkpoint_of_the_model_alone_lacks_is_said(folder: Path, capsys: Any) -> None:
    assert main(command(folder, trainer={"save_only_model": True}, save_steps=1)) == 0
    assert main(["train", "--resume", "--output", str(folder / "out"), "--steps", "2"]) == 0
    assert "optimizer and schedule start anew" in capsys.readouterr().err


def test_what_a_model_raises_in_its_first_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def forward(*args, **kwargs):\n    raise AttributeError('no attribute of that name')\n"
    names: dict[str, Any] = {"__name__": "transformers.models.llama.modeling_llama"}
    exec(compile(source, "modeling_llama.py", "exec"), names)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward", names["forward"])
    value = "AttributeError: no attribute of that name; raised by transformers in modeling_llama.py"
    command_refused(command(folder), "train.first-step-fails", value)


def test_a_fault_of_ours_is_a_traceback_that_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "seqtile.train.trainer"}
    exec(compile("def begin(self):\n    raise KeyError('planted')\n", "trainer.py", "exec"), names)
    monkeypatch.setattr(Trainer, "begin", names["begin"])
    with pytest.raises(KeyError, match="planted") as caught:
        main(command(folder))
    assert OUR_FAULT in caught.value.__notes__


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_a_plan_of_a_model_whose_code_needs_a_mask(attention: str, tmp_path: Path, capsys: Any) -> None:
    sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, vocab_size=256,
                 num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2)  # fmt: skip
    AutoConfig.for_model("deepseek_v32", **sizes).save_pretrained(tmp_path)
    given = ["plan", "--model", str(tmp_path), "--device", "h100", "--max-length", "4096", "--attention", attention]
    code, shown = main(given), capsys.readouterr()
    assert code == (2 if attention == "flash" else 0)
    if code:
        assert "does not run on fake tensors" in shown.err and "try another attention" in shown.err
        assert shown.err.count("\n") == 1
