"""Count and time a step of GRPO whose answers share a prompt: one row per answer, and each prompt once.

    python benchmarks/shared_prompts.py [--prompt 4096 --answers 8 --answer 256 --layers 4]

Forward and backward of a small Llama under activation checkpoints, every weight, fp32, one thread: FLOPs of all
products and attention kernels (a causal square counted whole), peak of live bytes beyond the weights, processor time.
The answers' log-probabilities come from seqtile's tiled head everywhere, and all losses are compared. TRL's gather is
its layout (``TreeRow``): keys and values of every path from the root to a segment, selected in each layer. Its own
kernel, FlashAttention-3, runs on no CPU; here the CPU's kernel reads what it selects.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import seqtile
from seqtile._compat import FLASH_CPU, FLASH_CPU_BACKWARD
from seqtile.ops.attention import piece_kernels
from seqtile.ops.attention.piece_kernels import Piece
from seqtile.ops.attention.segment_tree import SegmentTable, tree_attention

VOCABULARY = 4096


def model_of(layers: int, tokens: int) -> Any:
    """A Llama with random weights."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def apart(model: Any, samples: list[Tensor], prompt: int) -> Tensor:
    """Log-probabilities of all answers, from a batch with one row per sample."""
    ids = torch.stack(samples)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
    return seqtile.token_logprobs(hidden, model.lm_head.weight, ids[:, prompt:]).log_probs.flatten()


def together(model: Any, samples: list[Tensor], prompt: int) -> Tensor:
    """The same, from one row with the prompt once."""
    row = seqtile.tree_row(samples, [prompt] * len(samples))
    hidden = model.model(**row.inputs).last_hidden_state
    scores = seqtile.token_logprobs(hidden, model.lm_head.weight, row.labels)
    return torch.cat(row.of_samples(scores.log_probs))


class OnPath(torch.autograd.Function):
    """A segment's queries on the keys of its path, its own last: a fused kernel that is causal to the lower right."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        own, before = slice(k.shape[2] - q.shape[2], None), slice(0, k.shape[2] - q.shape[2])
        output, lse = piece_kernels.forward(q, k[:, :, own], v[:, :, own], Piece(scale, True))
        if k.shape[2] > q.shape[2]:
            piece = piece_kernels.forward(q, k[:, :, before], v[:, :, before], Piece(scale, False))
            output, lse = piece_kernels.join(output, lse, *piece)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.rest = own, before, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, output, lse = ctx.saved_tensors
        own, before, scale = ctx.rest
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        for keys, causal in ((own, True), (before, False)):
            if keys.start or keys.stop:
                of_piece = piece_kernels.backward(
                    grad, q, k[:, :, keys], v[:, :, keys], output, lse, Piece(scale, causal)
                )
                dq += of_piece[0]
                dk[:, :, keys], dv[:, :, keys] = of_piece[1:]
            elif causal:
                return (*piece_kernels.backward(grad, q, k, v, output, lse, Piece(scale, True)), None)
        return dq, dk, dv, None


def gathered(query: Tensor, key: Tensor, value: Tensor, segments: SegmentTable, *, scale: float, **_: Any) -> Tensor:
    """Attention on keys and values that are selected for every path."""
    bounds = list(zip(segments.starts, segments.ends, strict=True))
    paths = [
        torch.cat([torch.arange(*bounds[part]) for part in segments.path(number)]) for number in range(len(bounds))
    ]
    index, sizes = torch.cat(paths), [len(path) for path in paths]
    keys, values = (tensor.index_select(2, index).split(sizes, 2) for tensor in (key, value))
    outputs = [
        OnPath.apply(query[:, :, start:end], k, v, scale)  # type: ignore[no-untyped-call]
        for (start, end), k, v in zip(bounds, keys, values, strict=True)
    ]
    return torch.cat(outputs, 2)


def attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Of a forward, from shapes: scores and weighted values."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))


def attention_gradient_flops(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> int:
    """Of a backward: scores again, and two products for each of the forward's two."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3]))


ATTENTION = {
    FLASH_CPU.overloadpacket: attention_flops, FLASH_CPU_BACKWARD.overloadpacket: attention_gradient_flops,
}  # fmt: skip
"""PyTorch's counter has no formula for the CPU's kernel."""

BEST: dict[str, Any] = dict(tile=1024, heads=1, blocks="mlp+norm+projections")
WAYS: dict[str, tuple[Callable[..., Tensor], dict[str, Any] | None, Any]] = {
    "one row per answer": (apart, None, None),
    "one row per answer, seqtile's tiles": (apart, dict(BEST, checkpoint="layer"), None),
    "prompt once, keys gathered as by TRL": (together, None, gathered),
    "**prompt once**": (together, None, tree_attention),
    "**prompt once, seqtile's tiles**": (together, dict(BEST, checkpoint="layer"), tree_attention),
    "**prompt once, tiles, attention's output saved**": (together, dict(BEST, checkpoint="attention-saved"),
                                                         tree_attention),
    "**prompt once, chunks of 1,024 tokens**": (together, dict(chunk=1024, checkpoint="layer"), tree_attention),
}  # fmt: skip
"""Log-probabilities, what :func:`seqtile.apply` does, and the attention of rows with shared prompts."""


def measure(name: str, asked: Any) -> tuple[float, float, float, Tensor]:
    """(GFLOP, MiB, processor seconds, loss and norm of all gradients)."""
    log_probs_of, applied, attention = WAYS[name]
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCABULARY, (asked.prompt,), generator=generator)
    samples = [
        torch.cat([prompt, torch.randint(VOCABULARY, (asked.answer,), generator=generator)])
        for _ in range(asked.answers)
    ]
    model = model_of(asked.layers, asked.prompt + asked.answer)
    if attention is not None:
        seqtile.share_prompts(model)
    if applied is not None:
        seqtile.apply(model, **applied)
    if not applied or applied.get("checkpoint") == "layer":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = torch.linspace(-1, 1, asked.answers * asked.answer)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = -(log_probs_of(model, samples, asked.prompt) * weights).mean()
        loss.backward()
        gradients = torch.stack([weight.grad.norm() for weight in model.parameters()])
        return torch.stack([loss.detach(), gradients.norm()])

    with mock.patch("seqtile.shared_prompts.model.tree_attention", attention or tree_attention):
        began = time.process_time()
        found = step()
        seconds = time.process_time() - began
        model.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as flops:
            step()
        model.zero_grad(set_to_none=True)
        with seqtile.count_live_bytes() as live:
            step()
    return flops.get_total_flops() / 1e9, live.peak / 2**20, seconds, found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 4096), ("answers", 8), ("answer", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"prompt of {asked.prompt}, {asked.answers} answers of {asked.answer}, {asked.layers} layers, torch "
          f"{torch.__version__}, transformers {version('transformers')}, {datetime.date.today()}")  # fmt: skip
    print("| | GFLOP | peak MiB | processor s |\n|---|---|---|---|")
    expected = None
    for name in WAYS:
        gigaflops, mebibytes, seconds, found = measure(name, asked)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        print(f"| {name} | {gigaflops:,.0f} | {mebibytes:,.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
