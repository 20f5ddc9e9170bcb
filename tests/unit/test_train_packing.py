"""Packing in `seqtile train`: documents stay apart in what is collated, and a model that mixes them is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqtile
import tiny_run
from refusals import command_refused, refused
from seqtile.train.packing import check_packing
from zoo import FALCON_READS_POSITIONS, causal_lm

BFD = SimpleNamespace(packing=True, packing_strategy="bfd", padding_free=False)


def arguments(**change: Any) -> Any:
    return SimpleNamespace(**{**vars(BFD), **change})


@pytest.mark.parametrize(
    ("architecture", "attention", "dtype"),
    [("llama", "eager", torch.bfloat16), ("gemma3_text", "sdpa", torch.float32), ("gpt2", "sdpa", torch.bfloat16),
     ("mixtral", "eager", torch.float32)],
)  # fmt: skip
def test_a_model_that_keeps_documents_apart_may_pack(architecture: str, attention: str, dtype: torch.dtype) -> None:
    model = causal_lm(architecture, dtype, attn_implementation=attention)
    check_packing(model, arguments())
    assert model.training


@pytest.mark.parametrize("architecture", ["opt", "falcon", "gpt_oss"])
def test_a_model_that_mixes_documents_is_refused(architecture: str) -> None:
    if architecture == "falcon" and FALCON_READS_POSITIONS:
        check_packing(causal_lm(architecture, torch.bfloat16), arguments())
        return
    model = causal_lm(architecture, torch.bfloat16)
    for asked in (arguments(), arguments(packing=False, padding_free=True)):
        with refused("packing.no-document-mask"):
            check_packing(model, asked)
    for allowed in (arguments(packing=False), arguments(packing_strategy="wrapped")):
        check_packing(model, allowed)


class ShortConv(nn.Module):
    """A layer with a state: a token reads the one before it, and that of the document before unless it is told."""

    def __init__(self, restarts: bool) -> None:
        super().__init__()
        self.restarts, self.proj = restarts, nn.Linear(8, 8)

    def forward(self, hidden: Tensor, seq_idx: Tensor) -> Tensor:
        before = F.pad(hidden, (0, 0, 1, -1))
        if self.restarts:
            before = before.masked_fill((seq_idx != F.pad(seq_idx, (1, -1)))[..., None], 0.0)
        return hidden + self.proj(before)


class Recurrent(nn.Module):
    def __init__(self, restarts: bool) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.ModuleDict({"conv": ShortConv(restarts)}) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Tensor, use_cache: bool, seq_idx: Tensor | None = None, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer["conv"](hidden, torch.zeros_like(input_ids) if seq_idx is None else seq_idx)
        return SimpleNamespace(logits=self.lm_head(hidden))


@pytest.mark.parametrize("asked", [{}, {"packing": False, "padding_free": True}], ids=["packing", "padding_free"])
def test_a_state_that_starts_again_at_every_document_may_be_packed(asked: dict[str, Any]) -> None:
    check_packing(Recurrent(restarts=True), arguments(**asked))
    with refused("packing.shared-state", "short convolution, in layers.0"):
        check_packing(Recurrent(restarts=False), arguments(**asked))


def test_a_model_without_position_ids_is_refused() -> None:
    model = causal_lm("llama")
    model.forward = lambda input_ids, use_cache: None  # type: ignore[method-assign]
    with refused("packing.no-document-mask"):
        check_packing(model, arguments())


@pytest.mark.parametrize("path", ["fused", "generic"])
def test_what_the_trainer_packs_stays_apart(path: str) -> None:
    """TRL's packing and collator, as `packing: true` sets them up: from documents to a tiled model's gradients."""
    datasets = pytest.importorskip("datasets")
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in (13, 7, 5, 3)]
    model = causal_lm("llama", use_cache=False)
    seqtile.apply(model, tile=4, path=path)

    def batch(texts: list[list[int]]) -> dict[str, Any]:
        rows = pack_dataset(datasets.Dataset.from_dict({"input_ids": texts}), seq_length=20, strategy="bfd")
        return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([dict(row) for row in rows])

    def seen(texts: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and gradient at the embeddings, of the document of ``length`` tokens in the packed batch."""
        inputs = batch(texts)
        assert "attention_mask" not in inputs and inputs["input_ids"].shape == (1, 28)
        ends = inputs["cu_seq_lens_q"].tolist()
        start = next(start for start, end in zip(ends, ends[1:], strict=False) if end - start == length)
        outputs: list[torch.Tensor] = []
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: outputs.append(output.detach().requires_grad_()) or outputs[0]
        )
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0]
        hook.remove()
        logits[start : start + length].square().sum().backward()
        gradient = outputs[0].grad
        assert gradient is not None
        outside = gradient[0].clone()
        outside[start : start + length] = 0
        assert not outside.any(), "another document has a gradient"
        return logits[start : start + length].detach(), gradient[0, start : start + length]

    before = seen(texts, 7)
    after = seen([[3 + (token + 5) % 60 for token in text] if len(text) != 7 else text for text in texts], 7)
    for value, other in zip(before, after, strict=True):
        assert value.any()
        torch.testing.assert_close(other, value)


def test_the_command_refuses_before_anything_is_written(tmp_path: Path) -> None:
    model, data, output = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "out"
    tiny_run.save_tokenizer(model)
    causal_lm("opt", vocab_size=257).save_pretrained(model)
    tiny_run.write_jsonl(data, tiny_run.text_rows())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("packing: true\nsteps: 1\nmax_length: 64\n")
    command = ["train", "--recipe", str(recipe), "--model", str(model), "--dataset", str(data)]
    command_refused([*command, "--output", str(output)], "packing.no-document-mask")
    assert not output.exists()
