"""What real decoder layers hold, in bytes counted as tensors come and go."""

import pytest
import torch
from torch import nn

import seqtile
from zoo import causal_lm, tokens

LENGTH = 512


def _checkpointed(architecture: str) -> nn.Module:
    model = causal_lm(architecture, num_hidden_layers=4, max_position_embeddings=LENGTH)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _bytes(model: nn.Module) -> tuple[int, int]:
    """(held between forward and backward, peak of the step)."""
    backbone, ids = model.model, tokens(1, LENGTH)
    with seqtile.count_live_bytes("cpu") as live:
        hidden = backbone(ids).last_hidden_state
        held = live.now
        hidden.backward(torch.ones_like(hidden))
        return held, live.peak


@pytest.mark.parametrize("blocks", ["mlp", "mlp+norm"])
@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt", "mixtral"])
def test_nothing_more_is_held_between_forward_and_backward(architecture: str, path: str, blocks: str) -> None:
    """Under a checkpoint a layer keeps its input; a tile's closure must not keep the block's input beside it."""
    model = _checkpointed(architecture)
    if architecture == "opt":
        model.model = model.model.decoder
    untiled, _ = _bytes(model)
    seqtile.apply(model, tile=64, path=path, blocks=blocks)
    tiled, _ = _bytes(model)
    # beside tensors of the batch, PyTorch's checkpoint keeps one empty tensor and a few bytes per layer
    assert tiled <= untiled + 4096


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_the_norm_in_the_tile_lowers_the_layers_peak(architecture: str, path: str) -> None:
    model = _checkpointed(architecture)
    _, untiled = _bytes(model)
    peaks = {}
    for blocks in ("mlp", "mlp+norm"):
        with seqtile.applied(model, tile=64, path=path, blocks=blocks):
            _, peaks[blocks] = _bytes(model)
    assert peaks["mlp+norm"] <= peaks["mlp"] < untiled
