# Made from seqtile/_compat.py by `python -m seqtile.integrations.hub_kernel`; do not edit.
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

from typing import Any
from collections.abc import Callable
from .devices import package_version
import pkgutil
import platform

SEEN = {
    "python": "3.11", "torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2",
    "trl": "1.16.0", "deepspeed": "0.19.8", "axolotl": "", "ms-swift": "",
    "unsloth": "", "unsloth_zoo": "",
}  # fmt: skip
"""The version of each library in which its private names were last read; "" where no version is pinned."""


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

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where an instance of ``nn.Module`` keeps hooks on its calls."""

disable_current_modes: Callable[[], Any] = _find("torch.utils._python_dispatch._disable_current_modes")

_dispatch_mode: Callable[[Any], Any] = _find("torch._C._get_dispatch_mode")

_FAKE = _find("torch._C._TorchDispatchModeKey.FAKE")

dispatch_modes: Callable[[], list[Any]] = _find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
"""The modes around every operator, the outermost first."""


def active_fake_mode() -> Any:
    """The fake tensor mode that operators run under, None without one."""
    return _dispatch_mode(_FAKE)
