"""The RL stacks' own sources against the functions that take their places: signatures, and every call that is made.

``SEQTILE_RL_SOURCES`` names a folder of clones: ``verl``, ``slime``, ``SkyRL``, ``OpenRLHF`` and ``prime-rl``, at the
commits that ``tests/rl_stand_ins.py`` names or at newer ones. Nothing of them is imported.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seqtile.integrations.rl import openrlhf, prime_rl, skyrl, slime, verl

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(
        "SEQTILE_RL_SOURCES" not in os.environ,
        reason="SEQTILE_RL_SOURCES is not set: a folder with clones of the RL stacks (docs/rl.md, In other RL stacks)",
    ),
]


class Place(NamedTuple):
    ours: Callable[..., Any]
    defined: str
    name: str
    called: str
    """The file that calls it."""
    by: str
    """What it is called there."""
    bound: bool = False
    """The first parameter, ``self`` or ``ctx``, is not passed by the caller."""


_VERL_MODEL, _SKYRL = "verl/verl/models/transformers/dense_common.py", "SkyRL/skyrl/backends/skyrl_train"
_OPENRLHF, _PRIME = "OpenRLHF/openrlhf/models", "prime-rl/src/prime_rl/trainer/models/layers/lm_head.py"
PLACES = {
    "verl, triton": Place(
        verl.linear_cross_entropy, "verl/verl/utils/kernel/linear_cross_entropy.py", "LinearCrossEntropy.forward",
        _VERL_MODEL, "linear_cross_entropy", bound=True,
    ),
    "verl, torch": Place(
        verl.FusedLinearForPPO.forward, "verl/verl/utils/experimental/torch_functional.py", "FusedLinearForPPO.forward",
        _VERL_MODEL, "fused_linear_for_ppo.forward", bound=True,
    ),
    "verl, torch, made": Place(
        verl.FusedLinearForPPO.__init__, "verl/verl/utils/experimental/torch_functional.py",
        "FusedLinearForPPO.__init__", _VERL_MODEL, "FusedLinearForPPO", bound=True,
    ),
    "slime": Place(
        slime.calculate_log_probs_and_entropy, "slime/slime/utils/ppo_utils.py", "calculate_log_probs_and_entropy",
        "slime/slime/backends/megatron_utils/loss.py", "calculate_log_probs_and_entropy",
    ),
    "SkyRL, log-probabilities": Place(
        skyrl.logprobs_from_logits, f"{_SKYRL}/utils/torch_utils.py", "logprobs_from_logits",
        f"{_SKYRL}/workers/model_wrapper.py", "logprobs_from_logits",
    ),
    "SkyRL, entropy": Place(
        skyrl.chunked_entropy_from_logits, f"{_SKYRL}/utils/torch_utils.py", "chunked_entropy_from_logits",
        f"{_SKYRL}/workers/model_wrapper.py", "self.chunked_entropy_from_logits_fn",
    ),
    "OpenRLHF, log-probabilities": Place(
        openrlhf.log_probs_from_logits, f"{_OPENRLHF}/utils.py", "log_probs_from_logits", f"{_OPENRLHF}/actor.py",
        "log_probs_from_logits",
    ),
    "OpenRLHF, entropy": Place(
        openrlhf.compute_entropy, f"{_OPENRLHF}/utils.py", "compute_entropy", f"{_OPENRLHF}/actor.py",
        "compute_entropy",
    ),
    "prime-rl": Place(
        prime_rl.FusedOutputLinear.forward, _PRIME, "FusedOutputLinear.forward", _PRIME, "self.lm_head", bound=True
    ),
    "prime-rl, made": Place(
        prime_rl.FusedOutputLinear.__init__, _PRIME, "FusedOutputLinear.__init__", _PRIME, "FusedOutputLinear",
        bound=True,
    ),
}  # fmt: skip


def tree_of(file: str) -> ast.Module:
    return ast.parse(Path(os.environ["SEQTILE_RL_SOURCES"], file).read_text(encoding="utf-8"))


def defined(place: Place) -> list[tuple[str, Any]]:
    """Names and defaults of the parameters, as the source has them."""
    node: Any = tree_of(place.defined)
    for part in place.name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    names = [argument.arg for argument in node.args.args]
    assert not (node.args.vararg or node.args.kwonlyargs or node.args.kwarg or node.args.posonlyargs)
    values = [ast.literal_eval(value) for value in node.args.defaults]
    required: list[Any] = [inspect.Parameter.empty] * (len(names) - len(values))
    return list(zip(names, required + values, strict=True))[place.bound :]


def calls(place: Place) -> list[ast.Call]:
    return [node for node in ast.walk(tree_of(place.called))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == place.by]  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_signature(name: str) -> None:
    place = PLACES[name]
    ours = [(p.name, p.default) for p in inspect.signature(place.ours).parameters.values() if p.name != "self"]
    assert defined(place) == ours


@pytest.mark.parametrize("name", PLACES)
def test_calls(name: str) -> None:
    place = PLACES[name]
    found = calls(place)
    assert found, f"{place.called} calls no {place.by}"
    self = [None] if "self" in inspect.signature(place.ours).parameters else []
    for call in found:
        keywords = {str(keyword.arg): None for keyword in call.keywords}
        inspect.signature(place.ours).bind(*self, *call.args, **keywords)
