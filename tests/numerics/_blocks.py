"""Small position-wise blocks, their tiled and untiled runs, and errors against a truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call
from torch.nn import functional as F

from seqtile.ops import tile_checkpoint

HIDDEN, INTERMEDIATE = 6, 10


class Gated(nn.Module):
    """Llama's MLP, with biases so that they are tested too."""

    def __init__(
        self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, *, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=bias)
        self.up = nn.Linear(hidden, intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate(x)) * self.up(x)
        return self.down(F.dropout(inner, self.dropout, self.training))


class Tiled(nn.Module):
    """``block`` in tiles of ``tile`` tokens, or in as many tiles as ``tile`` is long."""

    def __init__(self, block: nn.Module, tile: int | Sequence[int]) -> None:
        super().__init__()
        self.block = block
        self.tile = tile

    def forward(self, *tensors: Tensor, **kwargs: Any) -> Any:
        sizes = cut(tensors[0].shape[:-1].numel(), self.tile) if isinstance(self.tile, int) else self.tile

        def weights() -> dict[str, Tensor]:
            return {name: weight for name, weight in self.block.named_parameters() if weight.requires_grad}

        def run(tiles: Sequence[Tensor], aliases: Any) -> Any:
            return functional_call(self.block, dict(aliases), tuple(tiles), kwargs)

        return tile_checkpoint.run_in_tiles(run, tensors, sizes, weights)


def cut(tokens: int, tile: int) -> tuple[int, ...]:
    """Tiles of ``tile`` tokens and what is left."""
    whole, rest = divmod(tokens, tile)
    return (tile,) * whole + ((rest,) if rest else ())


def shards(tokens: int, count: int) -> tuple[int, ...]:
    """``count`` tiles, as equal as they can be."""
    return tuple(tokens * (i + 1) // count - tokens * i // count for i in range(count))


def block(seed: int = 0, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Gated:
    """A gated MLP with its own random weights."""
    torch.manual_seed(seed)
    return Gated(**kwargs).to(dtype)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """The same numbers on every device: drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    return drawn.to(torch.get_default_device()).requires_grad_(grad)


def gradients(
    model: nn.Module, inputs: Sequence[Tensor], upstream: Tensor | Callable[[Any], Tensor]
) -> dict[str, Tensor | None]:
    """Outputs and every gradient of one forward and backward: ``output.0``, ``input.0`` and the parameters' names.

    Names are the untiled model's: wrappers called ``block`` are left out of them.

    ``upstream`` is the gradient of the output, or a function that makes a loss of whatever the model returns.
    """
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    model.zero_grad()
    output = model(*inputs)
    if isinstance(upstream, Tensor):
        output.backward(upstream)
    else:
        upstream(output).backward()
    tensors = [output] if isinstance(output, Tensor) else [t for t in output if isinstance(t, Tensor)]
    result: dict[str, Tensor | None] = {f"output.{number}": t.detach() for number, t in enumerate(tensors)}
    result |= {f"input.{number}": x.grad for number, x in enumerate(inputs)}
    result |= {
        name.replace("_orig_mod.", "").replace("block.", ""): weight.grad for name, weight in model.named_parameters()
    }
    return result


def assert_same(ours: dict[str, Tensor | None], twin: dict[str, Tensor | None]) -> None:
    """Same names, ``None`` where the twin has it, and equal numbers within PyTorch's defaults for the dtype."""
    assert ours.keys() == twin.keys()
    for name, expected in twin.items():
        actual = ours[name]
        if expected is None or actual is None:
            assert actual is expected, f"{name}: got {actual}, expected {expected}"
            continue
        torch.testing.assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")


def assert_tiled_is_untiled(
    model: nn.Module, inputs: Sequence[Tensor], upstream: Any, tile: int | Sequence[int]
) -> None:
    """The checker of most tests: ``model`` in tiles against itself untiled."""
    assert_same(gradients(Tiled(model, tile), inputs, upstream), gradients(model, inputs, upstream))


def check_gradcheck(net: nn.Module, fast_mode: bool = False, width: int = HIDDEN) -> None:
    """Finite differences of input and weights, in float64 and to the last bit the same in every run."""
    net.double()
    names = [name for name, _ in net.named_parameters()]
    weights = [weight.detach().requires_grad_() for weight in net.parameters()]

    def of_everything(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(net, dict(zip(names, values, strict=True)), (x,))

    x = random(2, 5, width, dtype=torch.float64)
    try:
        assert torch.autograd.gradcheck(of_everything, [x, *weights], nondet_tol=0.0, fast_mode=fast_mode)
    except GradcheckError as error:
        raise AssertionError(str(error)) from error
