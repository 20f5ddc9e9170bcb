"""Change what a model's activation checkpoints save, and where; undo it.

Transformers' models, their trainers, TRL and PEFT all switch checkpointing on through one method of the model
instance, ``_set_gradient_checkpointing``. An object in its place changes the checkpoint function on the way to the
layers, so that it does not matter who switches it on, nor when. Where layers differ, each gets a function of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from seqtile._compat import (
    CHECKPOINT_FUNCTION,
    CHECKPOINT_KEYWORDS,
    HOOKS_SEE_WHAT_IS_KEPT,
    INPUT_HOOKS,
    SET_CHECKPOINTING,
    active_fake_mode,
    attention_is_exchangeable,
    attention_kind,
    cached_prompt,
)
from seqtile._effects import Watched, find_checkpointed, split_frozen, which
from seqtile._errors import UserError
from seqtile.checkpointing.host_offload import HostMemory, parking
from seqtile.checkpointing.keep_attention import AttentionSaved, kept_per_token
from seqtile.ops.attention.backends import FLEX, attention_sentences, has_long_mask, without_wrong_kernel
from seqtile.ops.attention.kernel_calls import names_of_kernels
from seqtile.options import by_layer, check_layers, layer_policies, saves_attention
from seqtile.recognise.decoder_layers import decoder_layers

_POLICY_MARK = "_seqtile_checkpointing"


def check_checkpointing(model: nn.Module, policy: str | None, offload: bool | int) -> None:
    """Refuse what cannot be done, before anything is changed.

    Raises:
        UserError: no model that checkpoints, fewer layers than are counted, or attention without a kernel whose output
            could be kept.
    """
    if policy is None and not offload:
        return
    if prompt := cached_prompt(model):  # PEFT refuses it too, but only where checkpointing is on before the prompt
        raise UserError(
            "checkpoint.with-prompt-tuning",
            f"PEFT's {prompt} passes its prompt as a key-value cache, which checkpointed layers drop; drop checkpoint "
            "and offload",
        )
    models = find_checkpointed(model)
    if not models:
        raise UserError(
            "checkpoint.model-unsupported",
            f"{type(model).__name__} has no transformers model with activation checkpointing; drop checkpoint and "
            "offload",
        )
    chosen = [module for _, module in split_frozen(models)[0]]
    for module in chosen if by_layer(policy) else []:
        check_layers(policy, len(decoder_layers(module)), type(module).__name__)
    plain = next((module for module in chosen if attention_kind(module) == "eager"), None)
    if saves_attention(policy) and plain is not None:
        if not attention_is_exchangeable(type(plain)):
            raise UserError(
                "checkpoint.attention-saved-no-kernel",
                "checkpoint='attention-saved' saves the output of an attention kernel, but this model has no "
                "attention layers or computes attention in its own code; use checkpoint='layer'",
            )
        raise UserError(
            "checkpoint.attention-saved-eager",
            "checkpoint='attention-saved' needs an attention kernel, got attn_implementation='eager'; load the "
            "model with attn_implementation='sdpa'",
        )
    for module in chosen:
        for inner in module.modules():
            if (function := inner.__dict__.get(CHECKPOINT_FUNCTION)) is not None:
                _refuse_conflict(_without_policy(function), policy, offload)


def _refuse_conflict(function: Any, policy: str | None, offload: bool | int) -> None:
    """Raise if a layer's checkpoint function cannot run with this policy."""
    if offload and getattr(function, "func", function) is not checkpoint:
        raise UserError(
            "offload.given-twice", "both seqtile's offload and gradient_checkpointing_kwargs' offload are on; drop one"
        )
    if saves_attention(policy) and getattr(function, "keywords", {}).get("use_reentrant"):
        raise UserError(
            "checkpoint.attention-saved-reentrant",
            "checkpoint='attention-saved' needs non-reentrant activation checkpointing, got use_reentrant=True; use "
            "use_reentrant=False",
        )


def install_checkpointing(model: nn.Module, policy: str | None, offload: bool | int) -> str:
    """Apply ``policy`` to the activation checkpoints of ``model``; switches checkpointing on if it is off.

    Returns:
        A description of the change.
    """
    chosen, frozen = split_frozen(find_checkpointed(model))
    for _, module in chosen:
        checkpointing = Checkpointing(module, policy or "layer", offload)
        checkpointing.install()
    return checkpointing.describe() + which(chosen, frozen)


def installed_checkpointing(model: nn.Module) -> list[Checkpointing]:
    """The policies that :func:`install_checkpointing` installed in ``model``."""
    return [module.__dict__[_POLICY_MARK] for module in model.modules() if _POLICY_MARK in module.__dict__]


class Checkpointing(Watched):
    """Stands in for ``_set_gradient_checkpointing`` of one model.

    Args:
        module: the model.
        policy: the option ``checkpoint``; not None.
        offload: layer inputs (and kept attention outputs) wait on the host; a number is the bytes allowed there.
    """

    def __init__(self, module: nn.Module, policy: str, offload: bool | int) -> None:
        super().__init__(module)
        self.policy, self.offload = policy, bool(offload)
        self.host = HostMemory(0 if isinstance(offload, bool) else offload) if offload else None
        self.attention = AttentionSaved(self.host) if saves_attention(policy) else None
        self.names = [layer.name for layer in decoder_layers(module)] if by_layer(policy) else []
        self.policies = layer_policies(policy, len(self.names))
        """Of each decoder layer, where they differ; else empty."""
        self.switched_on = False
        self.calls = 0  # of layers' checkpoints while gradients are recorded
        self.hooks: list[Any] = []
        self.attention_ran: frozenset[str] | None = None  # as in a tiled layer
        self._looks_left: int | None = None  # calls in which attention's operators are still looked for

    def install(self) -> None:
        module = self.module
        on = is_on(module)
        self.watch()
        module.__dict__[_POLICY_MARK] = self
        module.__dict__[SET_CHECKPOINTING] = self
        if on:
            self._change(lambda function: function if _ours(function) else self.around(function))
            self._change_by_layer()
        else:
            self.before = {name: module.__dict__[name] for name in INPUT_HOOKS if name in module.__dict__}
            enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
            enable()
            self.switched_on = not on
            self.hooks = list(module.__dict__.get(INPUT_HOOKS[0]) or ())

    def remove(self) -> None:
        self.unwatch()
        attributes = self.module.__dict__
        for name in (_POLICY_MARK, SET_CHECKPOINTING):
            attributes.pop(name, None)
        if self.switched_on:
            self.module.gradient_checkpointing_disable()
            if attributes.get(INPUT_HOOKS[0]) == self.hooks:  # else other code has registered its hooks since
                for name in INPUT_HOOKS:
                    attributes.pop(name, None)
                attributes.update(self.before)
            for hook in self.hooks:
                if hook not in self.before.get(INPUT_HOOKS[0], ()):
                    hook.remove()
        else:
            self._change(_without_policy)

    def _change(self, change: Callable[[Any], Any]) -> None:
        for module in self.module.modules():
            function = module.__dict__.get(CHECKPOINT_FUNCTION)
            if function is not None:
                module.__dict__[CHECKPOINT_FUNCTION] = change(function)

    def _change_by_layer(self) -> None:
        """Give each decoder layer, and what is inside it, a checkpoint function with the layer's own policy."""
        for name, policy in zip(self.names, self.policies, strict=True):
            for module in self.module.get_submodule(name).modules():
                if _ours(function := module.__dict__.get(CHECKPOINT_FUNCTION)):
                    module.__dict__[CHECKPOINT_FUNCTION] = self.around_layer(_without_policy(function), policy)

    def __call__(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **others: Any
    ) -> Any:
        """Called by transformers to set the checkpoint function of the layers."""
        self.switched_on = False  # other code enabled or disabled checkpointing: it stays so when we are removed
        original = getattr(type(self.module), SET_CHECKPOINTING)
        function = self.around(gradient_checkpointing_func) if enable else gradient_checkpointing_func
        result = original(self.module, enable=enable, gradient_checkpointing_func=function, **others)
        self._change_by_layer()
        return result

    def around(self, function: Any) -> Any:
        """A checkpoint function with this policy, for every layer.

        Raises:
            UserError: two settings that exclude each other.
        """
        _refuse_conflict(function, self.policy, self.offload)
        if self.names:
            keywords = getattr(function, "keywords", {})
            return functools.partial(self.run_by_owner, **keywords, _seqtile_former=function)
        return self.around_layer(function, self.policy)

    def around_layer(self, function: Any, policy: str | None) -> Any:
        """A checkpoint function with ``policy``."""
        keywords = dict(getattr(function, "keywords", {}))
        base = getattr(function, "func", function)
        if self.attention is not None:
            keywords["use_reentrant"] = False
        if policy == "attention-saved":
            if "context_fn" in keywords:
                self.warn("another library's context_fn (TRL's 'selective') decides what checkpoints save")
            else:
                keywords["context_fn"] = self.save_attention
        if "context_fn" in keywords and base is checkpoint:
            keywords = HOOKS_SEE_WHAT_IS_KEPT | keywords
        return functools.partial(self.run, base, **keywords, _seqtile_former=function, _seqtile_policy=policy)

    def run_by_owner(self, function: Callable[..., Any], *args: Any, _seqtile_former: Any, **kwargs: Any) -> Any:
        """The checkpoint of what has no function of its own: a tower's layer, or one that its model checkpoints."""
        policy: str | None = "layer"
        owner = _module_of(function)
        if owner is None:
            self.warn(
                f"checkpoint={self.policy!r} recomputes every layer: {type(self.module).__name__} checkpoints "
                "functions of its own, not its layers"
            )
        for name, own_policy in zip(self.names, self.policies, strict=True):
            if self.module.get_submodule(name) is owner:
                policy = own_policy
        return self.around_layer(_seqtile_former, policy)(function, *args, **kwargs)

    def run(
        self, base: Callable[..., Any], function: Callable[..., Any], *args: Any, _seqtile_former: Any,
        _seqtile_policy: str | None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """One layer's checkpoint."""
        policy = _seqtile_policy
        if torch.compiler.is_compiling():
            self._note_call()
            if policy == "attention-saved" or (policy is not None and self.host is not None):
                return self._uncompiled(base, function, args, kwargs, policy)
        elif torch.is_grad_enabled():
            self.calls += 1
        if policy is None:
            return function(*args, **{name: kwargs[name] for name in kwargs.keys() - CHECKPOINT_KEYWORDS})
        if self.host is not None:
            function, args = _hidden_states_first(function, args)
        bound = getattr(function, "keywords", {})  # transformers binds what it passes to a layer by name
        if has_long_mask((*args, *kwargs.values(), *bound.values())):
            function = functools.partial(without_wrong_kernel, function)
        if not self._looks():
            return self._run(base, function, args, kwargs)
        attention = attention_kind(self.module)
        if attention == FLEX:  # compiled, so its operators cannot be observed
            self.attention_ran = frozenset({FLEX})
            return self._run(base, function, args, kwargs)
        with names_of_kernels() as names:
            result = self._run(base, function, args, kwargs)
        if names or attention == "eager":
            self.attention_ran = frozenset(names)
        return result

    def save_attention(self) -> Any:
        """``context_fn`` of the checkpoints: a method, so that a copied layer shares what this holds."""
        assert self.attention is not None
        return self.attention()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _note_call(self) -> bool:
        """Note a call outside the graph: dynamo would guard on the count, and compile again at every call."""
        self.calls = 1
        return True

    def _looks(self) -> bool:
        """Whether this call records attention's operators: until a layer has some, at most once per layer."""
        if self.attention is not None or self.attention_ran is not None or self._looks_left == 0:
            return False
        if torch.compiler.is_compiling() or active_fake_mode() is not None or not torch.is_grad_enabled():
            return False
        self._looks_left = (self.layers() if self._looks_left is None else self._looks_left) - 1
        return True

    def _run(self, base: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self.host is None or not torch.is_grad_enabled():
            return base(function, *args, **kwargs)
        hidden = next((value for value in args if _is_floating(value)), None)
        if hidden is None:
            return base(function, *args, **kwargs)
        nbytes = hidden.numel() * hidden.element_size()
        if self.attention is not None:
            text = self.module.config.get_text_config()
            tokens, width = hidden.numel() // hidden.shape[-1], hidden.shape[-1]
            checkpointed = [policy for policy in self.policies if policy is not None] or [self.policy]
            saved = sum(map(saves_attention, checkpointed))
            nbytes += tokens * kept_per_token(text, hidden.element_size(), width) * saved // len(checkpointed)
        layers_of_segment = getattr(function, "layers", 1)  # chunked layers share one checkpoint

        def checkpoints() -> int:
            return -(-self.layers() // layers_of_segment)

        self.host.check(nbytes, checkpoints, hidden.device)
        self.host.begin_layer()
        pack, unpack = _hooks_for_input(hidden, self.host)
        with saved_tensors_hooks(pack, unpack), parking.inside(self.host, nbytes, checkpoints):
            return base(function, *args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _uncompiled(
        self, base: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any, policy: str
    ) -> Any:
        """Dynamo supports neither selective checkpoints nor saved-tensor hooks."""
        option = "checkpoint='attention-saved'" if policy == "attention-saved" else "offload"
        self.warn(f"{option} runs the decoder layers uncompiled; with torch.compile use checkpoint='layer' alone")
        return self.run(base, function, *args, _seqtile_former=None, _seqtile_policy=policy, **kwargs)

    def layers(self) -> int:
        """Layers that are checkpointed."""
        return sum(
            bool(getattr(module, "gradient_checkpointing", False))
            for module in self.module.modules()
            if CHECKPOINT_FUNCTION in module.__dict__
            and not hasattr(type(module), SET_CHECKPOINTING)
            and getattr(module.__dict__[CHECKPOINT_FUNCTION], "keywords", {}).get("_seqtile_policy", "") is not None
        )

    def describe(self) -> str:
        """For the report."""
        effects = {
            "attention-saved": "attention's output saved, not recomputed", "layer": "plain activation checkpointing",
            None: "no activation checkpointing",
        }  # fmt: skip
        phrases = [
            f"{effect} ({self.policies.count(policy)} of {len(self.policies)} layers)"
            for policy, effect in effects.items()
            if policy in self.policies
        ]
        if self.attention is not None and not self.policies:
            phrases.append(effects["attention-saved"])
        if self.offload:
            phrases.append("layer inputs on the host" + (", and attention's output" if self.attention else ""))
        return "; ".join(phrases) or effects["layer"]

    def without_effect(self) -> list[str]:
        saved, policy = self.attention, f"checkpoint={self.policy!r}"
        if not self.calls:
            why = "no layer calls an activation checkpoint" if is_on(self.module) else "checkpointing is switched off"
            names = [policy] * (saved is not None or not self.offload) + ["offload"] * self.offload
            return [
                f"{' and '.join(names)} had no effect in the first training step of {type(self.module).__name__}: {why}"
            ]
        sentences = []
        if saved is not None and saved.calls and not saved.saved:
            layers = f"{self.policies.count('attention-saved')} layers" if self.policies else "layers"
            sentences.append(
                f"{policy} had no effect in the first training step: found no attention kernel in the {layers}, so "
                "nothing was saved; load the model with attn_implementation='sdpa' or FlashAttention"
            )
        if self.host is not None and not self.host.ever_parked:
            why = "the layers' checkpoints have no hidden states"
            if self.host.budget:
                why = f"offload='{self.host.budget}B' is smaller than one layer's input"
            sentences.append(f"offload moved nothing in the first training step: {why}")
        return sentences

    def notes(self) -> list[str]:
        saved, notes = self.attention, self.warnings()
        if self.host is not None and self.host.ever_parked:
            notes.append(
                f"on the host: {self.host.ever_parked / self.host.layer / 2**20:.3g} MiB per layer and forward"
            )
        if self.attention_ran is not None:
            return notes + attention_sentences(self.attention_ran)
        if saved is None or not saved.saved:
            return notes
        kept = f"attention's output: {saved.saved_bytes / saved.calls / 2**20:.3g} MiB kept per layer and forward"
        return [*notes, kept, *attention_sentences(saved.operators)]


def _hooks_for_input(hidden: Tensor, host: HostMemory) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks that park the layer's input and leave all other saved tensors on their device."""
    storage = (hidden.data_ptr(), hidden.shape, hidden.dtype)

    def pack(tensor: Tensor) -> Any:
        is_hidden = (tensor.data_ptr(), tensor.shape, tensor.dtype) == storage
        return host.park(tensor) if is_hidden and host.has_room(tensor) else tensor

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.take()

    return pack, unpack


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _hidden_states_first(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The call with its hidden states by position: a checkpoint does not save keyword arguments."""
    bound = getattr(function, "keywords", None)
    if not bound or any(map(_is_floating, args)):
        return function, args
    floating = [name for name, value in bound.items() if _is_floating(value)]
    if not floating:
        return function, args
    name = max(floating, key=lambda name: bound[name].requires_grad)  # the first of those, else the first
    by_name = functools.partial(function.func, *function.args, **{k: v for k, v in bound.items() if k != name})
    return functools.partial(_by_name, by_name, name), (bound[name], *args)


def _by_name(function: Callable[..., Any], name: str, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs, **{name: hidden})


def _module_of(function: Any) -> nn.Module | None:
    """The module whose forward or call a checkpoint runs; None for a function of other code."""
    while isinstance(function, functools.partial):  # transformers binds a layer's arguments, from 5.24 on the layer too
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def _ours(function: Any) -> bool:
    return "_seqtile_former" in getattr(function, "keywords", {})


def _without_policy(function: Any) -> Any:
    return function.keywords["_seqtile_former"] if _ours(function) else function


def is_on(module: Any) -> bool:
    """Whether checkpointing is on; Transformers 5.0 has the old name alone, 5.23 a new one too, and the old one warns:

    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
    """
    new = getattr(module, "is_activation_checkpointing", None)
    return bool(getattr(module, "is_gradient_checkpointing", False) if new is None else new)
