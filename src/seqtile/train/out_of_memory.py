"""Describe an out-of-memory: the phase, the block, and the largest live tensors.

All of it is read when it has happened: from the traceback, from the tensors that Python still holds, and from one hook
on each decoder layer, which notes whose gradient came last (two calls of Python per layer and step).
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import GRADIENT_NORM_METHODS, FakeTensor, backward_pass, local_part, storage_key
from seqtile.devices import available_host_bytes, device_bytes
from seqtile.models.causal import causal_model
from seqtile.recognise.decoder_layers import decoder_layers
from seqtile.tiling import parse_bytes

SHOWN_TENSORS = 6

_ASKED = re.compile(r"tried to allocate\s+([0-9.]+\s*[a-z]+)", re.IGNORECASE)
_OPTIMIZERS = ("/torch/optim/", "/accelerate/", "/deepspeed/", "/trainer.py", "clip_grad")
_OPTIMIZER_STEPS = ("step", "clip_grad_norm_", *GRADIENT_NORM_METHODS)


@dataclass(frozen=True)
class Place:
    """Where it happened.

    Attributes:
        phase: ``"forward"``, ``"loss"``, ``"backward"`` or ``"optimizer"``; ``""`` outside of a step.
        block: qualified name of the innermost module that is known, or ``""``.
        step: the optimizer step that was to be done, from 1.
        asked: bytes that could not be had; 0 where the error does not say.
        tokens: tokens of the micro-batch on this rank; 0 outside of one.
        tile: tokens of the largest tile that it was cut into; None if it ran untiled.
        rank: rank of the process; None if there is only one.
    """

    phase: str
    block: str
    step: int
    asked: int = 0
    tokens: int = 0
    tile: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        inside = f" of {self.block}" if self.block else ""
        where = f"at step {self.step}, in the {self.phase}{inside}" if self.phase else "outside of a step"
        return where if self.rank is None else f"{where}, on rank {self.rank}"


class Whereabouts:
    """Notes which decoder layer's gradient came last, and knows each layer's output weakly."""

    def __init__(self, model: nn.Module) -> None:
        self.layer = ""
        self.outputs: dict[str, weakref.ref[Tensor]] = {}
        self._hooks = [
            model.get_submodule(layer.name).register_forward_hook(partial(self._leave, layer.name))
            for layer in decoder_layers(model)
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.requires_grad or backward_pass() != -1:
            return  # no backward will come, or this is a recompute inside of one
        self.layer = ""
        self.outputs[name] = weakref.ref(first)
        first.register_hook(partial(self._arrive, name))

    def _arrive(self, name: str, _: Tensor) -> None:
        self.layer = name


def find_place(error: BaseException, model: nn.Module, whereabouts: Whereabouts | None, step: int) -> Place:
    """Read phase and block off the traceback of ``error``."""
    plain = causal_model(model)
    names = {id(module): name for name, module in plain.named_modules() if name}
    backbone = getattr(plain, "base_model", plain)
    inside = {id(module) for module in backbone.modules()} if backbone is not plain else set()
    phase, block, in_head, in_tile, in_step = "", "", False, False, False
    for frame in _frames(error):
        code = frame.f_code
        owner = frame.f_locals.get("self")
        filename = code.co_filename.replace("\\", "/")
        in_step = in_step or code.co_name == "training_step"
        if code.co_name == "training_step":
            phase = phase or "loss"  # until a part of the backbone is found
        elif code.co_name == "backward" and in_step and phase != "optimizer":
            phase, block, in_head = "backward", "", False
        elif code.co_name in _OPTIMIZER_STEPS and any(name in filename for name in _OPTIMIZERS):
            phase, block = "optimizer", ""
        if "/seqtile/ops/" in filename:
            in_tile, in_head = True, in_head or "/seqtile/ops/lm_loss/" in filename
        if phase and isinstance(owner, nn.Module) and id(owner) in names:
            block = names[id(owner)]
            in_head = id(owner) not in inside and bool(inside)
            if phase == "loss" and id(owner) in inside:
                phase = "forward"
    head = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    if phase == "backward" and not block and whereabouts is not None:
        block = names.get(id(head), "") if in_head or not whereabouts.layer else whereabouts.layer
        if in_tile and not in_head and whereabouts.layer:
            block = _tiled_block(plain, whereabouts.layer)
    elif phase == "loss":
        block = block or names.get(id(head), "")
    match = _ASKED.search(str(error))
    nbytes = parse_bytes(match[1].replace("bytes", "").replace("byte", "")) if match else 0
    return Place(phase, block, step, nbytes)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Frames of the traceback, outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _tiled_block(model: nn.Module, layer: str) -> str:
    """The module of ``layer`` that runs in tiles: its own name, or the layer's where parts of it share a tile."""
    from seqtile.blocks.instance import Installed

    for name, module in model.get_submodule(layer).named_modules():
        if name and isinstance(module.__dict__.get("forward"), Installed):
            return f"{layer}.{name}"
    return layer


def largest_tensors(error: BaseException, model: Any, optimizer: Any, whereabouts: Whereabouts | None) -> list[str]:
    """The largest tensors that Python can still reach, equal ones of all layers as one, and the sums by category.

    What only a kernel or the autograd engine holds, and never was an object of Python's, is not among them.
    """
    gc.collect()  # else garbage would be listed too
    plain = causal_model(model)
    names = {id(module): name for name, module in plain.named_modules() if name}
    labels: dict[int, tuple[str, str]] = {}
    parameters = {id(weight): name for name, weight in plain.named_parameters()}
    for name, weight in [*plain.named_parameters(), *plain.named_buffers()]:
        _add_label(labels, weight, "weights", name)
        _add_label(labels, weight.grad if weight.is_leaf else None, "gradients", f"gradient of {name}")
    for weight, states in getattr(getattr(optimizer, "optimizer", optimizer), "state", {}).items():
        for value in states.values() if isinstance(states, dict) else ():
            what = f"optimizer state of {parameters[id(weight)]}" if id(weight) in parameters else "optimizer state"
            _add_label(labels, value, "optimizer state", what)
    for name, ref in whereabouts.outputs.items() if whereabouts is not None else ():
        _add_label(labels, ref(), "activations", f"output of {name}")
    for frame in reversed([*_frames(error)]):
        owner = frame.f_locals.get("self")
        scope = names.get(id(owner), frame.f_code.co_name if "/seqtile/ops/" in frame.f_code.co_filename else "")
        for variable, value in frame.f_locals.items() if scope else ():
            _add_label(labels, value, "activations", f"{variable} in {scope}")
    groups: Counter[tuple[str, tuple[int, ...], torch.dtype]] = Counter()
    examples: dict[Any, str] = {}
    counts: Counter[Any] = Counter()
    totals: Counter[str] = Counter()
    for key, nbytes, tensor in _reachable(_device_type(plain)):
        category, name = labels.get(key, ("activations", "a saved or temporary tensor"))
        group = (re.sub(r"\.\d+(?=\.|$)", ".*", name), tuple(tensor.shape), tensor.dtype)
        groups[group] += nbytes
        counts[group] += 1
        examples[group] = name
        totals[category] += nbytes
    lines = []
    for group, nbytes in groups.most_common(SHOWN_TENSORS):
        count = counts[group]
        many = f"{count} x {group[0]}" if count > 1 else examples[group]
        dtype = str(group[2]).removeprefix("torch.")
        lines.append(f"{_in_gib(nbytes):>12}  {many}, {' x '.join(map(str, group[1])) or 'a number'} {dtype}")
    return [
        *lines,
        "in all: " + ", ".join(f"{category} {_in_gib(nbytes)}" for category, nbytes in totals.most_common()),
    ]


def _add_label(labels: dict[int, tuple[str, str]], value: Any, category: str, name: str) -> None:
    if isinstance(value, Tensor):
        storage = _storage(value)
        if storage is not None:
            labels.setdefault(storage_key(storage), (category, name))


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of ``tensor`` on this rank, or None."""
    try:
        return local_part(tensor).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def _reachable(device_type: str) -> Iterator[tuple[int, int, Tensor]]:
    """Every storage on the device that an object of Python's holds: its key, its bytes, and the largest view of it."""
    largest: dict[int, tuple[int, Tensor]] = {}
    for candidate in gc.get_objects():
        # isinstance would trigger lazily loaded objects.
        if not issubclass(type(candidate), Tensor):
            continue
        tensor = local_part(candidate)
        has_symbols = not all(type(size) is int for size in tensor.shape)
        if tensor.device.type != device_type or isinstance(tensor, FakeTensor) or has_symbols:
            continue  # tensors of torch.compile's trace have no memory
        if (storage := _storage(tensor)) is None:
            continue
        previous = largest.get(storage_key(storage))
        if previous is None or previous[1].numel() < tensor.numel():
            largest[storage_key(storage)] = (storage.nbytes(), tensor)
    return ((key, nbytes, tensor) for key, (nbytes, tensor) in largest.items())


def _device_type(model: nn.Module) -> str:
    return next((weight.device.type for weight in model.parameters()), "cpu")


def _in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"


def device_memory(model: nn.Module) -> str:
    """The memory of the model's device; "" if unknown."""
    device_type = _device_type(model)
    if device_type == "cpu":
        return f"this host has {_in_gib(available_host_bytes())} free"
    free, total = device_bytes(torch.device(device_type))
    if not total:
        return ""
    allocated, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    usage = f"{_in_gib(allocated)} in tensors, {_in_gib(reserved - allocated)} cached by the allocator"
    return f"the device has {_in_gib(total)}: {usage}, {_in_gib(free)} free"
