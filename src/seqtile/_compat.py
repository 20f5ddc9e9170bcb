"""Everything private of other libraries that seqtile reaches, and what it relies on there.

The rest of the code takes private names from here and reads none itself (ruff's SLF001 and ``tests/unit/test_house.py``
keep it so). Each has a contract: a check that the private thing exists and behaves as relied upon, the file that it was
seen in, and what would make it superfluous. ``seqtile doctor --compat`` runs the contracts against the installed
versions, and ``tests/unit/test_compat.py`` fails by the contract's name when something has moved.

What a hot path calls is bound here once, at import. torch is imported with the module, every other library inside the
checks. A name that torch has moved raises at its first use, not at import, so that the rest still runs and the doctor
can say what is missing.
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
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as _torch_checkpoint

from seqtile._shallow import bare_instance
from seqtile.devices import package_version

SEEN = {
    "python": "3.11", "torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2",
    "trl": "1.16.0", "deepspeed": "0.19.8", "axolotl": "", "ms-swift": "",
    "unsloth": "", "unsloth_zoo": "",
}  # fmt: skip
"""The version of each library in which its private names were last read; "" where no version is pinned."""

TESTED = {
    "torch": ("2.13", "2.13"), "transformers": ("5.0", "5.23"), "accelerate": ("1.11", "1.15"),
    "peft": ("0.19", "0.21"), "trl": ("1.16", "1.16"), "deepspeed": ("0.18", "0.19"),
}  # fmt: skip
"""The lowest and the highest version of each library that tests have run with; a release of the same minor counts."""

_SOURCES = {
    "python": "https://github.com/python/cpython/blob/{}/",
    "torch": "https://github.com/pytorch/pytorch/blob/v{}/",
    "transformers": "https://github.com/huggingface/transformers/blob/v{}/",
    "accelerate": "https://github.com/huggingface/accelerate/blob/v{}/",
    "peft": "https://github.com/huggingface/peft/blob/v{}/",
    "trl": "https://github.com/huggingface/trl/blob/v{}/",
    "deepspeed": "https://github.com/deepspeedai/DeepSpeed/blob/v{}/",
    "axolotl": "https://github.com/axolotl-ai-cloud/axolotl/blob/main/",
    "ms-swift": "https://github.com/modelscope/ms-swift/blob/main/",
    "unsloth": "https://github.com/unslothai/unsloth/blob/main/",
    "unsloth_zoo": "https://github.com/unslothai/unsloth-zoo/blob/main/",
}


class MovedError(RuntimeError):
    """A private name of another library is gone, or means something else."""


class _Moved:
    """Stands for a name that could not be found: whatever is done with it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *_: Any, **__: Any) -> Any:
        library = self._name.partition(".")[0]
        raise MovedError(
            f"seqtile needs {self._name}, which {library} {installed(library)} does not have; install {library} "
            f"{SEEN[library]}, and see what else has moved with `seqtile doctor --compat`"
        )

    __call__ = __iter__ = __instancecheck__ = __mro_entries__ = __getitem__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for its protocols
            raise AttributeError(name)
        return self._raise()


def _find(name: str) -> Any:
    """What a dotted name leads to, or a stand-in that raises when it is used."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return _Moved(name)


def installed(library: str) -> str | None:
    """The version of a library, None if it is not installed."""
    return platform.python_version() if library == "python" else package_version(library)


@functools.cache
def untested() -> str:
    """What is installed in a version that no test has run with, in one sentence; "" where there is nothing."""
    found = []
    for library, (lowest, highest) in TESTED.items():
        version = installed(library)
        if version is not None and not _minor(lowest) <= _minor(version) <= _minor(highest):
            found.append(f"{library} {version} (tested: {lowest} to {highest})")
    if not found:
        return ""
    return f"not tested with {', '.join(found)}; `seqtile doctor --compat` checks what seqtile relies on there"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# ---- contracts ----


@dataclass(frozen=True)
class Contract:
    """What seqtile relies on in one private name.

    Attributes:
        name: dotted name; its first part is the library.
        library: whose it is.
        file: where it is defined, in the library's repository.
        remove_when: what would make it superfluous.
        check: raises if it is gone, or is not what it was.
    """

    name: str
    library: str
    file: str
    remove_when: str
    check: Callable[[], None]

    @property
    def seen(self) -> str:
        """The version that it was last read in."""
        return SEEN[self.library]

    @property
    def source(self) -> str:
        """Link to the file, as it was then."""
        return _SOURCES[self.library].format(self.seen) + self.file


CONTRACTS: list[Contract] = []


def _contract(name: str, file: str, remove_when: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    library = {"swift": "ms-swift", "functools": "python", "abc": "python", "atexit": "python"}.get(
        name.partition(".")[0], name.partition(".")[0]
    )

    def add(check: Callable[[], None]) -> Callable[[], None]:
        CONTRACTS.append(Contract(name, library, file, remove_when, check))
        return check

    return add


@dataclass(frozen=True)
class Finding:
    """What a contract's check said: ``"ok"``, ``"moved"`` or ``"not installed"``, and why it moved."""

    status: str
    why: str = ""


def examine(contract: Contract) -> Finding:
    """Check one contract against the installed version.

    Cost:
        Imports the library; milliseconds after that.
    """
    if installed(contract.library) is None:
        return Finding("not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contract.check()
    except Exception as error:  # noqa: BLE001 - however another version fails, this is what the check is for
        return Finding("moved", f"{type(error).__name__}: {error}")
    return Finding("ok")


def _expect(holds: Any, what: str) -> None:
    if not holds:
        raise MovedError(f"expected {what}")


def _names_in(function: Any) -> set[str]:
    """The names that a function's code uses, those of functions inside it among them."""
    codes = [inspect.unwrap(function).__code__]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found.update(code.co_names, code.co_varnames, code.co_freevars)
        found.update(one for one in code.co_consts if isinstance(one, str))
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found


def _source_of(module: str) -> str:
    """The text of a module, without running it or its package."""
    package, *parts = module.split(".")
    return _folder_of(package).joinpath(*parts).with_suffix(".py").read_text(encoding="utf-8")


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    _expect(spec is not None and spec.submodule_search_locations, f"a package {package}")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(list(spec.submodule_search_locations)[0])


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


@_contract("atexit._run_exitfuncs", "Modules/atexitmodule.c", "a process that ends at once can run them otherwise")
def _check_exit_functions() -> None:
    _expect(callable(pkgutil.resolve_name("atexit._run_exitfuncs")), "a function")


# ---- torch: modules ----

MODULES, PARAMETERS, BUFFERS = "_modules", "_parameters", "_buffers"
"""Where an instance of ``nn.Module`` keeps its own; a view of it has others under the same names."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where an instance of ``nn.Module`` keeps hooks on its calls."""

PRE_HOOKS = HOOKS[1]
"""The hooks that run before the forward."""

OUTPUT_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The hooks that see or change what the forward returns."""

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


def _view_with(module: nn.Module, where: str, name: str, value: Any) -> Any:
    view: Any = bare_instance(module)
    view.__dict__.update(module.__dict__)
    view.__dict__[where] = {**view.__dict__[where], name: value}
    return view


@_contract("torch.nn.Module._modules", "torch/nn/modules/module.py", "children can be replaced in a shallow copy")
def _check_modules() -> None:
    module, other = nn.Sequential(nn.Linear(2, 2)), nn.Identity()
    _expect(list(children_of(module).items()) == list(module.named_children()), "the children by name")
    view = _view_with(module, MODULES, "0", other)
    _expect(view[0] is other and module[0] is not other, "a shallow copy with another child")


@_contract("torch.nn.Module._parameters", "torch/nn/modules/module.py", "parameters can be replaced in a shallow copy")
def _check_parameters() -> None:
    module, other = nn.Linear(2, 2), torch.ones(2, 2)
    _expect(parameters_of(module)["weight"] is module.weight, "the parameters by name")
    _expect(_view_with(module, PARAMETERS, "weight", other).weight is other, "a shallow copy with another weight")


@_contract("torch.nn.Module._buffers", "torch/nn/modules/module.py", "buffers can be replaced in a shallow copy")
def _check_buffers() -> None:
    module, other = nn.BatchNorm1d(2), torch.ones(2)
    _expect(buffers_of(module)["running_mean"] is module.running_mean, "the buffers by name")
    _expect(_view_with(module, BUFFERS, "running_mean", other).running_mean is other, "a copy with another buffer")


@_contract(
    "torch.nn.Module._forward_hooks", "torch/nn/modules/module.py", "a module says in public whether it has hooks"
)
def _check_hooks() -> None:
    module = nn.Identity()
    registers: tuple[Callable[..., Any], ...] = (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    )
    for register, name in zip(registers, HOOKS, strict=True):
        _expect(len(getattr(module, name)) == 0, f"no {name}")
        handle = register(_no_hook)
        _expect(list(getattr(module, name).values()) == [_no_hook], f"the hook in {name}")
        handle.remove()
    handle = module.register_forward_pre_hook(_no_hook)
    _expect(list(forward_pre_hooks_of(module).values()) == [_no_hook], "the hook by its number")
    handle.remove()


def _no_hook(*_: Any) -> None:
    return None


@_contract("torch.nn.Module._call_impl", "torch/nn/modules/module.py", "a forward is told whose it is")
def _check_call_code() -> None:
    class Asks(nn.Module):
        def forward(self) -> Any:
            frame = sys._getframe(1)
            return frame.f_code is CALL_CODE and frame.f_locals.get("self") is self

    _expect(Asks()(), "the module in the frame that calls its forward")


@_contract(
    "torch.nn.Module._replicate_for_data_parallel",
    "torch/nn/parallel/replicate.py",
    "nn.DataParallel is gone (https://github.com/pytorch/pytorch/issues/65936)",
)
def _check_replicate() -> None:
    _expect(callable(getattr(nn.Module, REPLICATE)), "a method")
    _expect(REPLICATE in _names_in(_find("torch.nn.parallel.replicate.replicate")), "nn.DataParallel to call it")


# ---- torch: tensors ----

version_of: Callable[[Tensor], int] = _find("torch.Tensor._version.__get__")
"""How often a tensor was written in place; raises for an inference tensor."""

is_view: Callable[[Tensor], bool] = _find("torch.Tensor._is_view")
"""Whether a tensor is a view of another one."""

base_of: Callable[[Tensor], Tensor | None] = _find("torch.Tensor._base.__get__")
"""What a view is a view of."""

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
    """Whether a hook acts on the weight's gradient once it is accumulated, such as an optimiser's step."""
    return bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def sums_gradients_in_place(first: Tensor) -> bool:
    """Whether an addition to ``first`` is one of two gradients that autograd does in place where no mode watches.

    Under a dispatch mode it makes a new tensor instead: ``can_accumulate_inplace`` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/input_buffer.cpp. To be called below the mode's
    ``__torch_dispatch__``, the innermost one.
    """
    if torch.is_grad_enabled() or isinstance(_tensor_use_count, _Moved) or isinstance(_storage_use_count, _Moved):
        return False  # a new tensor, which is what a plan may count too much
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
    """What this rank holds of a ``DTensor``; any other tensor as it is. No gradient flows through it."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


@_contract("torch.Tensor._version", "torch/csrc/autograd/python_variable.cpp", "a public version counter")
def _check_version() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor[:1].add_(1)
    _expect(version_of(tensor) == before + 1, "one more after a write through a view")
    _expect(tensor._version == version_of(tensor), "the same as the attribute")


@_contract("torch.Tensor._is_view", "torch/csrc/autograd/python_variable.cpp", "a public question whether it is a view")
def _check_is_view() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    _expect(is_view(tensor[:1]) and not is_view(tensor) and not is_view(tensor + 1), "a view to be told from a result")


@_contract("torch.Tensor._base", "torch/csrc/autograd/python_variable.cpp", "FSDP1 is gone")
def _check_base() -> None:
    tensor = torch.zeros(2)
    _expect(base_of(tensor) is None and base_of(tensor[:1]) is tensor, "what a view is a view of")


@_contract("torch.UntypedStorage._cdata", "torch/csrc/StorageMethods.cpp", "a public identity of storages")
def _check_storage_key() -> None:
    tensor, other = torch.zeros(2), torch.zeros(2)
    _expect(
        storage_key(tensor.untyped_storage()) == storage_key(tensor[1:].untyped_storage())
        and storage_key(tensor.untyped_storage()) != storage_key(other.untyped_storage()),
        "one number for all tensors on one storage",
    )


@_contract("torch.Tensor._make_wrapper_subclass", "torch/csrc/autograd/python_variable.cpp", "it is public")
def _check_wrapper_subclass() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            return None

    made = make_wrapper_subclass(Wrapper, (3, 2), dtype=torch.float16, device=torch.device("cpu"))
    _expect(type(made) is Wrapper and made.shape == (3, 2) and made.dtype == torch.float16, "a tensor of the subclass")


@_contract(
    "torch.autograd.graph._engine_run_backward", "torch/autograd/graph.py", "torch.autograd.grad leaves modes on"
)
def _check_run_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    (gradient,) = run_backward((x * 3,), (torch.ones(2),), False, False, (x,), True, accumulate_grad=False)
    _expect(gradient.tolist() == [3.0, 3.0] and x.grad is None, "the gradient of the inputs alone")


@_contract(
    "torch._C._storage_Use_Count", "torch/csrc/Module.cpp", "autograd adds gradients in place under a dispatch mode too"
)
def _check_gradient_sums() -> None:
    seen: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                seen.append(sums_gradients_in_place(args[0]))
            return func(*args, **(kwargs or {}))

    class Plus(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.exp() + grad

    with Mode():  # type: ignore[no-untyped-call]
        x = torch.ones(2, requires_grad=True) * 1
        (x.exp() + x.sin()).exp().sum().backward()
        _expect(seen == [True], f"a sum of two new gradients to be seen, got {seen}")
        x, y = (torch.ones(2, requires_grad=True) * 1 for _ in range(2))
        low = x.sin() * y.sin()
        ((x + y).exp() + low).exp().sum().backward()  # x and y begin with the same gradient
        Plus.apply(torch.ones(2, requires_grad=True)).exp().sum().backward()  # type: ignore[no-untyped-call]
    _expect(seen == [True, False, True, False], f"what others hold and formulas to be told from it, got {seen}")


@_contract("torch.Tensor._post_accumulate_grad_hooks", "torch/_tensor.py", "a public list of a tensor's hooks")
def _check_post_accumulate_hooks() -> None:
    weight = nn.Parameter(torch.zeros(2))
    _expect(not has_gradient_step(weight), "none on a new parameter")
    weight.register_post_accumulate_grad_hook(_no_hook)
    _expect(has_gradient_step(weight), "the hook that was registered")


@_contract("torch.nn.Parameter._is_param", "torch/nn/parameter.py", "a public way to say that a tensor is a parameter")
def _check_call_parameter() -> None:
    alias = torch.zeros(2)
    call_parameter(alias)
    _expect(isinstance(alias, nn.Parameter), "a tensor that is called a parameter is one")


@_contract("torch._C._functorch.maybe_current_level", "torch/csrc/functorch/init.cpp", "a public way to ask")
def _check_in_transform() -> None:
    _expect(transform_level() is None, "none outside")
    _expect(
        torch.func.vmap(lambda x: x + (transform_level() is not None))(torch.zeros(2)).sum() == 2, "one inside of vmap"
    )


@_contract("torch.autograd.forward_ad._current_level", "torch/autograd/forward_ad.py", "a public way to ask")
def _check_forward_mode() -> None:
    _expect(not in_forward_mode(), "no level outside")
    with torch.autograd.forward_ad.dual_level():
        _expect(in_forward_mode(), "a level inside")


@_contract(
    "torch.distributed.fsdp.FlatParameter._is_flat_param", "torch/distributed/fsdp/_flat_param.py", "FSDP1 is gone"
)
def _check_flat_parameter() -> None:
    if not torch.distributed.is_available():
        return  # a build without FSDP
    flat = pkgutil.resolve_name("torch.distributed.fsdp._flat_param.FlatParameter")(torch.zeros(4))
    view = flat[:2]
    _expect(is_flat_parameter(flat) and is_flat_parameter(base_of(view)), "the mark on a flat parameter")
    _expect(not is_flat_parameter(nn.Parameter(torch.zeros(4))), "no mark on another")


@_contract(
    "torch.distributed.tensor.DTensor._local_tensor", "torch/distributed/tensor/_api.py", "to_local() leaves no trace"
)
def _check_local_tensor() -> None:
    if not torch.distributed.is_available():
        return  # a build without DTensor
    kind = pkgutil.resolve_name("torch.distributed.tensor.DTensor")
    _expect("_local_tensor" in _names_in(kind.to_local), "to_local() to read it")


# ---- torch: files ----

TorchArchive: Any = _find("torch._C.PyTorchFileReader")


def pickle_of(file: BinaryIO) -> bytes | None:
    """The pickle inside an archive of ``torch.save``, as ``torch.load`` would find it; None if it is no such archive.

    A zip file that is read in two ways by two readers could show one pickle and load another: so this is torch's own.
    """
    if file.read(4) != b"PK\x03\x04":
        return None
    file.seek(0)
    archive = TorchArchive(file)
    if "constants.pkl" in archive.get_all_records():  # TorchScript, which torch.load hands to another loader
        return None
    content: bytes = archive.get_record("data.pkl")
    return content


@_contract("torch._C.PyTorchFileReader", "torch/csrc/jit/python/init.cpp", "torch says what a file would call")
def _check_archive() -> None:
    _expect("PyTorchFileReader" in _names_in(_find("torch.serialization._open_zipfile_reader.__init__")), "its use")
    with tempfile.TemporaryDirectory() as folder:
        torch.save({}, path := Path(folder) / "one.pt")
        with path.open("rb") as file:
            _expect(pickle_of(file), "the pickle in an archive")


PICKLED_NAMES: dict[str, set[str]] = {
    "__builtin__": {"bytearray", "complex", "frozenset", "set"},
    "builtins": {"bytearray", "complex", "frozenset", "set"},
    "_codecs": {"encode"},
    "collections": {"Counter", "OrderedDict", "defaultdict"},
    "deepspeed.runtime.fp16.loss_scaler": {"DynamicLossScaler", "LossScaler"},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "torch": {"Size", "Tensor", "device"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },  # fmt: skip
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"TypedStorage", "UntypedStorage"},
}
"""What the files of Transformers, Accelerate, DeepSpeed and PyTorch's distributed checkpoints ask for, by module."""


@_contract("torch._utils._rebuild_tensor_v2", "torch/_utils.py", "torch.load(weights_only=True) takes these files")
def _check_pickled_names() -> None:
    for module, names in PICKLED_NAMES.items():
        for name in names if module.partition(".")[0] == "torch" else ():
            _expect(not isinstance(_find(f"{module}:{name}"), _Moved), f"{module}.{name}, which checkpoints ask for")


PICKLED_KINDS = {"numpy.dtypes": r"\w+DType", "torch": r"\w+Storage|bool|u?int\d+|b?float\d+\w*|complex\d+"}
"""What they ask for besides, as patterns by module: storages and number types, of which there are many."""


# ---- torch: dispatch, fake tensors and trees ----

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
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
    OpOverloadPacket = _find("torch._ops.OpOverloadPacket")
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

is_wrapper_subclass: Callable[[type], bool] = _find("torch.utils._python_dispatch.is_traceable_wrapper_subclass_type")
disable_current_modes: Callable[[], Any] = _find("torch.utils._python_dispatch._disable_current_modes")
disabled_torch_function: Any = _find("torch._C._disabled_torch_function_impl")
disable_torch_function_subclass: Callable[[], Any] = _find("torch._C.DisableTorchFunctionSubclass")
has_kernel: Callable[[str, Any], bool] = _find("torch._C._dispatch_has_kernel_for_dispatch_key")
_dispatch_mode: Callable[[Any], Any] = _find("torch._C._get_dispatch_mode")
_FAKE = _find("torch._C._TorchDispatchModeKey.FAKE")
_make_subclass: Callable[..., Any] = _find("torch.Tensor._make_subclass")
without_dispatch: Callable[[], Any] = _find("torch._C._DisableTorchDispatch")
"""A context inside which operators reach their kernels past every mode and subclass."""

shapes_only: Callable[[Any], Any] = _find("torch._subclasses.fake_tensor.in_kernel_invocation_manager")

GROUPED_MM: Any = _find("torch.ops.aten._grouped_mm.default")
TO_COPY: Any = _find("torch.ops.aten._to_copy.default")
UNSAFE_VIEW: Any = _find("torch.ops.aten._unsafe_view.default")
READ_NUMBER: Any = _find("torch.ops.aten._local_scalar_dense.default")
ALL_TRUE = "_is_all_true"
"""The operator by which PyTorch's distributions check their arguments."""

READ_NUMBER_NAME = "_local_scalar_dense"
unsafe_view: Callable[..., Tensor] = _find("torch.ops.aten._unsafe_view")
"""A view that autograd does not know as one, for a tensor that nobody else holds."""

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
"""What their kernels are called."""


def schema_of(operator: Any) -> Any:
    """Name, arguments and returns of an operator's overload."""
    return operator._schema


def fake_on(meta: Tensor, like: Any) -> Any:
    """``FakeTensor(mode, meta, device)`` of the mode and device of the fake ``like``, in a quarter of the time."""
    made = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=like.fake_device)
    vars(made).update(vars(like))
    return made


def active_fake_mode() -> Any:
    """The fake tensor mode that operators run under, None without one."""
    return _dispatch_mode(_FAKE)


@_contract("torch._ops.OpOverload._schema", "torch/_ops.py", "operators have a public schema")
def _check_operators() -> None:
    add = torch.ops.aten.add_.Tensor
    _expect(
        isinstance(add, OpOverload) and isinstance(torch.ops.aten.add_, OpOverloadPacket), "operators of these types"
    )
    schema = schema_of(add)
    _expect(schema.name == "aten::add_" and schema.is_mutable, "name, and that it writes")
    first = schema.arguments[0]
    _expect(first.name == "self" and first.alias_info.is_write, "the argument that it writes into")
    _expect(schema.arguments[2].has_default_value() and schema.arguments[2].default_value == 1, "default values")


@_contract("torch.utils._python_dispatch.TorchDispatchMode", "torch/utils/_python_dispatch.py", "it is public")
def _check_dispatch_mode() -> None:
    one = torch.ones(1)

    def run() -> None:
        one.add(one)
        with disable_current_modes():
            one.mul(one)

    _expect(_operators_of(run) == [torch.ops.aten.add.Tensor], "each operator, except where modes are off")


def _operators_of(run: Callable[[], Any]) -> list[Any]:
    """The operators that reach a dispatch mode around ``run``."""
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():  # type: ignore[no-untyped-call]
        run()
    return seen


@_contract("torch.utils._python_dispatch._disable_current_modes", "torch/utils/_python_dispatch.py", "it is public")
def _check_disable_modes() -> None:
    with FakeTensorMode(), disable_current_modes():
        _expect(type(torch.ones(1)) is Tensor, "a real tensor inside a fake mode")


@_contract(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type", "torch/utils/_python_dispatch.py", "it is public"
)
def _check_wrapper_subclass_type() -> None:
    class Wrapper(Tensor):
        def __tensor_flatten__(self) -> Any:
            return [], None

        @staticmethod
        def __tensor_unflatten__(*_: Any) -> Any:
            return None

    _expect(is_wrapper_subclass(Wrapper) and not is_wrapper_subclass(Tensor), "a wrapper to be told from a tensor")


@_contract(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "torch/utils/_python_dispatch.py",
    "the stack of modes is public",
)  # fmt: skip
def _check_dispatch_mode_stack() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    with TorchDispatchMode() as mode:
        _expect(dispatch_modes()[-1] is mode, "the mode that was entered last")


@_contract("torch._C._disabled_torch_function_impl", "torch/csrc/utils/disable_torch_function.cpp", "it is public")
def _check_disabled_torch_function() -> None:
    class Plain(Tensor):
        __torch_function__ = disabled_torch_function

    _expect(type(torch.ones(1).as_subclass(Plain) + 1) is Tensor, "operators to return a plain tensor")


@_contract("torch._C.DisableTorchFunctionSubclass", "torch/csrc/utils/disable_torch_function.cpp", "it is public")
def _check_disable_subclass() -> None:
    class Refuses(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise MovedError("expected __torch_function__ not to be called")

    held = torch.ones(1).as_subclass(Refuses)
    with disable_torch_function_subclass():
        held + 1


@_contract("torch._C._get_dispatch_mode", "torch/csrc/autograd/init.cpp", "the active fake mode can be asked in public")
def _check_active_fake_mode() -> None:
    before = active_fake_mode()
    with FakeTensorMode() as mode:
        _expect(active_fake_mode() is mode, "the mode that was entered")
    _expect(active_fake_mode() is before, "the one before it afterwards")


@_contract("torch._C._dispatch_has_kernel_for_dispatch_key", "torch/csrc/utils/python_dispatch.cpp", "it is public")
def _check_has_kernel() -> None:
    composite, cpu = DispatchKey.CompositeImplicitAutograd, DispatchKey.CPU
    _expect(has_kernel("aten::matmul", composite) and not has_kernel("aten::matmul", cpu), "matmul to be composite")
    _expect(has_kernel("aten::mm", cpu) and not has_kernel("aten::mm", composite), "mm to have a kernel")


@_contract(
    "torch._subclasses.fake_tensor.FakeTensorMode", "torch/_subclasses/fake_tensor.py", "fake tensors are public"
)
def _check_fake_tensors() -> None:
    with FakeTensorMode():
        fake = torch.ones(3, 2) @ torch.ones(2, 4)
        _expect(isinstance(fake, FakeTensor) and fake.shape == (3, 4) and fake.device.type == "cpu", "a fake result")
        try:
            bool(fake.sum() > 0)
        except DataDependentOutputException as error:
            _expect(error.func is READ_NUMBER, f"the operator {READ_NUMBER_NAME} to be named")
        else:
            raise MovedError("expected DataDependentOutputException where a number is read")


@_contract(
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    "torch/_subclasses/fake_tensor.py",
    "fake tensors are public",
)
def _check_shapes_only() -> None:
    with FakeTensorMode() as mode:
        fake = torch.ones(3, 2)
        with shapes_only(mode):
            _expect(fake.device.type == "meta", "a fake tensor to be one of the meta device inside")
        _expect(fake.device.type == "cpu", "its own device outside")


@_contract("torch.Tensor._make_subclass", "torch/_subclasses/fake_tensor.py", "fake tensors are made in less time")
def _check_fake_on() -> None:
    with FakeTensorMode() as mode, shapes_only(mode):
        like, meta = (torch.empty(size, device="meta") for size in ((1,), (3, 2)))
        like, made = FakeTensor(mode, like, torch.device("cpu")), FakeTensor(mode, meta, torch.device("cpu"))
        quick = fake_on(meta, like)
    _expect(type(quick) is type(made) and vars(quick) == vars(made), "the attributes of a fake tensor")
    with mode:
        _expect((quick + 1).shape == (3, 2) and quick.device.type == "cpu", "a fake tensor that operators take")


@_contract("torch._C._DisableTorchDispatch", "torch/csrc/autograd/init.cpp", "modes can be left in public")
def _check_without_dispatch() -> None:
    with FakeTensorMode(), without_dispatch():
        _expect(type(torch.empty(2, device="meta")) is Tensor, "a tensor that no mode has seen")


@_contract("torch.ops.aten._to_copy", "aten/src/ATen/native/native_functions.yaml", "operators are named in public")
def _check_to_copy() -> None:
    _expect(TO_COPY(torch.ones(2), dtype=torch.float64).dtype == torch.float64, "a copy in another dtype")


@_contract("torch.utils._pytree.tree_flatten", "torch/utils/_pytree.py", "torch.utils.pytree has these")
def _check_trees() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = tree_flatten(tree)
    _expect(isinstance(spec, TreeSpec) and tree_unflatten(leaves, spec) == tree, "a tree to come back")
    _expect(leaves == list(tree_iter(tree)) == tree_leaves(tree) == [1, 2, None, 3], "its leaves in order")
    _expect(tree_map(str, [1, (2,)]) == ["1", ("2",)], "a function on each leaf")


@_contract(
    "torch.ops.aten._grouped_mm", "aten/src/ATen/native/native_functions.yaml", "torch.nn.functional.grouped_mm is seen"
)
def _check_grouped_mm() -> None:
    names = [argument.name for argument in schema_of(GROUPED_MM).arguments]
    _expect(names[:3] == ["self", "mat2", "offs"], f"self, mat2 and offs, got {names}")


@_contract("torch.ops.aten._local_scalar_dense", "aten/src/ATen/native/native_functions.yaml", "it is renamed")
def _check_read_number() -> None:
    _expect(schema_of(READ_NUMBER).name == f"aten::{READ_NUMBER_NAME}", f"the name {READ_NUMBER_NAME}")
    _expect(READ_NUMBER(torch.tensor(2.0)) == 2.0, "the number of a tensor")


@_contract(
    "torch.ops.aten._unsafe_view", "aten/src/ATen/native/native_functions.yaml", "view makes no view of autograd's"
)
def _check_unsafe_view() -> None:
    x = torch.ones(6, requires_grad=True) * 2
    made = unsafe_view(x, (2, 3))
    _expect(schema_of(UNSAFE_VIEW).name == "aten::_unsafe_view", "its name")
    _expect(made.shape == (2, 3) and not is_view(made) and made.data_ptr() == x.data_ptr(), "the same memory, no view")


@_contract(
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "aten/src/ATen/native/native_functions.yaml",
    "PyTorch tells fused attention kernels by a tag",
)
def _check_attention_kernels() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name in ATTENTION_KERNELS:
        _expect(hasattr(torch.ops.aten, name), f"an operator {name}")
    x = torch.ones(1, 1, 4, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        seen = _operators_of(lambda: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True))
    names = [schema_of(one).name.removeprefix("aten::") for one in seen]
    _expect(set(names) & set(ATTENTION_KERNELS), f"one of these kernels on the CPU, got {names}")


@_contract(
    "torch.nn.attention._cur_sdpa_kernel_backends",
    "torch/nn/attention/__init__.py",
    "the order in which SDPA tries its kernels can be read in public",
)
def _check_allowed_sdpa_kernels() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for order in ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        with sdpa_kernel(order, set_priority=True):
            _expect(allowed_sdpa_kernels(with_priority=True) == order, f"{order}")


# ---- torch: backward passes, checkpoints, devices ----

backward_pass: Callable[[], int] = _find("torch._C._current_graph_task_id")
"""Identity of the running backward pass, -1 outside of one."""

_keeps_graph: Any = _find("torch._C._autograd._get_current_graph_task_keep_graph")


def keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``; True where PyTorch does not say."""
    return isinstance(_keeps_graph, _Moved) or bool(_keeps_graph())


def early_stop() -> bool | None:
    """What ``set_checkpoint_early_stop`` has set for the whole process; None if nothing is set."""
    found: bool | None = getattr(_torch_checkpoint, "_enable_checkpoint_early_stop", None)
    return found


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
"""Argument of a checkpoint by which offload hooks around it also see what a policy keeps: from torch 2.15 on, where the
default is announced to change, and warns. PyTorch hands it to its own context only, so a wrapped one is told too."""


def saved_values(context: Any) -> Iterator[SavedValue]:
    """What one forward context of ``create_selective_checkpoint_contexts`` keeps.

    Raises:
        MovedError: PyTorch keeps it otherwise.
    """
    for wrapper in tree_iter(list(_leaves(context.storage))):
        if type(wrapper) is object:
            continue  # a mark: computed again, or given back already
        if not (hasattr(wrapper, "val") and hasattr(wrapper, "version")):
            raise MovedError(
                f"torch {torch.__version__} keeps the results of a selective activation checkpoint where seqtile does "
                f"not find them ({type(wrapper).__name__}); use checkpoint='full', or torch {SEEN['torch']}"
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


def record_memory(on: bool) -> None:
    """Record every allocation of the CUDA allocator from now on, or stop."""
    _find("torch.cuda.memory._record_memory_history")(**({} if on else {"enabled": None}))


def dump_memory(file: Path) -> None:
    """Write what was recorded; https://pytorch.org/memory_viz shows it."""
    _find("torch.cuda.memory._dump_snapshot")(str(file))


@_contract("torch._C._current_graph_task_id", "torch/csrc/autograd/init.cpp", "a backward pass has a public identity")
def _check_backward_pass() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        y = x * 1
        y.register_hook(lambda _: seen.append(backward_pass()))
        y.backward()
    _expect(backward_pass() == -1 and -1 not in seen and len(set(seen)) == 2, "a number for each backward, -1 outside")


@_contract(
    "torch._C._autograd._get_current_graph_task_keep_graph", "torch/csrc/autograd/init.cpp", "a node's context says it"
)
def _check_keeps_graph() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: seen.append(keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    _expect(seen == [True, False], f"whether the graph is kept, got {seen}")


@_contract(
    "torch.utils.checkpoint._enable_checkpoint_early_stop", "torch/utils/checkpoint.py", "the switch can be asked"
)
def _check_early_stop() -> None:
    before = early_stop()
    with _torch_checkpoint.set_checkpoint_early_stop(False):
        _expect(early_stop() is False, "False inside set_checkpoint_early_stop(False)")
    _expect(early_stop() is before, "what it was afterwards")


@_contract(
    "torch.utils.checkpoint._VersionWrapper.val", "torch/utils/checkpoint.py", "selective checkpointing offloads itself"
)
def _check_saved_values() -> None:
    save = _torch_checkpoint.CheckpointPolicy.MUST_SAVE
    x = torch.ones(2, 2, requires_grad=True)
    forward, recompute = _torch_checkpoint.create_selective_checkpoint_contexts(lambda *_, **__: save)
    with forward:
        expected = (x * 3).detach()
    values = [one for one in saved_values(forward) if isinstance(one.get(), Tensor)]
    _expect(len(values) == 1 and torch.equal(values[0].get(), expected), "the result of the operator")
    other = expected + 1
    values[0].drop()
    values[0].put(other)
    with recompute:
        again = (x * 3).detach()
    _expect(torch.equal(again, other), "the recompute to return what was put there")


@_contract("torch.cuda._initialized", "torch/cuda/__init__.py", "PyTorch's checkpoint keeps the state of every device")
def _check_initialized() -> None:
    _expect(isinstance(torch.cuda._initialized, bool), "a bool")
    functions = [one for one in vars(_torch_checkpoint).values() if isinstance(one, types.FunctionType)]
    _expect(any("_initialized" in _names_in(one) for one in functions), "PyTorch's checkpoint to ask for it")


@_contract("torch.cuda.memory._record_memory_history", "torch/cuda/memory.py", "a public snapshot of memory")
def _check_memory_history() -> None:
    found = inspect.signature(pkgutil.resolve_name("torch.cuda.memory._record_memory_history"))
    _expect("enabled" in found.parameters, "an argument `enabled`")
    _expect("filename" in inspect.signature(pkgutil.resolve_name("torch.cuda.memory._dump_snapshot")).parameters,
            "_dump_snapshot to take a file name")  # fmt: skip


# ---- transformers ----

_IMPORTS = "transformers.utils.import_utils"


def import_models() -> None:
    """Import ``transformers.models`` without reading its 1,600 files once more for the names in them.

    Transformers has read them for its own list of names, and remembers 128 of the 550 folders:
    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/utils/import_utils.py
    """
    utilities: Any = importlib.import_module(_IMPORTS)
    read = getattr(utilities, "define_import_structure", None)
    if "transformers.models" in sys.modules or read is None:
        return
    package, names = str(_folder_of("transformers") / "models" / "__init__.py"), names_in_models()
    utilities.define_import_structure = lambda path, prefix=None: (
        names if path == package and prefix is None else read(path, prefix)
    )
    try:
        importlib.import_module("transformers.models")
    finally:
        utilities.define_import_structure = read


def names_in_models() -> dict[Any, dict[str, Any]]:
    """What ``transformers.models`` has, by what it needs and by module, from Transformers' list of all its names."""
    read, prefix = importlib.import_module(_IMPORTS).define_import_structure, "models."
    names = read(_folder_of("transformers") / "models", prefix="models")
    return {
        needed: {name.removeprefix(prefix): found for name, found in modules.items() if name.startswith(prefix)}
        for needed, modules in names.items()
    }


@_contract(
    f"{_IMPORTS}.define_import_structure",
    "src/transformers/utils/import_utils.py",
    "transformers reads its files once",
)
def _check_import_structure() -> None:
    importlib.import_module("transformers")
    read = importlib.import_module(_IMPORTS).define_import_structure
    _expect(names_in_models() == read(str(_folder_of("transformers") / "models" / "__init__.py")), "the same names")


SET_CHECKPOINTING = "_set_gradient_checkpointing"
"""The method by which transformers hands its checkpoint function to a model's layers."""

CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"
"""Where a layer keeps the function that its forward is checkpointed with."""

INPUT_HOOKS = "_require_grads_hooks", "_require_grads_hook"
"""Where transformers keeps the hooks by which embeddings need a gradient; it leaves them when checkpoints go off."""

GRADIENT_NORM_METHODS = ("_clip_grad_norm", "_get_grad_norm")
"""Methods of its trainer that read all gradients before the optimiser's step."""

LOSS_FUNCTION = "_loss_function"
"""Where a model keeps a loss that was set; it has another if nothing is there."""


RG_LRU_SCAN = "_rnn_scan"
"""RecurrentGemma's loop over tokens, a method of its RG-LRU."""


@_contract(
    "transformers.models.recurrent_gemma.RecurrentGemmaRglru._rnn_scan",
    "src/transformers/models/recurrent_gemma/modeling_recurrent_gemma.py",
    "the loop is a function of its own, as in other models",
)
def _check_rg_lru() -> None:
    module = importlib.import_module("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    wanted = {"hidden_states", "recurrent_gate", "reset"}
    _expect(
        wanted <= inspect.signature(getattr(module.RecurrentGemmaRglru, RG_LRU_SCAN)).parameters.keys(), f"{wanted}"
    )


def attention_kind(owner: Any) -> str | None:
    """Name of the attention implementation of a model, a module or a config; None where none is known."""
    config = getattr(owner, "config", owner)
    kind: str | None = getattr(config, "_attn_implementation", None)
    return kind


def compute_attention_plainly(config: Any) -> None:
    """Have this config say "eager", whatever a model's class allows."""
    config.__dict__["_attn_implementation_internal"] = "eager"


def supports_sdpa(model: Any) -> bool:
    """Whether transformers has PyTorch's own attention for a model; also True for a model that is not its own."""
    return bool(getattr(model, "_supports_sdpa", True))


def attention_is_exchangeable(kind: type) -> bool:
    """Whether a class of transformers' models calls whichever attention function its configuration names."""
    return bool(getattr(kind, "_supports_attention_backend", False))


def _tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


_MODELING = "src/transformers/modeling_utils.py"


@_contract("transformers.PreTrainedModel._set_gradient_checkpointing", _MODELING, "models take a checkpoint function")
def _check_set_checkpointing() -> None:
    model = _tiny_llama()
    calls: list[dict[str, Any]] = []
    _with_signature_of(model, SET_CHECKPOINTING, calls)
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    _expect(len(calls) == 1 and calls[0].get("enable") is True, "one call with enable=True")
    _expect(callable(calls[0].get("gradient_checkpointing_func")), "the checkpoint function by name")


def _with_signature_of(model: Any, name: str, calls: list[dict[str, Any]]) -> None:
    """Put a function on the instance that notes its calls and is declared as the class's method is."""
    original = inspect.signature(getattr(type(model), name))

    def noting(**words: Any) -> None:
        calls.append(words)

    noting.__signature__ = original.replace(parameters=list(original.parameters.values())[1:])  # type: ignore[attr-defined]
    model.__dict__[name] = noting


@_contract("transformers.PreTrainedModel._gradient_checkpointing_func", _MODELING, "layers take a checkpoint function")
def _check_checkpoint_function() -> None:
    model = _tiny_llama()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    layer = model.model.layers[0]
    _expect(layer.gradient_checkpointing and callable(layer.__dict__.get(CHECKPOINT_FUNCTION)), "one on a layer")


def checkpoints_in_forward(layer: nn.Module) -> bool:
    """Whether a layer's forward runs its activation checkpoint; in earlier versions its call does."""
    return type(layer).__call__ is nn.Module.__call__


@_contract(
    "transformers.modeling_layers.GradientCheckpointingLayer.forward", "src/transformers/modeling_layers.py",
    "a layer's forward can be had without its checkpoint",
)  # fmt: skip
def _check_checkpointed_forward() -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, x: Any) -> Any:
            return x

    layer, calls = Layer().train(), []

    def checkpointed(function: Any, *args: Any) -> Any:
        calls.append(function)
        return function(*args)

    layer.gradient_checkpointing = True
    setattr(layer, CHECKPOINT_FUNCTION, checkpointed)
    type(layer).forward(layer, 1)
    _expect(len(calls) == checkpoints_in_forward(layer), "the checkpoint in its forward, or else in its call")
    layer.gradient_checkpointing = False
    type(layer).forward(layer, 1)
    _expect(len(calls) == checkpoints_in_forward(layer), "none where gradient_checkpointing is off")


def captures_nothing(hook: Any) -> bool:
    """Whether a hook is transformers' own, which captures outputs for a call that asks for them, and none does now."""
    module = sys.modules.get("transformers.utils.output_capturing")
    if module is None or getattr(hook, "__module__", None) != module.__name__:
        return False
    return not module._active_collector.get()


@_contract(
    "transformers.utils.output_capturing._active_collector", "src/transformers/utils/output_capturing.py",
    "a hook can be asked whether it captures anything",
)  # fmt: skip
def _check_collector() -> None:
    if importlib.util.find_spec("transformers.utils.output_capturing") is None:
        return  # earlier versions capture outputs without hooks
    capturing = importlib.import_module("transformers.utils.output_capturing")
    _expect(capturing._active_collector.get() is None, "None outside a call")
    layer = nn.Linear(1, 1)
    capturing.install_output_capuring_hook(layer, "router_logits", 0)
    hook = next(iter(layer._forward_hooks.values()))
    _expect(captures_nothing(hook), "its hook to be recognised")
    before = capturing._active_collector.set({"router_logits": []})
    _expect(not captures_nothing(hook), "its hook to capture in a call")
    capturing._active_collector.reset(before)


@_contract("transformers.PreTrainedModel._require_grads_hooks", _MODELING, "disabling checkpoints takes the hooks off")
def _check_input_hooks() -> None:
    model = _tiny_llama()
    model.enable_input_require_grads()
    _expect(any(name in model.__dict__ for name in INPUT_HOOKS), f"one of {INPUT_HOOKS}")


@_contract("transformers.PreTrainedModel._loss_function", _MODELING, "`loss_function` can be deleted as well as set")
def _check_loss_function() -> None:
    model, loss = _tiny_llama(), _no_hook
    former = model.loss_function
    model.__dict__[LOSS_FUNCTION] = loss
    _expect(model.loss_function is loss, "the loss that was put there")
    del model.__dict__[LOSS_FUNCTION]
    _expect(model.loss_function is former, "the model's own when it is gone")


@_contract(
    "transformers.PretrainedConfig._attn_implementation",
    "src/transformers/configuration_utils.py",
    "the attention implementation can be asked in public",
)
def _check_attention_kind() -> None:
    model = _tiny_llama()
    _expect(attention_kind(model) == "sdpa", f"sdpa, got {attention_kind(model)}")
    compute_attention_plainly(model.config)
    _expect(attention_kind(model) == attention_kind(model.config) == "eager", "eager after it was set")


@_contract("transformers.PreTrainedModel._supports_sdpa", _MODELING, "a model says in public which attention it has")
def _check_supports_sdpa() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    with torch.device("meta"):
        bloom = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=8))
    for model, expected in ((_tiny_llama(), True), (bloom, False)):
        _expect(supports_sdpa(model) is expected, f"{expected} for {type(model).__name__}")
        _expect((attention_kind(model) == "sdpa") is expected, "the default where a model has it")


@_contract(
    "transformers.PreTrainedModel._supports_attention_backend",
    _MODELING,
    "a model says in public whether its attention can be exchanged",
)
def _check_exchangeable_attention() -> None:
    from transformers import BertForMaskedLM, MPNetForMaskedLM

    for kind, expected in ((BertForMaskedLM, True), (MPNetForMaskedLM, False)):
        _expect(attention_is_exchangeable(kind) is expected, f"{expected} for {kind.__name__}")


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


@_contract(
    "accelerate.hooks._old_forward", "src/accelerate/hooks.py", "hooks keep a module's forward in a public place"
)
def _check_hooked_forward() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    module: Any = nn.Identity()
    module.forward = _no_hook
    add_hook_to_module(module, ModelHook())
    _expect(module.__dict__.get(HOOKED_FORWARD) is _no_hook, "the forward that was there")
    _expect(module.forward is not _no_hook, "a forward around it")
    _expect(type(module.__dict__.get(HOOKING)) is ModelHook, "the hook beside it")


@_contract("accelerate.Accelerator._original_forward", "src/accelerate/accelerator.py", "autocast is put on otherwise")
def _check_prepared_forward() -> None:
    from accelerate import Accelerator

    _expect(PREPARED_FORWARD in _names_in(Accelerator.prepare_model), "prepare_model to set it")


# ---- PEFT ----

PER_SEQUENCE = ("adapter_names", "alora_offsets")
"""Arguments with one entry per sequence that a hook of PEFT's adds to the adapters' calls, as a partial's keywords."""


@_contract(
    "peft.tuners.lora.model._adapter_names_pre_forward_hook", "src/peft/tuners/lora/model.py", "hooks can be asked"
)
def _check_per_sequence() -> None:
    module = importlib.import_module("peft.tuners.lora.model")
    for name, word in zip(
        ("_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook"), PER_SEQUENCE, strict=True
    ):
        _expect(word in inspect.signature(getattr(module, name)).parameters, f"{name} to take {word}")
    _expect("partial" in _names_in(module.LoraModel._enable_peft_forward_hooks), "a partial to be registered")


def refuses_adapter(config: Any, model_type: str, name: str) -> bool:
    """Whether PEFT refuses an adapter of ``config`` on a layer called ``name`` in a model of that type."""
    module = importlib.import_module("peft.tuners.tuners_utils")
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=model_type))
    try:
        module._check_lora_target_modules_mamba(config, model, name)
    except ValueError:
        return True
    return False


@_contract(
    "peft.tuners.tuners_utils._check_lora_target_modules_mamba",
    "src/peft/tuners/tuners_utils.py",
    "PEFT leaves out of 'all-linear' what it refuses",
)
def _check_refused_adapters() -> None:
    config = types.SimpleNamespace(peft_type="LORA")
    _expect(refuses_adapter(config, "mamba2", "out_proj"), "out_proj to be refused in mamba2")
    _expect(not refuses_adapter(config, "mamba2", "in_proj"), "in_proj to be taken in mamba2")
    _expect(not refuses_adapter(config, "llama", "out_proj"), "out_proj to be taken in llama")


# ---- TRL ----

OVERRIDDEN = frozenset({"_get_grad_norm", "_save_checkpoint", "_get_output_dir", "_prepare_dataset"})
"""Private methods of the trainer that :class:`seqtile.train.trainer.Trainer` overrides or calls."""

_FUSED_HEAD = ("original_forward", "temperature", "cast_lm_head_to_fp32", "outputs")


def trl_head_settings(forward: Any) -> dict[str, Any] | None:
    """What TRL's fused head was told when it was put on a model; None if ``forward`` is something else.

    It is known by its argument ``fused_lm_head``, by which TRL's trainers call it.

    Raises:
        KeyError: it is TRL's, but keeps the named setting elsewhere.
    """
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or "fused_lm_head" not in code.co_varnames[: _arguments(code)]:
        return None
    found = inspect.getclosurevars(function).nonlocals
    return {name: found[name] for name in _FUSED_HEAD}


def _arguments(code: types.CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def step_sums(trainer: Any) -> tuple[dict[str, dict[str, list[Any]]], Any]:
    """What TRL's trainer has summed up since the last log, by mode and name, and its tokens: copies."""
    sums = {mode: {name: list(values) for name, values in found.items()} for mode, found in trainer._metrics.items()}
    return sums, trainer._total_train_tokens


def restore_step_sums(trainer: Any, sums: dict[str, dict[str, list[Any]]], tokens: Any) -> None:
    """Put back what :func:`step_sums` gave."""
    for mode, found in trainer._metrics.items():
        found.clear()
        found.update({name: list(values) for name, values in sums.get(mode, {}).items()})
    trainer._total_train_tokens = tokens


ONLINE_DPO_FORWARD = "_forward"
"""The method of TRL's online DPO trainer that turns logits into log-probabilities."""


@_contract(
    "trl.experimental.online_dpo.OnlineDPOTrainer._forward", "trl/experimental/online_dpo/online_dpo_trainer.py",
    "online DPO asks TRL's fused head for log-probabilities",
)  # fmt: skip
def _check_online_dpo_forward() -> None:
    from trl.experimental.online_dpo import OnlineDPOTrainer

    forward = getattr(OnlineDPOTrainer, ONLINE_DPO_FORWARD, None)
    _expect(callable(forward) and "take_along_dim" in _names_in(forward), "a method that gathers of a log_softmax")


@_contract(
    "trl.experimental.gkd.GKDTrainer.generalized_jsd_loss", "trl/experimental/gkd/gkd_trainer.py",
    "GKD takes a divergence of its user's",
)  # fmt: skip
def _check_gkd_loss() -> None:
    from trl.experimental.gkd import GKDTrainer

    names = list(inspect.signature(GKDTrainer.generalized_jsd_loss).parameters)
    expected = ["student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction", "num_items_in_batch"]
    _expect(names == expected, f"the arguments {', '.join(expected)}")
    _expect("generalized_jsd_loss" in _names_in(GKDTrainer.compute_loss), "compute_loss to call it")


@_contract("trl.trainer.utils._fused_forward", "trl/trainer/utils.py", "TRL's fused head says its settings")
def _check_fused_head() -> None:
    from trl.trainer.utils import add_fused_lm_head  # type: ignore[attr-defined, unused-ignore]

    model = _tiny_llama()
    original = model.forward
    _expect(trl_head_settings(original) is None, "the model's own forward to be something else")
    add_fused_lm_head(model, temperature=0.5, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
    found = trl_head_settings(model.forward)
    _expect(found is not None, "a forward that takes fused_lm_head")
    assert found is not None
    _expect(found["original_forward"] == original and found["temperature"] == 0.5, "forward and temperature")
    _expect(found["cast_lm_head_to_fp32"] is True and tuple(found["outputs"]) == ("log_probs", "entropy"), "the rest")


@_contract("trl.SFTTrainer._metrics", "trl/trainer/sft_trainer.py", "a step that is done again can take its sums back")
def _check_step_sums() -> None:
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    names = _names_in(SFTTrainer.__init__)
    _expect({"_metrics", "_total_train_tokens"} <= names, "both to be made by the trainer")
    _expect("_metrics" in _names_in(SFTTrainer.compute_loss), "compute_loss to add to them")


def _check_overridden(name: str, caller: str) -> None:
    from transformers import Trainer
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    _expect(callable(getattr(SFTTrainer, name, None)), f"a method {name}")
    callers = [one for one, method in vars(Trainer).items() if isinstance(method, types.FunctionType)
               and one != name and name in _names_in(method)]  # fmt: skip
    _expect(callers, f"{caller} to call {name}")


@_contract("trl.SFTTrainer._get_grad_norm", "trl/trainer/sft_trainer.py", "the gradient norm comes with an event")
def _check_get_grad_norm() -> None:
    _check_overridden("_get_grad_norm", "the training loop")


@_contract(
    "trl.SFTTrainer._save_checkpoint", "trl/trainer/sft_trainer.py", "an event comes before a checkpoint is written"
)
def _check_save_checkpoint() -> None:
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    _check_overridden("_save_checkpoint", "the training loop")
    words = list(inspect.signature(SFTTrainer._save_checkpoint).parameters)
    _expect(words == ["self", "model", "trial"], f"the arguments model and trial, got {words}")


@_contract("trl.SFTTrainer._get_output_dir", "trl/trainer/sft_trainer.py", "the folder of checkpoints is public")
def _check_get_output_dir() -> None:
    _check_overridden("_get_output_dir", "saving")


@_contract("trl.SFTTrainer._clip_grad_norm", "trl/trainer/sft_trainer.py", "the gradient norm comes with an event")
def _check_gradient_norm_methods() -> None:
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    for name in GRADIENT_NORM_METHODS:
        _expect(callable(getattr(SFTTrainer, name, None)), f"a method {name}")


def prepare_like_sft(rows: Any, tokenizer: Any, arguments: Any) -> Any:
    """``rows`` as TRL's ``SFTTrainer`` tokenises and masks them, whole; neither a trainer nor a model is made."""
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    columns, template = rows.column_names, None
    if arguments.assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
        template = get_training_chat_template(tokenizer)
    completion_only = arguments.completion_only_loss
    if completion_only is None:
        completion_only = "prompt" in columns and "completion" in columns
    trainer: Any = types.SimpleNamespace(
        _tokenizer=tokenizer, chat_template=template, completion_only_loss=completion_only
    )
    whole = copy.copy(arguments)
    whole.max_length, whole.shuffle_dataset, whole.dataset_num_proc = None, False, None
    return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, whole, False, None, "sample")


@_contract("trl.SFTTrainer._prepare_dataset", "trl/trainer/sft_trainer.py", "rows can be looked at between its steps")
def _check_prepare_dataset() -> None:
    from trl import SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    expected = ["self", "dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"]
    words = list(inspect.signature(SFTTrainer._prepare_dataset).parameters)
    _expect(words == expected, f"the arguments {', '.join(expected)}; got {', '.join(words)}")
    _expect("_prepare_dataset" in _names_in(SFTTrainer.__init__), "the trainer to call it when it is made")
    reads = {"_tokenizer", "chat_template", "completion_only_loss"}
    _expect(reads <= _names_in(SFTTrainer._prepare_dataset), f"it to read {', '.join(sorted(reads))} of the trainer")


# ---- DeepSpeed ----

LEAF = "_z3_leaf"
"""The mark by which ZeRO-3 gathers all weights of a module before it runs."""


def is_in_zero12(weight: Tensor) -> bool:
    """Whether ZeRO-1 or 2 has taken a weight over."""
    return hasattr(weight, "_hp_mapping")


ZERO3_MARKS = frozenset({"ds_recompute_parameters", "post_bwd_fn"})
"""Attributes that ZeRO-3 gives a module which it has taken over, whose weights it gathers when it runs."""


@_contract(
    "deepspeed.utils.mixed_precision_linkage._hp_mapping",
    "deepspeed/utils/mixed_precision_linkage.py",
    "a weight says which optimiser has it",
)
def _check_zero12() -> None:
    link = pkgutil.resolve_name("deepspeed.utils.mixed_precision_linkage._init_lp_to_hp_mapping")
    weight = nn.Parameter(torch.zeros(4))
    _expect(not is_in_zero12(weight), "no mark on a new parameter")
    link([weight], 0, 4, None)
    _expect(is_in_zero12(weight), "the mark on a parameter that the optimiser has")


@_contract(
    "deepspeed.runtime.zero.post_bwd_fn",
    "deepspeed/runtime/zero/parameter_offload.py",
    "a module says that it is in ZeRO-3",
)
def _check_zero3() -> None:
    offload = pkgutil.resolve_name("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload")
    names = {
        name
        for method in vars(offload).values()
        if isinstance(method, types.FunctionType)
        for name in _names_in(method)
    }
    _expect(names >= ZERO3_MARKS, "both marks to be set")


@_contract("deepspeed.utils.z3_leaf_module._z3_leaf", "deepspeed/utils/z3_leaf_module.py", "marking needs no DeepSpeed")
def _check_leaf() -> None:
    found = importlib.import_module("deepspeed.utils.z3_leaf_module")
    module = nn.Identity()
    module.__dict__[LEAF] = True
    _expect(found.z3_leaf_module(module), "a marked module to be a leaf")
    _expect(not found.z3_leaf_module(nn.Identity()), "another module to be none")


@_contract(
    "deepspeed.runtime.zero.ds_shape", "deepspeed/runtime/zero/partition_parameters.py", "a shard says what it is of"
)
def _check_ds_shape() -> None:
    text = _source_of("deepspeed.runtime.zero.partition_parameters")
    _expect("param.ds_shape = " in text and "param.ds_id = " in text, "a sharded parameter's ds_shape and ds_id")


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


@_contract(
    "axolotl.monkeypatch.tiled_mlp._tiled_mlp_dist_impl",
    "src/axolotl/monkeypatch/tiled_mlp/patch.py",
    "axolotl asks a plugin",
)
def _check_axolotl() -> None:
    _expect(
        "_tiled_mlp_dist_impl" in _source_of("axolotl.monkeypatch.tiled_mlp.patch"), "the attribute on the MLP's class"
    )


@_contract(
    "swift.arguments._import_external_plugins",
    "swift/arguments/base_args/base_args.py",
    "plugins are given the arguments",
)
def _check_swift_plugins() -> None:
    base = pkgutil.resolve_name("swift.arguments.BaseArguments")
    _expect("self" in inspect.signature(getattr(base, SWIFT_IMPORTS_PLUGINS)).parameters, "a method")


@_contract(
    "swift.trainers._old_checkpoint", "swift/trainers/mixin.py", "ms-swift replaces torch's checkpoint no longer"
)
def _check_swift_checkpoint() -> None:
    files = _folder_of("swift").rglob("*.py")
    _expect(any("_old_checkpoint" in file.read_text(encoding="utf-8") for file in files), "where the former is kept")


@_contract("unsloth_zoo.tiled_mlp.patch_mlp", "unsloth_zoo/tiled_mlp.py", "Unsloth marks what it has tiled")
def _check_unsloth_tiles() -> None:
    text = _source_of("unsloth_zoo.tiled_mlp")
    _expect("mlp_module.forward = MethodType(" in text, "a method bound to the instance")
