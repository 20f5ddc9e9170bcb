"""Count what log-probabilities and divergences of long rollouts cost: matrix products, and bytes of live tensors.

    python benchmarks/rl_losses.py [--tokens 262144 --trained 0.1 --hidden 4096 --vocabulary 151936]

One forward and backward each, in bf16, on fake tensors: nothing is computed, what would be held is counted. A share of
the tokens has a target; sums go into fp32 as on an accelerator, blocks of rows are as large as there. TRL's functions
are counted on the path that they take without Triton; with Triton their element-wise kernels hold less, and were not
run.
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from seqtile import HeadInput, count_live_bytes, count_products, linear_cross_entropy, linear_divergence, token_logprobs
from seqtile.ops.grad_accumulator import as_on_an_accelerator
from seqtile.ops.lm_loss.kept_tokens import KeptTokens

Given = dict[str, Tensor]


def plain_logprobs(given: Given) -> Tensor:
    log_p = F.linear(given["hidden"], given["weight"]).float().log_softmax(-1)
    return log_p.gather(-1, given["labels"].unsqueeze(-1)).sum()


def seqtile_loss(given: Given) -> Tensor:
    return linear_cross_entropy(given["hidden"], given["weight"], given["labels"])


def seqtile_logprobs(given: Given) -> Tensor:
    scores = token_logprobs(given["hidden"], given["weight"], given["labels"], entropy=True)
    return scores.log_probs.sum() + scores.entropy.sum()  # type: ignore[union-attr]


def seqtile_with_reference(given: Given) -> Tensor:
    scores = token_logprobs(given["hidden"], given["weight"], given["labels"], entropy=True, reference=given["teacher"])
    return (scores.log_probs - scores.reference).sum() + scores.entropy.sum()  # type: ignore[operator, union-attr]


def trl_logprobs(given: Given) -> Tensor:
    """Of every token: what TRL does where Triton does not run."""
    utils = import_module("trl.trainer.utils")
    chunk, function = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction
    outputs = ("log_probs", "entropy")
    found = function.apply(
        given["hidden"], given["weight"], None, given["labels"], 1.0, chunk, None, 1.0, outputs
    )  # fmt: skip
    return found[0].sum() + found[1].sum()  # type: ignore[no-any-return]


def trl_trained_logprobs(given: Given) -> Tensor:
    """Of the trained tokens: what TRL does where Triton runs."""
    index = given["index"]
    compact = given | {"hidden": given["hidden"].index_select(0, index), "labels": given["labels"][: len(index)]}
    return trl_logprobs(compact)


def plain_divergence(given: Given) -> Tensor:
    """As GKDTrainer computes it, mask last."""
    pairs = ((given["hidden"], given["weight"]), (given["teacher"], given["head"]))
    log_s, log_t = (F.linear(*pair).float().log_softmax(-1) for pair in pairs)
    log_m = torch.stack([log_s + math.log(0.5), log_t + math.log(0.5)]).logsumexp(0)
    each = 0.5 * (F.kl_div(log_m, log_t, reduction="none", log_target=True)
                  + F.kl_div(log_m, log_s, reduction="none", log_target=True))  # fmt: skip
    return each.sum()


def seqtile_divergence(given: Given) -> Tensor:
    teacher = HeadInput(given["teacher"], given["head"])
    return linear_divergence(given["hidden"], given["weight"], given["labels"], teacher, beta=0.5, reduction="sum")


def trl_trained_divergence(given: Given) -> Tensor:
    """Its mask is applied before the call."""
    function = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    student, teacher = (given[name].index_select(0, given["index"]) for name in ("hidden", "teacher"))
    found: Tensor = function.apply(student, given["weight"], None, teacher, given["head"], None, 0.5)[0]
    return found.sum()


WAYS: dict[str, Callable[[Given], Tensor]] = {
    "plain PyTorch, log-probabilities": plain_logprobs,
    "TRL's fused head without Triton, log-probabilities and entropy": trl_logprobs,
    "the same on trained tokens alone (with Triton: not run)": trl_trained_logprobs,
    "**seqtile, log-probabilities and entropy**": seqtile_logprobs,
    "**seqtile, those and the reference's**": seqtile_with_reference,
    "**seqtile, cross-entropy**": seqtile_loss,
    "plain PyTorch, JSD with a teacher": plain_divergence,
    "TRL's tiled JSD on trained tokens alone (with Triton: not run)": trl_trained_divergence,
    "**seqtile, JSD with a teacher**": seqtile_divergence,
}


@contextmanager
def as_planned(trained: int) -> Iterator[None]:
    """Fake labels of which so many count, and sums and logits as on an accelerator."""

    def of(labels: Tensor, *_: Any) -> KeptTokens:
        return KeptTokens(labels.numel(), labels[:trained].clone(), torch.empty(trained, dtype=torch.long))

    with mock.patch.object(KeptTokens, "of", of), as_on_an_accelerator():
        yield


def count(way: Callable[[Given], Tensor], asked: Any) -> tuple[float, float]:
    """Products in units of all tokens, and GiB held at the peak beyond states and weights."""
    trained = int(asked.tokens * asked.trained)
    with FakeTensorMode(), as_planned(trained):
        made = {
            "hidden": torch.empty(asked.tokens, asked.hidden, dtype=torch.bfloat16, requires_grad=True),
            "weight": torch.empty(asked.vocabulary, asked.hidden, dtype=torch.bfloat16, requires_grad=True),
            "teacher": torch.empty(asked.tokens, asked.hidden, dtype=torch.bfloat16),
            "head": torch.empty(asked.vocabulary, asked.hidden, dtype=torch.bfloat16),
            "labels": torch.empty(asked.tokens, dtype=torch.long),
            "index": torch.empty(trained, dtype=torch.long),
        }
        with count_products() as products, count_live_bytes() as live:
            way(made).backward()
    return products.flops / (2 * asked.tokens * asked.hidden * asked.vocabulary), live.peak / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 262_144), ("hidden", 4096), ("vocabulary", 151_936)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trained", type=float, default=0.1, help="fraction of the tokens that have a target")
    asked = parser.parse_args()
    print(f"{asked.tokens} tokens, {asked.trained:.0%} trained, {asked.hidden} x {asked.vocabulary}, bf16; counted on "
          f"fake tensors, torch {torch.__version__}, trl {version('trl')}, {datetime.date.today()}")  # fmt: skip
    print("| | matrix products | peak GiB |\n|---|---|---|")
    for name, way in WAYS.items():
        units, peak = count(way, asked)
        print(f"| {name} | {units:.3f} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
