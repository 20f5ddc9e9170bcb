"""Frozen weights of decoder layers in host memory; each layer's come to the device while the one before it computes.

A layer's weights are copied to the device before its forward and before its backward, with the recompute of an
activation checkpoint in it, and the parameters point there until another layer runs. Outside of a forward and a
backward they point at pinned host memory, mapped into the device's address space: whatever reads or writes them there
(``state_dict``, merged adapters) reads and writes the only copy, slowly.

Cost: the bytes of all layers over the link in each forward and each backward, hidden where a layer computes for longer
than the next one is copied; host memory for them; two layers' weights on the device.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import PLAIN, after_backward, backward_pass, tree_iter, version_of
from seqtile._effects import Watched, backbone_of, find_checkpointed, split_frozen
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile._technique import Technique, TechniqueResult
from seqtile.checkpointing.host_offload import is_dense
from seqtile.devices import accelerator, available_host_bytes
from seqtile.recognise.decoder_layers import decoder_layers

logger = first_rank_logger(__name__)

PINNED_AT_ONCE = 2**30
"""Bytes that are pinned at once: a power of two, which PyTorch's allocator of pinned memory does not round up."""

STARTS_AT = 256
"""Of each weight in a buffer, as CUDA's allocator aligns tensors."""

_MARK = "_seqtile_host_weights"


def chunks_for(sizes: Iterable[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The pinned chunks for tensors of ``sizes`` bytes, and for each tensor its chunk and its first byte there.

    Every tensor goes to the first chunk that has room; chunks are powers of two.
    """
    used: list[int] = []
    places: list[tuple[int, int]] = []
    sizes = [_padded(size) for size in sizes]
    most = max(PINNED_AT_ONCE, _power_of_two(4 * max(sizes, default=0)))  # less fits wide experts badly
    for size in sizes:
        number = next((number for number, taken in enumerate(used) if taken + size <= most), len(used))
        if number == len(used):
            used.append(0)
        places.append((number, used[number]))
        used[number] += size
    return [_power_of_two(taken) for taken in used], places


def _padded(nbytes: int) -> int:
    return -(-nbytes // STARTS_AT) * STARTS_AT


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()


class HostWeight:
    """One parameter whose values are in host memory.

    Args:
        weight: the parameter.
        host: its values, in pinned memory where the device can read it.
        device: the device that computes.
    """

    def __init__(self, weight: Tensor, host: Tensor, device: torch.device) -> None:
        self.weight, self.host = weight, host
        self.mapped = mapped_on(host, device)
        self.address, self.version = self.mapped.data_ptr(), 0
        self.weight.data = self.mapped

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def is_here(self) -> bool:
        """Whether the parameter still points at what this object gave it; ``module.to(dtype)`` gives it other data."""
        return self.weight.data_ptr() == self.address

    def point(self, values: Tensor) -> None:
        """Let the parameter use ``values``, on the device."""
        self.weight.data = values
        self.address, self.version = values.data_ptr(), version_of(self.weight) or 0

    def release(self, *, written: bool) -> None:
        """Let the parameter use the host's values again, after what was written to it meanwhile has come there.

        Args:
            written: it may have been, and its version does not show it: PEFT merges by ``weight.data += delta``.
        """
        if written or version_of(self.weight) != self.version:
            self.host.copy_(self.weight.detach())
        self.point(self.mapped)


class LayerWeights:
    """The weights of one decoder layer, and the device memory that they are in while it runs.

    The memory is freed and allocated again behind one storage, as in FSDP2: views of a weight that autograd or a custom
    function holds (bitsandbytes' keeps its 4-bit weight on its context) see the values again in the layer's backward.
    """

    def __init__(self, weights: Sequence[HostWeight]) -> None:
        self.weights = weights
        self.nbytes = sum(_padded(weight.nbytes) for weight in weights)
        self.buffer: Tensor | None = None
        self.values: list[Tensor] = []
        self.event: Any = None
        self.in_use = False

    def allocate(self, device: torch.device) -> None:
        """Make room on the device, for the stream that computes: it may still use this memory for what came before."""
        if self.buffer is not None:
            self.buffer.untyped_storage().resize_(self.nbytes)
            return
        with torch.inference_mode(mode=False):  # a tensor of inference mode could never be written outside of it
            self.buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            start = 0
            for weight in self.weights:
                self.values.append(_like(self.buffer, start, weight.host))
                start += _padded(weight.nbytes)

    def point_at_device(self) -> None:
        """Let the parameters use the device's memory, which holds the values."""
        if not self.in_use:
            for weight, values in zip(self.weights, self.values, strict=True):
                if weight.is_here():
                    weight.point(values)
            self.in_use = True

    def point_at_host(self, *, written: bool = False) -> None:
        """Let the parameters use the host's memory again; the device's keeps its values."""
        if self.in_use:
            for weight in filter(HostWeight.is_here, self.weights):
                weight.release(written=written)
            self.in_use = False

    def free(self) -> None:
        """Free the device memory."""
        assert self.buffer is not None
        self.buffer.untyped_storage().resize_(0)


class WeightStream:
    """Brings layers to the device, the next one while one computes, and frees all others.

    Args:
        layers: decoder layers in the order of the forward.
        device: the device that computes.
        copies: the stream of the copies, None where a copy is done when it returns.
    """

    def __init__(self, layers: Sequence[LayerWeights], device: torch.device, copies: Any = None) -> None:
        self.layers, self.device, self.copies = layers, device, copies
        self.on_device: dict[int, LayerWeights] = {}
        self.last_used = -1  # of those on the device
        self.fetched_bytes = 0

    def use(self, number: int, *, after: int | None) -> None:
        """Have layer ``number`` on the device for what is computed from now on, and start to fetch layer ``after``."""
        for other in [*self.on_device]:
            if other not in (number, after):
                self.release(other)
        layer = self._fetch(number)
        self._wait_for_copy(layer)
        layer.point_at_device()
        self.last_used = number
        if after is not None:
            self._fetch(after)

    def release(self, number: int, *, written: bool = False) -> None:
        """Free a layer's device memory: kernels that read it are queued before whatever gets it next."""
        layer = self.on_device.pop(number)
        self._wait_for_copy(layer)  # it may still write
        layer.point_at_host(written=written)
        layer.free()

    def release_all(self, *, written: bool = False) -> None:
        """Free every layer's."""
        for number in [*self.on_device]:
            self.release(number, written=written)
        self.last_used = -1

    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def _wait_for_copy(self, layer: LayerWeights) -> None:
        if layer.event is not None:
            self._compute_stream().wait_event(layer.event)
            layer.event = None

    def _fetch(self, number: int) -> LayerWeights:
        layer = self.layers[number]
        if number in self.on_device:
            return layer
        layer.allocate(self.device)
        if self.copies is None:
            _copy(layer)
        else:
            self.copies.wait_stream(self._compute_stream())
            with self.copies:
                _copy(layer)
                layer.event = self.copies.record_event()
        self.fetched_bytes += layer.nbytes
        self.on_device[number] = layer
        return layer


def _copy(layer: LayerWeights) -> None:
    for values, weight in zip(layer.values, layer.weights, strict=True):
        values.copy_(weight.host, non_blocking=True)


def _like(buffer: Tensor, start: int, tensor: Tensor) -> Tensor:
    """Bytes of ``buffer`` as a tensor like ``tensor``."""
    flat = buffer[start : start + tensor.nbytes].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


class _MappedArray:
    """Pinned host memory as an array of the device: CUDA gives both the same address.

    Source: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, host: Tensor) -> None:
        self.host = host  # kept as long as the tensor over it
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip


def mapped_on(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of ``device`` over the memory of ``host``, which is pinned and dense.

    Raises:
        UserError: the device cannot read host memory in place.
    """
    if device.type == "cpu":
        return host
    try:
        flat = torch.as_tensor(_MappedArray(host), device=device)
    except (RuntimeError, TypeError) as error:
        raise UserError("offload.device-cannot-map", f"{_CANNOT_MAP} ({str(error).splitlines()[0]})") from None
    if flat.data_ptr() != host.data_ptr():
        raise UserError("offload.device-cannot-map", _CANNOT_MAP)
    return _like(flat, 0, host)


_CANNOT_MAP = (
    "offload='weights' keeps weights in pinned host memory that the device reads in place, and this device cannot; "
    "leave 'weights' out"
)


class HostWeights(Watched):
    """Keeps the frozen weights of one model's decoder layers on the host.

    Args:
        module: the model; where none of its layers is frozen yet, all of their weights are taken for frozen, as
            adapters will come.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stream: WeightStream | None = None
        self.hooks: list[Any] = []
        self.none_is_frozen = False
        self.left: Counter[str] = Counter()  # tensors of the layers that stay on the device, by kind

    def __deepcopy__(self, memo: dict[int, Any]) -> HostWeights:
        copied = super().__deepcopy__(memo)
        if copied is self:  # a layer or the backbone alone is copied: its hooks must not fetch the original's weights
            copied = memo[id(self)] = type(self).__new__(type(self))
            copied.__dict__.update(self.__dict__, stream=None, hooks=[])
        assert isinstance(copied, HostWeights)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "stream": None}  # deepcopy and pickle copy the weights themselves

    def install(self) -> None:
        """Move the weights, one pinned chunk at a time.

        Raises:
            UserError: nothing to move, or not enough host memory.
        """
        module = self.module
        device = _device_of(module)
        if device.type not in ("cpu", "cuda"):
            raise UserError("offload.device-cannot-map", _CANNOT_MAP)
        layers, modules = self._layers()
        weights = [weight for layer in layers for weight in layer]
        chunk_sizes, places = chunks_for(weight.nbytes for weight in weights)
        _check_host(sum(chunk_sizes), sum(weight.nbytes for weight in weights if weight.device.type == "cpu"))
        moved: dict[Tensor, HostWeight] = {}
        try:
            for number, size in enumerate(chunk_sizes):  # a chunk's weights are freed before the next one is pinned
                chunk = _pinned(size, device)
                for weight, (of_chunk, start) in zip(weights, places, strict=True):
                    if of_chunk == number:
                        host = _like(chunk, start, weight)
                        host.copy_(weight.detach())
                        moved[weight] = HostWeight(weight, host, device)
        except BaseException as error:
            _give_back(moved.values(), _device_of_rest(module, moved))
            if isinstance(error, RuntimeError):
                raise UserError(
                    "offload.pinned-memory-exhausted",
                    f"offload='weights': the host gives no more than {sum(chunk_sizes[:number]) / 2**30:.3g} GiB of "
                    f"pinned memory, {sum(chunk_sizes) / 2**30:.3g} GiB are needed "
                    f"({str(error).splitlines()[0]}); leave 'weights' out",
                ) from None
            raise
        copies = torch.Stream(device) if device.type == "cuda" else None
        self.stream = WeightStream(
            [LayerWeights([moved[weight] for weight in layer]) for layer in layers], device, copies
        )
        self.watch()
        module.__dict__[_MARK] = self
        for number, layer_module in enumerate(modules):
            self.hooks.append(layer_module.register_forward_pre_hook(_BeforeLayer(self, number)))
            self.hooks.append(layer_module.register_forward_hook(_AfterLayer(self, number)))
        backbone = backbone_of(module)
        self.hooks.append(backbone.register_forward_hook(self._after_forward))

    def remove(self) -> None:
        """Put the weights where the rest of the model is."""
        self.unwatch()
        for hook in self.hooks:
            hook.remove()
        self.module.__dict__.pop(_MARK, None)
        stream, self.stream = self.stream, None
        if stream is None:
            return
        stream.release_all(written=True)
        moved = {weight.weight: weight for layer in stream.layers for weight in layer.weights}
        _give_back(moved.values(), _device_of_rest(self.module, moved))

    def _layers(self) -> tuple[list[list[Tensor]], list[nn.Module]]:
        """The weights to move and the module of each layer that has some."""
        module = self.module
        modules = [module.get_submodule(layer.name) for layer in decoder_layers(module)]
        holders = Counter(weight for layer in modules for weight in {*layer.parameters()})
        outside = Counter(weight for part in module.modules() for weight in part.parameters(recurse=False))
        matrices = [[weight for weight in layer.parameters() if weight.dim() >= 2] for layer in modules]
        self.none_is_frozen = all(weight.requires_grad for layer in matrices for weight in layer)  # adapters will come
        chosen: list[list[Tensor]] = []
        for layer_weights in matrices:
            kept = []
            for weight in layer_weights:
                if weight.requires_grad and not self.none_is_frozen:
                    continue
                shared = holders[weight] > 1 or outside[weight] > 1
                why = "shared" if shared else "" if _can_move(weight) else type(weight).__name__
                if why:
                    self.left[why] += weight.nbytes
                else:
                    kept.append(weight)
            chosen.append(kept)
        pairs = [(weights, layer) for weights, layer in zip(chosen, modules, strict=True) if weights]
        if not pairs:
            on_meta = any(weight.is_meta for weight in module.parameters())
            instead = "load them first, they are on the meta device" if on_meta else "leave 'weights' out"
            raise UserError(
                "offload.weights-no-layers",
                f"offload='weights': {type(module).__name__} has no decoder layers with weights that can wait on the "
                f"host; {instead}",
            )
        return [weights for weights, _ in pairs], [layer for _, layer in pairs]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def before_layer(self, number: int) -> None:
        """Have a layer's weights on the device; called before its forward and before its recompute and backward."""
        stream = self.stream
        if stream is None:  # a copy of the model, which has weights of its own
            return
        self._check(stream.layers[number].weights)
        last, backward = len(stream.layers) - 1, backward_pass() != -1
        if not backward and number <= stream.last_used:
            # The last pass was left before its end: other code ran while layers were in use, and may have merged
            # adapters into them.
            stream.release_all(written=True)
        if backward:
            after_backward(stream.release_all)
        # A backward begins with the last layer and goes on with the one before.
        after = number - 1 if backward or number == last else number + 1
        stream.use(number, after=after if after >= 0 else None)

    def _check(self, layer: Sequence[HostWeight]) -> None:
        if any(weight.weight.requires_grad for weight in layer):
            raise UserError(
                "offload.weights-trained",
                "offload='weights' keeps frozen weights on the host, and a weight of the decoder layers trains; add "
                "adapters (PEFT) or leave 'weights' out",
            )
        if not all(map(HostWeight.is_here, layer)):
            self.warn("other code has replaced weights that waited on the host; they stay where it put them")

    def _after_forward(self, *_: Any) -> None:
        """Whatever reads or writes weights from now on reads and writes the host's.

        The last layer's are fetched again for the backward: adapters may be merged into the host's before it.
        """
        if self.stream is not None and not torch.compiler.is_compiling():
            self.stream.release_all()

    @property
    def host_bytes(self) -> int:
        """Bytes of weights on the host."""
        return sum(weight.nbytes for layer in self.stream.layers for weight in layer.weights) if self.stream else 0

    def describe(self) -> str:
        """For the report."""
        assert self.stream is not None
        left = ", ".join(f"{size / 2**30:.3g} GiB {name}" for name, size in self.left.items())
        return (
            f"weights of {len(self.stream.layers)} layers on the host ({self.host_bytes / 2**30:.3g} GiB)"
            + f"; left on the device: {left}" * bool(left)
            + "; all of them train now: add adapters before the first step" * self.none_is_frozen
        )

    def without_effect(self) -> list[str]:
        if self.stream is None:
            return ["offload='weights' does not act on a copy of the model; call seqtile.apply on the copy"]
        if self.stream.fetched_bytes:
            return []
        return ["offload='weights' fetched nothing in the first training step: the decoder layers' forward did not run"]

    def notes(self) -> list[str]:
        return self.warnings()


class _BeforeLayer:
    """Forward pre-hook of one decoder layer."""

    def __init__(self, owner: HostWeights, number: int) -> None:
        self.owner, self.number = owner, number

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.owner.before_layer(self.number)


class _AfterLayer(_BeforeLayer):
    """Forward hook of one decoder layer: its backward begins with the gradient of its output.

    An activation checkpoint recomputes the layer after that; transformers 5.24 does so without the layer's hooks.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        for value in tree_iter(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._before_backward)

    def _before_backward(self, _: Tensor) -> None:
        self.owner.before_layer(self.number)


def _can_move(weight: Tensor) -> bool:
    """Whether its values are one dense range of memory that can be anywhere: no subclass that wraps other tensors."""
    is_plain = type(weight.data) in PLAIN and type(weight).__name__ != "Int8Params"  # whose module holds them twice
    return is_plain and not weight.is_meta and is_dense(weight) and weight.nbytes > 0


def _device_of(module: nn.Module) -> torch.device:
    """The device that will compute: the parameters', or for a model on the CPU the accelerator, which trainers use."""
    device = next(
        (weight.device for weight in module.parameters() if weight.device.type != "meta"), torch.device("cpu")
    )
    current = accelerator()
    if device.type != "cpu" or current is None:
        return device
    return torch.device(current.type, torch.accelerator.current_device_index())


def _pinned(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with torch.cuda.device(device):  # whose address space it is mapped into
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _device_of_rest(module: nn.Module, moved: Iterable[Tensor]) -> torch.device:
    moved = {*moved}
    return next((weight.device for weight in module.parameters() if weight not in moved), torch.device("cpu"))


def _give_back(moved: Iterable[HostWeight], device: torch.device) -> None:
    """Put weights on ``device``, in pageable memory if that is the host; those without room stay where they are."""
    try:
        for weight in moved:
            if weight.is_here():
                weight.weight.data = weight.host.to(device, copy=True)
    except torch.OutOfMemoryError as error:
        logger.warning("weights stay in host memory, where they are slow to read: %s", str(error).splitlines()[0])


def _check_host(needed: int, freed: int) -> None:
    """Refuse before anything is moved.

    Args:
        needed: bytes to pin.
        freed: bytes of the same weights that are in host memory now.
    """
    free = available_host_bytes()
    if free and needed - freed > free:
        raise UserError(
            "offload.weights-exceed-host-memory",
            f"offload='weights' would pin {needed / 2**30:.3g} GiB of host memory, and "
            f"{(free + freed) / 2**30:.3g} GiB are free for it; leave 'weights' out, or load the model in 4 bits",
        )


def installed_host_weights(model: nn.Module) -> list[HostWeights]:
    """What waits on the host for the models in ``model``."""
    return [module.__dict__[_MARK] for module in model.modules() if _MARK in module.__dict__]


class HostWeightsTechnique(Technique):
    """``offload="weights"``. Weights that wait on the host already stay there: the device may lack room for all."""

    name = "weights"

    def check(self) -> None:
        """Refuse a model that cannot keep weights on the host.

        Raises:
            UserError: several processes, or no model of transformers with decoder layers.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "offload.weights-several-processes",
                "offload='weights' is for one process: each would pin the weights once more; use fsdp2 or zero3 and "
                "their own offload",
            )
        if not find_checkpointed(self.model):
            raise UserError(
                "offload.weights-model-unsupported",
                f"{type(self.model).__name__} holds no model of transformers; leave 'weights' out of offload",
            )

    def install(self, inside: Collection[str]) -> TechniqueResult:
        """Move the frozen weights of the decoder layers to the host, unless they are there."""
        phrases, moved = [], list[HostWeights]()
        try:
            for _, module in split_frozen(find_checkpointed(self.model))[0]:
                weights = module.__dict__.get(_MARK)
                if weights is None or weights.stream is None:  # a copy of such a model has the mark, and its weights
                    self.remove(module)
                    weights = HostWeights(module)
                    weights.install()
                    moved.append(weights)
                phrases.append(weights.describe())
        except BaseException:
            for weights in moved:
                weights.remove()
            raise
        return TechniqueResult("; ".join(phrases))

    @classmethod
    def installed(cls, model: nn.Module) -> list[HostWeights]:
        return installed_host_weights(model)

    @classmethod
    def notes(cls, model: nn.Module) -> list[str]:
        return [note for weights in installed_host_weights(model) for note in weights.notes()]
