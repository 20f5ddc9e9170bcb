"""One training loop for every engine; what differs is behind ``Parallel``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from grid.cases import RATE, Case, Trained, assert_equal, named, tile
from refusals import refused
from seqtile.blocks.instance import installed_forwards
from seqtile.chunks.segment import ChunkForward
from seqtile.lm_loss.tiled_loss import installed_losses
from seqtile.shared_prompts.model import TreeCalls
from seqtile.state.tiled_state import StateForward


class Parallel:
    """A model under an engine. The methods here suit an engine that trains through plain PyTorch."""

    def __init__(self, case: Case, model: nn.Module, rank: int) -> None:
        """Wrap ``model`` and assert the type, world size and placement that this engine claims."""
        self.case, self.model, self.call = case, model, model
        self.wrap(rank)
        self.prepare()

    def prepare(self) -> None:
        """Make what trains the wrapped model."""
        self.optimizer = torch.optim.SGD([p for p in self.call.parameters() if p.requires_grad], lr=RATE)

    @classmethod
    def before(cls, case: Case, model: nn.Module) -> None:
        """Done to the model before it is tiled."""

    def wrap(self, rank: int) -> None:
        raise NotImplementedError

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss / self.case.micro_steps).backward()

    def clip(self, bound: float) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in self.call.parameters() if p.requires_grad], bound)

    def gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients by the names of the unwrapped model, on every rank."""
        return {name: None if p.grad is None else p.grad.clone() for name, p in named(self.model).items()}

    def weights(self) -> dict[str, Tensor]:
        """Whole weights, in the same way."""
        return {name: p.detach().clone() for name, p in named(self.model).items()}

    def step(self, last: bool) -> None:
        """After every micro step; ``last`` of the accumulated ones."""
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Release everything that outlives the model."""

    @classmethod
    def train(cls, case: Case, rank: int, tiled: bool = True) -> Trained:
        """Train ``case`` under this engine."""
        model = case.model()
        cls.before(case, model)
        if tiled and case.options.get("apply") != "wrapped":
            tile(case, model, rank)
        parallel = cls(case, model, rank)
        if tiled and case.options.get("apply") == "wrapped":
            tile(case, parallel.call, rank)
        history = []
        for step in range(case.steps):
            for micro in range(case.micro_steps):
                last = micro == case.micro_steps - 1
                with parallel.sync(last):
                    parallel.backward(case.loss(parallel.call, rank, step * case.micro_steps + micro))
                if last:
                    history.append(parallel.gradients())
                if last and case.clip:
                    parallel.clip(case.clip)
                parallel.step(last)
        for loss in installed_losses(model):
            assert not loss.told, loss.told  # it ran untiled, and equal
        carriers = [carrier for carrier in installed_forwards(model) if isinstance(carrier, StateForward)]
        assert bool(carriers) == (tiled and "state" in case.more)
        assert not any(carrier.told for carrier in carriers), [carrier.told for carrier in carriers]
        chunked = [forward for forward in installed_forwards(model) if isinstance(forward, ChunkForward)]
        assert bool(chunked) == (tiled and "chunk" in case.more)
        longest = case.lengths[rank] + case.grow * (case.steps * case.micro_steps - 1)
        for forward in chunked:
            expected = -(-longest // case.more["chunk"])
            enough = forward.chunks > expected if case.shared and rank == 0 else max(forward.chunks, 1) == expected
            assert not forward.refused and enough, (forward.refused, forward.chunks)
        hooks = [getattr(hook, "__self__", None) for inner in model.modules() for hook in inner._forward_hooks.values()]
        shared = [hook for hook in hooks if isinstance(hook, TreeCalls)]
        assert len(shared) == (tiled and case.shared)
        assert all((calls.tokens < calls.tokens_apart) == (case.lengths[rank] > 20) for calls in shared)
        weights = parallel.weights()
        parallel.close()
        return Trained(history, weights)

    @classmethod
    def run(cls, case: Case, rank: int) -> None:
        """Train ``case`` and compare, or see it refused."""
        if case.refused:
            with refused(*case.refused):
                cls.train(case, rank)
            return
        assert_equal(case, cls.train(case, rank), lambda: cls.train(case, rank, tiled=False))
