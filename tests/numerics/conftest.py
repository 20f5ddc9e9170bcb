"""Every backward of these tests runs as on an accelerator: in a thread of its own, outside of the forward's autocast.

PyTorch hands a backward's thread the caller's dispatch modes, so that counters see it. Autocast and thread-locals of
Python stay behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def in_a_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in a thread of its own where the main thread calls it."""

    @wraps(function)
    def call(*args: Any, **words: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **words)
        modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        answer: list[Any] = []

        def work() -> None:
            try:
                with ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    stack.enter_context(torch.inference_mode(inference))
                    stack.enter_context(torch.set_grad_enabled(gradients))
                    answer.append((function(*args, **words), None))
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                answer.append((None, error))

        thread = threading.Thread(target=work, name="backward")
        thread.start()
        thread.join()
        result, error = answer.pop()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame

    return call


@pytest.fixture(autouse=True)
def _backward_in_a_worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("backward_here"):
        yield
        return
    monkeypatch.setattr(torch.autograd, "backward", in_a_worker(torch.autograd.backward))
    monkeypatch.setattr(torch.autograd, "grad", in_a_worker(torch.autograd.grad))
    yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows in each tile of a tiny head, with a remainder."""
    from numerics._heads import VOCABULARY
    from seqtile.ops.lm_loss import row_kernels

    monkeypatch.setitem(row_kernels.BLOCK_ELEMENTS, "cpu", 4 * VOCABULARY)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone, in which engines wrap a model as in a run."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
