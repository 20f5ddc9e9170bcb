"""One real step of a model of which only a few layers run, with the memory that the other layers would hold.

What is left out stands between the upper and the lower half of the layers that run: its weights and optimizer states
all the time, its checkpoints from the forward until the backward has come there, its gradients from then on. So the
device runs out of memory where it would with all layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._errors import UserError
from seqtile.checkpointing.keep_attention import kept_per_token
from seqtile.counting.live import count_live_bytes
from seqtile.devices import synchronize
from seqtile.models.configs import read_config
from seqtile.models.layer_fields import first_layers
from seqtile.ops.attention.kernel_calls import names_of_kernels
from seqtile.options import changed
from seqtile.planner.accelerators import Device
from seqtile.planner.fake_step import build, build_bare, compute_loss, prepare_optimizer, update
from seqtile.planner.layer_structure import find_depths
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS
from seqtile.planner.step_config import Lora, make_optimizer
from seqtile.planner.tile_choice import head_tile
from seqtile.recognise.decoder_layers import decoder_layers
from technique_ladder import GIB, requests

WARM_UP = 256
"""Tokens of the step before the full-size ones."""

JOB = f"{__file__}:measure_attempt"


@dataclass(frozen=True)
class Attempt:
    """One row length on one rung.

    Attributes:
        model: as :func:`seqtile.models.configs.read_config` takes it.
        rung: number of the rung in :data:`technique_ladder.RUNGS`.
        tokens: of the row.
        layers: decoder layers that run.
        lora: fields of :class:`seqtile.planner.step_config.Lora`, None for training every weight.
        precision: as a plan takes it.
        device: ``torch.device`` type.
        host_bytes: host memory that the whole model's checkpoints may take; 0 for no bound.
        memory: bytes that count as out of memory, 0 for the device's own.
        seed: of the tokens.
    """

    model: str
    rung: int
    tokens: int
    layers: int
    lora: dict[str, Any] | None
    precision: str
    device: str
    host_bytes: int
    memory: int = 0
    seed: int = 0

    def request(self) -> Request:
        """The rung's settings."""
        base = Request(
            self.model, read_config(self.model), Device(self.device, self.memory, None, ""),
            lora=self._adapters(), precision=self.precision, attention="sdpa",
            device_type=self.device,
        )  # fmt: skip
        return requests(base)[self.rung][1]

    def _adapters(self) -> Lora | None:
        if self.lora is None:
            return None
        targets = self.lora["target_modules"]
        return Lora(**{**self.lora, "target_modules": tuple(targets) if isinstance(targets, list) else targets})


class LeftOut:
    """The bytes of the layers that do not run.

    Args:
        layers: those that run.
        number: how many are left out.
        on_device: how many of their checkpoints stay on the device.
        kept: bytes per token that a checkpoint keeps beside the layer's input.
    """

    def __init__(self, layers: Sequence[nn.Module], number: int, on_device: int, kept: int) -> None:
        self.number, self.on_device, self.kept = number, on_device, kept
        self.layer = layers[len(layers) // 2]
        self.held: dict[str, Tensor] = {}
        self.forward = True
        self.layer.register_forward_pre_hook(self._arrive, with_kwargs=True)

    def stand(self, optimizer: Any) -> None:
        """Hold weights and optimizer states from here on."""
        own = list(self.layer.parameters())
        states = [s for p in own for s in optimizer.state.get(p, {}).values() if isinstance(s, Tensor) and s.dim()]
        self.hold("standing", self.number * sum(t.numel() * t.element_size() for t in [*own, *states]))

    def hold(self, what: str, nbytes: int) -> None:
        device = next(self.layer.parameters()).device
        self.held[what] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _arrive(self, module: nn.Module, args: tuple[Any, ...], words: dict[str, Any]) -> None:
        x = next(one for one in (*args, *words.values()) if isinstance(one, Tensor))
        if not self.forward:
            return  # the recompute
        tokens = x.shape[:-1].numel()
        each = x.numel() * x.element_size() + self.kept * tokens
        self.hold("checkpoints", self.on_device * each)
        x.register_hook(self._depart)

    def _depart(self, _: Tensor) -> None:
        self.held.pop("checkpoints", None)
        trained = [p for p in self.layer.parameters() if p.requires_grad]
        self.hold("gradients", self.number * sum(p.numel() * p.element_size() for p in trained))


def places(total: int, run: int, each: int, host_bytes: int) -> tuple[int, int]:
    """How many checkpoints of the ``run`` layers wait on the host, and how many of those left out on the device.

    Args:
        total: layers of the whole model.
        run: layers that run.
        each: bytes of one layer's checkpoint.
        host_bytes: room for all of them, 0 for no bound.
    """
    on_host = total if not host_bytes else min(total, host_bytes // each)
    mine = min(run, round(run * on_host / total))
    return mine, min(total - run, max(0, total - on_host - (run - mine)))


def measure_attempt(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the step; out of memory is raised.

    Args:
        arguments: fields of :class:`Attempt`.

    Returns:
        ``peak_gib`` (weights and all), ``peak_from``, ``step_s`` (of the second full-size step: the first pins host
        memory and loads kernels, ``first_step_s``), ``loss``, ``layers_of_model``, ``layers_on_host``
        (of those that run), ``attention`` (its operators).
    """
    attempt = Attempt(**arguments)
    request = attempt.request()
    setup = request.setup()
    whole = find_depths(request.config, build_bare(request.config, setup, "meta")).layers
    if attempt.layers > whole:
        raise UserError(
            "benchmark.too-many-layers",
            f"got {attempt.layers} layers to run, but the model has {whole}; give at most those",
        )
    config = first_layers(request.config, attempt.layers)
    head = head_tile(build(first_layers(config, 1), setup, "meta"), setup, attempt.tokens, attempt.device)
    setup = changed(setup, loss_tile=head)
    text = config.get_text_config()
    size = 2 if setup.autocast else setup.dtype.itemsize
    kept = kept_per_token(text, size) if setup.options.checkpoint == "attention-saved" else 0
    mine, on_device = 0, whole - attempt.layers
    offload: bool | str = False
    if request.options.offload:
        each = attempt.tokens * (text.hidden_size * setup.dtype.itemsize + kept)
        mine, on_device = places(whole, attempt.layers, each, attempt.host_bytes)
        offload = True if mine == attempt.layers else f"memory:{mine * each}" if mine else False
    with _Peak(attempt) as peak:
        built = build(config, changed(setup, offload=offload), attempt.device)
        model: Any = built.model
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = make_optimizer(setup.optimizer, weights)
        prepare_optimizer(optimizer, weights)
        layers = [model.get_submodule(layer.name) for layer in decoder_layers(model)]
        others = LeftOut(layers, whole - attempt.layers, on_device, kept)
        others.stand(optimizer)
        vocabulary = text.vocab_size
        generator = torch.Generator().manual_seed(attempt.seed)
        seconds: list[float] = []
        operators: set[str] = set()
        ids = torch.randint(0, vocabulary, (1, attempt.tokens), generator=generator).to(attempt.device)
        for number, row in enumerate((ids[:, :WARM_UP], ids, ids)):
            synchronize()
            begin = time.perf_counter()
            if number == 1:
                peak.begin()
            others.forward = True
            with names_of_kernels() if number < 2 else nullcontext() as names:
                loss = compute_loss(model, setup, {"input_ids": row, "labels": row})
            operators |= names or set()
            others.forward = False
            loss.backward()
            update(optimizer, weights)
            others.held.pop("gradients")
            synchronize()
            seconds.append(time.perf_counter() - begin)
        found = peak.bytes()
    if attempt.memory and found > attempt.memory:
        raise torch.OutOfMemoryError(f"{found / GIB:.3f} GiB of {attempt.memory / GIB:.3f} GiB")
    return {
        "peak_gib": found / GIB, "peak_from": peak.source, "step_s": seconds[2], "first_step_s": seconds[1],
        "loss": float(loss.detach()), "layers_of_model": whole, "layers_on_host": mine,
        "attention": sorted(operators),
    }  # fmt: skip


class _Peak:
    """Most bytes at once: the allocator's, on the CPU those of live tensors."""

    def __init__(self, attempt: Attempt) -> None:
        self.accelerated = attempt.device != "cpu"
        self.source = "allocator" if self.accelerated else "counted live bytes"
        self._live = None if self.accelerated else count_live_bytes("cpu")
        self._counted: Any = None

    def __enter__(self) -> _Peak:
        if self._live is not None:
            self._counted = self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def begin(self) -> None:
        """What came before does not count, where that can be said."""
        if self.accelerated:
            torch.accelerator.reset_peak_memory_stats()

    def bytes(self) -> int:
        return torch.accelerator.max_memory_allocated() if self.accelerated else self._counted.peak


def host_room(host_memory: int) -> int:
    """What checkpoints may take of a host's memory: all but one process's own."""
    return max(0, int(host_memory - CONSTANTS["host process"].high))
