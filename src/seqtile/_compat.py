"""All uses of other libraries' private names.

The rest of the code takes private names from here and reads none itself (ruff's SLF001 and ``tests/unit/test_house.py``
keep it so). ``tests/compat`` checks on the installed versions that each behaves as relied upon.

What a hot path calls is bound here once, at import. torch is imported with the module, every other library inside the
functions. A name that torch has moved raises at its first use, not at import, so that everything else still runs.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import platform
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as _torch_checkpoint

from seqtile.devices import package_version

SEEN = {
    "python": "3.11", "torch": "2.13.0", "transformers": "5.24.0", "accelerate": "1.15.0", "peft": "0.21.2",
    "trl": "1.16.0", "deepspeed": "0.19.8",
}  # fmt: skip
"""The version of each library in which its private names were last read."""

TESTED = {
    "torch": ("2.13", "2.15"), "transformers": ("5.0", "5.24"), "accelerate": ("1.11", "1.15"),
    "peft": ("0.19", "0.21"), "trl": ("1.16", "1.16"), "deepspeed": ("0.18", "0.19"),
}  # fmt: skip
"""The lowest and the highest version of each library that tests have run with; a release of the same minor counts."""


class MovedError(RuntimeError):
    """A private name of another library is gone, or means something else."""


class Moved:
    """Placeholder for a name that could not be found: every use of it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *_: Any, **__: Any) -> Any:
        library = self._name.partition(".")[0]
        raise MovedError(
            f"seqtile needs {self._name}, which {library} {installed(library)} does not have; install {library} "
            f"{SEEN[library]} (`seqtile doctor --compat` checks every feature)"
        )

    __call__ = __iter__ = __instancecheck__ = __mro_entries__ = __getitem__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up its protocols
            raise AttributeError(name)
        return self._raise()


def _find(name: str) -> Any:
    """Resolve a dotted name, or return a placeholder that raises when it is used."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return Moved(name)


def installed(library: str) -> str | None:
    """The version of a library, None if it is not installed."""
    return platform.python_version() if library == "python" else package_version(library)


@functools.cache
def untested() -> str:
    """Name the installed libraries whose versions are not tested, or ""."""
    outside = []
    for library, (lowest, highest) in TESTED.items():
        version = installed(library)
        if version is not None and not _minor(lowest) <= _minor(version) <= _minor(highest):
            outside.append(f"{library} {version} (tested: {lowest} to {highest})")
    if not outside:
        return ""
    return f"not tested with {', '.join(outside)}; `seqtile doctor --compat` checks every feature here"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


# ---- Python ----


def end_process(code: int) -> NoReturn:
    """End after what was registered with ``atexit``, without Python's last clean-up.

    A library's thread may abort in that (seen once under ZeRO-3: "terminate called without an active exception"), upon
    which a launcher ends the other processes; and it takes 0.1 s to take thousands of modules apart.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- torch: modules ----

MODULES, PARAMETERS, BUFFERS = "_modules", "_parameters", "_buffers"
"""Where an instance of ``nn.Module`` keeps its own; a view of it has others under the same names."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where an instance of ``nn.Module`` keeps hooks on its calls."""

HOOK_CONTAINERS = (
    *HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
"""Attributes of a module with its hooks, or with what is known of each of them, by their handles' numbers."""

PRE_HOOKS = HOOKS[1]
"""The hooks that run before the forward."""

OUTPUT_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The hooks that see or change what the forward returns."""

HOOKS_OF_ALL: list[dict[int, Any]] = [
    _find(f"torch.nn.modules.module.{name}")
    for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    )
]  # fmt: skip
"""The hooks on all modules of the process; empty in nearly all, so ask ``any(HOOKS_OF_ALL)`` in a step first."""


def hook_on_every_module() -> str:
    """The name of a hook on all modules of the process, or ""; PyTorch's own change nothing."""
    for hooks in HOOKS_OF_ALL:
        for hook in hooks.values():
            function = getattr(hook, "func", hook)  # of a partial
            if not str(getattr(function, "__module__", "")).startswith("torch."):
                return str(getattr(function, "__qualname__", type(function).__name__))
    return ""


CALL_CODE: types.CodeType = _find("torch.nn.Module._call_impl.__code__")
"""The code that calls a module's forward, with the module in its local variable ``self``."""

REPLICATE = "_replicate_for_data_parallel"
"""The method that ``nn.DataParallel`` copies a module with."""


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children by name, as the module keeps them: writing here replaces one."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, as it keeps them."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, as it keeps them."""
    return module._buffers


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks that run before the forward, by their handles' numbers, as the module keeps them."""
    return module._forward_pre_hooks


# ---- torch: tensors ----

version_of: Callable[[Tensor], int] = _find("torch.Tensor._version.__get__")
"""How often a tensor was written in place; raises for an inference tensor."""

is_view: Callable[[Tensor], bool] = _find("torch.Tensor._is_view")
"""Whether a tensor is a view of another one."""

base_of: Callable[[Tensor], Tensor | None] = _find("torch.Tensor._base.__get__")
"""The base of a view."""

storage_key: Callable[[torch.UntypedStorage], int] = _find("torch.UntypedStorage._cdata.__get__")
"""Identity of a storage, the same from every tensor on it; given away again when it is freed."""

make_wrapper_subclass: Callable[..., Any] = _find("torch.Tensor._make_wrapper_subclass")
"""A tensor of a subclass, of a shape, dtype and device, without memory."""

run_backward: Callable[..., Any] = _find("torch.autograd.graph._engine_run_backward")
"""``torch.autograd.grad`` of (outputs, upstream, keep the graph, make one, inputs, allow unused, accumulate), but the
hooks that it calls run under the caller's function modes."""


_tensor_use_count: Callable[[Tensor], int] = _find("torch.Tensor._use_count")
_storage_use_count: Callable[[int], int] = _find("torch._C._storage_Use_Count")
_USES_IN_A_MODE = 4, 2
"""How often a tensor and its storage are held where a dispatch mode sees one that autograd alone holds."""

_AROUND_A_MODE = ("torch._dynamo.", "torch._compile")
"""Modules between an operator's caller and the mode's ``__torch_dispatch__``."""


def has_gradient_step(weight: Tensor) -> bool:
    """Whether a hook acts on the weight's gradient once it is accumulated, such as an optimizer's step."""
    return bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def sums_gradients_in_place(first: Tensor) -> bool:
    """Whether an addition to ``first`` is one of two gradients that autograd does in place where no mode watches.

    Under a dispatch mode it makes a new tensor instead: ``can_accumulate_inplace`` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/input_buffer.cpp. To be called below the mode's
    ``__torch_dispatch__``, the innermost one.
    """
    if torch.is_grad_enabled() or isinstance(_tensor_use_count, Moved) or isinstance(_storage_use_count, Moved):
        return False  # a new tensor, which a plan may overcount
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code.co_name != "__torch_dispatch__":
        caller = caller.f_back
    caller = caller and caller.f_back
    while caller is not None and caller.f_globals["__name__"].startswith(_AROUND_A_MODE):
        caller = caller.f_back
    if caller is None or caller.f_code is not run_backward.__code__:  # a formula in Python
        return False
    storage = first.untyped_storage()
    dense = storage.nbytes() == first.numel() * first.element_size()
    return dense and (_tensor_use_count(first), _storage_use_count(storage_key(storage))) == _USES_IN_A_MODE


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are computed here."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


transform_level = _find("torch._C._functorch.maybe_current_level")
"""The number of the innermost transform of ``torch.func`` (``vmap``, ``grad``) that runs, None outside of them."""


def call_parameter(tensor: Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` be true of a tensor that stands in a parameter's place."""
    tensor._is_param = True


def is_flat_parameter(tensor: Tensor | None) -> bool:
    """Whether a tensor is one of those that FSDP1 puts the weights of a unit in."""
    return bool(getattr(tensor, "_is_flat_param", False))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a ``DTensor``; any other tensor as it is. No gradient flows through it."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


# ---- what checkpoints name ----

_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip

METADATA_NAMES = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}
"""Names in the ``.metadata`` of PyTorch's distributed checkpoints, besides dtypes."""

PICKLED_NAMES = {
    "builtins.frozenset",
    "collections.defaultdict",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}
"""Names in other files of checkpoints, besides those that torch lists as safe."""


# ---- torch: dispatch, fake tensors and trees ----

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_iter as tree_iter
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    DispatchKey = _find("torch._C.DispatchKey")
    OpOverload = _find("torch._ops.OpOverload")
    DataDependentOutputException = _find("torch._subclasses.fake_tensor.DataDependentOutputException")
    FakeTensor = _find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode")
    TreeSpec = _find("torch.utils._pytree.TreeSpec")
    tree_flatten = _find("torch.utils._pytree.tree_flatten")
    tree_iter = _find("torch.utils._pytree.tree_iter")
    tree_leaves = _find("torch.utils._pytree.tree_leaves")
    tree_map = _find("torch.utils._pytree.tree_map")
    tree_unflatten = _find("torch.utils._pytree.tree_unflatten")


PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that hold nothing but numbers, or pretend to."""


class PlanMode(FakeTensorMode):
    """The fake mode of a plan, by which operators tell its tensors from a tracer's."""


is_wrapper_subclass: Callable[[type], bool] = _find("torch.utils._python_dispatch.is_traceable_wrapper_subclass_type")
disable_current_modes: Callable[[], Any] = _find("torch.utils._python_dispatch._disable_current_modes")
function_modes_on: Callable[[], int] = _find("torch.overrides._len_torch_function_stack")
function_mode_off: Callable[[], Any] = _find("torch.overrides._pop_mode_temporarily")
disabled_torch_function: Any = _find("torch._C._disabled_torch_function_impl")
disable_torch_function_subclass: Callable[[], Any] = _find("torch._C.DisableTorchFunctionSubclass")
has_kernel: Callable[[str, Any], bool] = _find("torch._C._dispatch_has_kernel_for_dispatch_key")
_dispatch_mode: Callable[[Any], Any] = _find("torch._C._get_dispatch_mode")
_FAKE = _find("torch._C._TorchDispatchModeKey.FAKE")

GROUPED_MM: Any = _find("torch.ops.aten._grouped_mm.default")
FUSED_UPDATES = [_find("torch.ops.aten._fused_adamw_"), _find("torch.ops.aten._fused_sgd_")]
"""Operators by which optimizers update all weights at once, in place."""

READ_NUMBER: Any = _find("torch.ops.aten._local_scalar_dense.default")
ALL_TRUE = "_is_all_true"
"""The operator by which PyTorch's distributions check their arguments."""

READ_NUMBER_NAME = "_local_scalar_dense"
unsafe_view: Callable[..., Tensor] = _find("torch.ops.aten._unsafe_view")
"""A view that autograd does not track as one, for a tensor without other references."""

in_kernel_invocation: Callable[[Any], Any] = _find("torch._subclasses.fake_tensor.in_kernel_invocation_manager")
"""Inside, operators on fake tensors of a mode run as on the meta device."""

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""Logs the traceback of each operator that fails on fake tensors."""

dispatch_modes: Callable[[], list[Any]] = _find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
"""The modes around every operator, the outermost first."""


ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""PyTorch's fused attention forwards, in ``torch.ops.aten``."""

FLASH_CPU, FLASH_CPU_BACKWARD, FLASH_CUDA, FLASH_CUDA_BACKWARD, CUDNN, CUDNN_BACKWARD = (
    _find(f"torch.ops.aten._scaled_dot_product_{name}.default")
    for name in (
        "flash_attention_for_cpu", "flash_attention_for_cpu_backward", "flash_attention", "flash_attention_backward",
        "cudnn_attention", "cudnn_attention_backward",
    )
)  # fmt: skip
"""PyTorch's fused attention, forward and backward, with the log-sum-exp that SDPA itself does not return."""

allowed_sdpa_kernels: Callable[..., list[Any]] = _find("torch.nn.attention._cur_sdpa_kernel_backends")
"""SDPA's kernels that are switched on; ``with_priority=True`` orders them as SDPA tries them."""

EFFICIENT_ATTENTION = "_scaled_dot_product_efficient_attention"

ATTENTION_BACKENDS = {
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_flash_attention": "FlashAttention-2 of PyTorch",
    "_scaled_dot_product_flash_attention_for_cpu": "FlashAttention of PyTorch's CPU",
    "_flash_attention_forward": "FlashAttention-2 of PyTorch",
    EFFICIENT_ATTENTION: "memory-efficient",
    "_efficient_attention_forward": "memory-efficient",
}
"""Names of their kernels."""


def schema_of(operator: Any) -> Any:
    """Name, arguments and returns of an operator's overload."""
    return operator._schema


def active_fake_mode() -> Any:
    """The fake tensor mode that operators run under, None without one."""
    return _dispatch_mode(_FAKE)


# ---- torch: backward passes, checkpoints, devices ----

backward_pass: Callable[[], int] = _find("torch._C._current_graph_task_id")
"""Identity of the running backward pass, -1 outside of one."""


def after_backward(callback: Callable[[], object]) -> None:
    """Call ``callback`` when the running backward pass is over; as FSDP2 does in its post-backward.

    Not when it runs inside of another one, as that of a reentrant checkpoint does: what it used is used again there.
    """
    _engine.queue_callback(lambda: _running_node() is None and callback())


_engine: Any = _find("torch.autograd.Variable._execution_engine")
_running_node: Callable[[], object] = _find("torch._C._current_autograd_node")

_keeps_graph: Any = _find("torch._C._autograd._get_current_graph_task_keep_graph")


def keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``; True where PyTorch does not say."""
    return isinstance(_keeps_graph, Moved) or bool(_keeps_graph())


def early_stop() -> bool | None:
    """The value of ``set_checkpoint_early_stop`` for the whole process, or None."""
    setting: bool | None = getattr(_torch_checkpoint, "_enable_checkpoint_early_stop", None)
    return setting


class SavedValue:
    """One result that selective checkpointing keeps from forward to backward, in its own place."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def get(self) -> Any:
        """The result, which is often a tensor."""
        return self._wrapper.val

    def drop(self) -> None:
        """Forget it, until :meth:`put`."""
        self._wrapper.val = None

    def put(self, value: Tensor) -> None:
        """Put ``value`` in its place, as if it had not been written since it was saved."""
        self._wrapper.val, self._wrapper.version = value, version_of(value)


HOOKS_SEE_WHAT_IS_KEPT = {
    name: True
    for name in inspect.signature(_torch_checkpoint.checkpoint).parameters
    if name == "respect_saved_tensors_hooks"
}
"""Argument of a checkpoint by which offload hooks around it also see what a policy keeps: from torch 2.14 on, where the
default is announced to change, and warns. PyTorch hands it to its own context only, so a wrapped one is told too."""


def hooks_inside_checkpoints(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """Hooks on what autograd saves, but not on what a selective checkpoint around them saves.

    From torch 2.14 on, a selective checkpoint packs what it saves with the innermost hooks that are not marked as a
    checkpoint's own. So these are marked.
    """
    vars(pack)["_checkpoint_internal"] = True
    hooks: type[saved_tensors_hooks] = getattr(_torch_checkpoint, "_checkpoint_internal_hook", saved_tensors_hooks)
    return hooks(pack, unpack)


CHECKPOINT_KEYWORDS = {*inspect.signature(_torch_checkpoint.checkpoint).parameters, "preserve_rng_state"} - {
    "function", "args", "kwargs",
}  # fmt: skip
"""Keyword arguments that a checkpoint does not pass on to its function."""


def saved_values(context: Any) -> Iterator[SavedValue]:
    """The results that a forward context of ``create_selective_checkpoint_contexts`` saves.

    Raises:
        MovedError: PyTorch keeps it otherwise.
    """
    for wrapper in tree_iter(list(_leaves(context.storage))):
        if type(wrapper) is object:
            continue  # a mark: computed again, or given back already
        if not (hasattr(wrapper, "val") and hasattr(wrapper, "version")):
            raise MovedError(
                f"torch {torch.__version__} stores the results of selective activation checkpointing differently "
                f"({type(wrapper).__name__}), which seqtile does not support; use checkpoint='layer', or torch "
                f"{SEEN['torch']}"
            )
        yield SavedValue(wrapper)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):  # a defaultdict among them, which PyTorch's trees would rebuild
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def keeps_generator(device: torch.device) -> bool:
    """Whether PyTorch's checkpoint replays the random numbers of this kind of device; ``torch.mps``: no (2.13)."""
    return bool(getattr(torch.get_device_module(device), "_initialized", False))


# ---- transformers ----

SET_CHECKPOINTING = "_set_gradient_checkpointing"
"""The method by which transformers hands its checkpoint function to a model's layers."""

CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"
"""Where a layer keeps the function that its forward is checkpointed with."""

INPUT_HOOKS = "_require_grads_hooks", "_require_grads_hook"
"""Where transformers keeps the hooks by which embeddings need a gradient; it leaves them when checkpoints go off."""

GRADIENT_NORM_METHODS = ("_clip_grad_norm", "_get_grad_norm")
"""Methods of its trainer that read all gradients before the optimizer's step."""

LOSS_FUNCTION = "_loss_function"
"""Where a model keeps a loss that was set; it has another if nothing is there."""


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "past_key_value", "layer_past")
"""Names of the cache argument of layers, attentions and mixers: ``cache`` from transformers 5.24 on."""

RG_LRU_SCAN = "_rnn_scan"
"""RecurrentGemma's loop over tokens, a method of its RG-LRU."""


def attention_kind(owner: Any) -> str | None:
    """Name of the attention implementation of a model, a module or a config; None where none is known."""
    config = getattr(owner, "config", owner)
    implementation: str | None = getattr(config, "_attn_implementation", None)
    return implementation


def replaced_attention(owner: Any) -> str | None:
    """:func:`attention_kind`, of an :class:`OtherAttention` what it replaces."""
    config = getattr(owner, "config", owner)
    return config.replaced if isinstance(config, OtherAttention) else attention_kind(config)


def ulysses_around(attention: str | None) -> Any:
    """DeepSpeed's Ulysses where it has taken the attention function of this name, else None."""
    module = sys.modules.get("deepspeed.runtime.sequence_parallel.ulysses_sp")
    if module is None:
        return None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(attention, None)
    contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next((value for value in contents if isinstance(value, module.UlyssesSPAttentionHF)), None)


class OtherAttention:
    """A configuration that names another attention implementation, and is else the original.

    Attributes:
        original: the configuration.
    """

    def __init__(self, config: Any, name: str) -> None:
        self.__dict__.update(original=config, _attn_implementation=name)

    @property
    def replaced(self) -> Any:
        """The implementation that the original names, behind others of these."""
        return replaced_attention(self.original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "original" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)


def compute_attention_plainly(config: Any) -> None:
    """Have this config say "eager", whatever a model's class allows."""
    config.__dict__["_attn_implementation_internal"] = "eager"


def supports_sdpa(model: Any) -> bool:
    """Whether transformers has PyTorch's own attention for a model; also True for a model that is not its own."""
    return bool(getattr(model, "_supports_sdpa", True))


def sdpa_shares_keys(width: int) -> bool:
    """Whether transformers has PyTorch's attention share keys between query heads of this width."""
    from transformers.integrations.sdpa_attention import use_gqa_in_sdpa

    key = torch.empty(1, 1, 1, width, device="meta")
    return bool(use_gqa_in_sdpa(None, *[key] * (len(inspect.signature(use_gqa_in_sdpa).parameters) - 1)))


def attention_is_exchangeable(model_class: type) -> bool:
    """Whether a class of transformers' models calls whichever attention function its configuration names."""
    return bool(getattr(model_class, "_supports_attention_backend", False))


def checkpoints_in_forward(layer: nn.Module) -> bool:
    """Whether a layer's forward runs its activation checkpoint; in earlier versions its call does."""
    return type(layer).__call__ is nn.Module.__call__


def kept_in_fp32(model: Any, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Names of weights that transformers loads in fp32 where the others are of ``dtype``."""
    kept = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    patterns = [pattern.replace("*", ".*") for pattern in kept]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


CAPTURING = "transformers.utils.output_capturing"
"""The module whose hooks capture outputs for a call that requests them, from transformers 5.16 on."""

ROUTER_LOGITS = "router_logits"


def _captured() -> Mapping[str, list[Tensor]]:
    """Tensors that the current call has captured so far, by the name of the output; empty if it requests none."""
    module = sys.modules.get(CAPTURING)
    return (None if module is None else module._active_collector.get()) or {}


def captured_by(hook: Any) -> str | None:
    """The output that transformers' own hook captures in the current call, "" for none; None for any other hook."""
    if getattr(hook, "__module__", None) != CAPTURING:
        return None
    names = hook.__code__.co_freevars
    key: str = hook.__closure__[names.index("key")].cell_contents
    return key if key in _captured() else ""


def captures_nothing(hook: Any) -> bool:
    """Whether a hook is transformers' own, which captures outputs for a call that requests them, and none does now."""
    return captured_by(hook) == ""


def captures_router_logits() -> bool:
    """Whether the current call captures router logits by hooks."""
    return ROUTER_LOGITS in _captured()


def capture_router_logits(logits: Iterable[Tensor]) -> None:
    """Add ``logits`` to those that the current call captures."""
    _captured()[ROUTER_LOGITS].extend(logits)


@contextmanager
def router_logits_apart(requested: bool = True) -> Iterator[list[Tensor]]:
    """If requested, capture router logits in this list instead of in the surrounding call's."""
    logits: list[Tensor] = []
    if not requested:
        yield logits
        return
    collector = sys.modules[CAPTURING]._active_collector
    outside = collector.set({ROUTER_LOGITS: logits})
    try:
        yield logits
    finally:
        collector.reset(outside)


def captures_by_forward(module: nn.Module) -> bool:
    """Whether transformers before 5.16 has wrapped the forward of an instance, to record its outputs for this call."""
    code = getattr(module.__dict__.get("forward"), "__code__", None)
    return code is not None and "collected_outputs" in code.co_freevars


# ---- accelerate ----

BOOKKEEPING = (
    "ds_", "pre_bwd_fn", "post_bwd_fn", "applied_pre_backward", "all_parameters", "_external_params",
    "_original_parameters", "to_empty", "_z3", "_fsdp", "_is_fsdp", "_state_dict", "_optim_state", "_hf_hook", "_is_hf",
    "layer_idx", "kwargs",
)  # fmt: skip
"""How the attributes begin in which engines (DeepSpeed, FSDP, accelerate), transformers and PEFT (``kwargs``, with the
layer's name) note things on a module."""

HOOKED_FORWARD = "_old_forward"
"""Where accelerate's hooks keep the forward that they were put around."""

HOOKING = "_hf_hook"
"""Where a module keeps the hook that accelerate put on it."""

PREPARED_FORWARD = "_original_forward"
"""Where ``Accelerator.prepare`` keeps the forward that it put autocast around."""


# ---- PEFT ----

PER_SEQUENCE = ("adapter_names", "alora_offsets")
"""Arguments with one entry per sequence that a hook of PEFT's adds to the adapters' calls, as a partial's keywords."""

CACHED_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of PEFT's prompts that are a key-value cache, which transformers' checkpointed layers drop."""


def cached_prompt(model: nn.Module) -> str:
    """The kind of a prompt in ``model`` that is a key-value cache, or ""."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            kind = getattr(config, "peft_type", "")
            if (name := str(getattr(kind, "value", kind))) in CACHED_PROMPTS:
                return name
    return ""


def refuses_adapter(config: Any, model_type: str, name: str) -> bool:
    """Whether PEFT refuses an adapter of ``config`` on a layer called ``name`` in a model of that type."""
    module = importlib.import_module("peft.tuners.tuners_utils")
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=model_type))
    try:
        module._check_lora_target_modules_mamba(config, model, name)
    except ValueError:
        return True
    return False


def drop_expert_targets(config: Any, model: Any) -> None:
    """Take out of a LoRA configuration what PEFT would turn into adapters on experts that are 3-D parameters.

    PEFT turns names of linear layers (``"all-linear"``, ``"down_proj"``) into parameters of the experts where these had
    linear layers in Transformers 4, when it adds the adapters; what is left of the names it then leaves as it is.
    """
    patterns = dict(config.rank_pattern), dict(config.alpha_pattern)
    module = importlib.import_module("peft.utils.transformers_weight_conversion")
    module.convert_peft_config_for_transformers(config, model=model, conversions=None)
    config.target_parameters = None
    config.rank_pattern, config.alpha_pattern = patterns


# ---- TRL ----

OVERRIDDEN = frozenset(
    {"_get_grad_norm", "_save", "_save_checkpoint", "_get_output_dir", "_prepare_dataset", "_load_from_checkpoint"}
)
"""Private methods of the trainer that :class:`seqtile.train.trainer.Trainer` overrides or calls."""

_FUSED_HEAD = ("original_forward", "temperature", "cast_lm_head_to_fp32", "outputs")


def trl_head_settings(forward: Any) -> dict[str, Any] | None:
    """The settings of TRL's fused head on a model; None if ``forward`` is something else.

    It is known by its argument ``fused_lm_head``, by which TRL's trainers call it.

    Raises:
        KeyError: it is TRL's, but keeps the named setting elsewhere.
    """
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return None
    if "fused_lm_head" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return None
    settings = inspect.getclosurevars(function).nonlocals
    return {name: settings[name] for name in _FUSED_HEAD}


def step_sums(trainer: Any) -> tuple[dict[str, dict[str, list[Any]]], Any]:
    """Copies of the sums of TRL's trainer since the last log, by mode and name, and of its token count."""
    sums = {
        mode: {name: list(values) for name, values in by_name.items()} for mode, by_name in trainer._metrics.items()
    }
    return sums, trainer._total_train_tokens


def restore_step_sums(trainer: Any, sums: dict[str, dict[str, list[Any]]], tokens: Any) -> None:
    """Put back what :func:`step_sums` gave."""
    for mode, by_name in trainer._metrics.items():
        by_name.clear()
        by_name.update({name: list(values) for name, values in sums.get(mode, {}).items()})
    trainer._total_train_tokens = tokens


ONLINE_DPO_FORWARD = "_forward"
"""The method of TRL's online DPO trainer that turns logits into log-probabilities."""


def training_template(tokenizer: Any, arguments: Any) -> str | None:
    """The chat template by which TRL marks answers where that of a tokenizer or processor does not; else None."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not arguments.assistant_only_loss or has_generation_markers(tokenizer.chat_template):
        return None
    return get_training_chat_template(tokenizer)  # type: ignore[no-any-return, unused-ignore]


def tokens_of_media(processor: Any, sizes: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """Tokens of each picture and video by (frames,) height and width; None where the processor does not know."""
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is None:
        return None
    wanted = {f"{kind}_sizes": [size for size in sizes[kind] if size] for kind in ("image", "video")}
    try:
        counts = count(**{name: each for name, each in wanted.items() if each})
    except (TypeError, AttributeError, NotImplementedError):
        return None
    return {kind: list(getattr(counts, f"num_{kind}_tokens", None) or []) for kind in ("image", "video")}


REDUCES_UNUSED = "set_reduce_scatter_unused_params"
"""FSDP2's method that lets ranks use different weights, from PyTorch 2.13 on."""

TRL_FORWARDS = {"_compute_loss", "concatenated_forward", "forward", "get_batch_loss_metrics"}
"""Methods by which TRL's trainers, and LLaMA-Factory's subclasses of them, call the model."""

TRL_LOSSES = {*TRL_FORWARDS, "compute_loss", "training_step"}
"""Methods by which a subclass of them has a loss of its own."""


def prepare_like_sft(rows: Any, tokenizer: Any, arguments: Any) -> Any:
    """``rows`` as TRL's ``SFTTrainer`` tokenises and masks them, whole; neither a trainer nor a model is made."""
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    columns = rows.column_names
    completion_only = arguments.completion_only_loss
    if completion_only is None:
        completion_only = "prompt" in columns and "completion" in columns
    trainer: Any = types.SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=training_template(tokenizer, arguments),
        completion_only_loss=completion_only,
    )
    whole = copy.copy(arguments)
    whole.max_length, whole.shuffle_dataset, whole.dataset_num_proc = None, False, None
    return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, whole, False, None, "sample")


# ---- DeepSpeed ----

LEAF = "_z3_leaf"
"""The mark by which ZeRO-3 gathers all weights of a module before it runs."""


def is_in_zero12(weight: Tensor) -> bool:
    """Whether ZeRO-1 or 2 has taken a weight over."""
    return hasattr(weight, "_hp_mapping")


ZERO3_MARKS = frozenset({"ds_recompute_parameters", "post_bwd_fn"})
"""Attributes that ZeRO-3 gives a module which it has taken over, whose weights it gathers when it runs."""


# ---- axolotl, ms-swift and Unsloth ----

SWIFT_IMPORTS_PLUGINS = "_import_external_plugins"
"""The method of ms-swift's arguments that runs plugins; its ``self`` are the arguments."""


def is_tiled_by_axolotl(module: nn.Module) -> bool:
    """Whether the module is of a class whose forward axolotl's own tiled MLP has replaced."""
    return hasattr(module, "_tiled_mlp_dist_impl")


def is_tiled_by_unsloth(module: nn.Module) -> bool:
    """Whether the forward of this instance is Unsloth's own tiled one (``unsloth_zoo.tiled_mlp.patch_mlp``)."""
    forward = module.__dict__.get("forward")
    return getattr(getattr(forward, "__func__", None), "__module__", "") == "unsloth_zoo.tiled_mlp"


def checkpoint_before_swift() -> Any:
    """``torch.utils.checkpoint.checkpoint`` as it was before ms-swift replaced it; None if it has not."""
    return getattr(_torch_checkpoint, "_old_checkpoint", None)
