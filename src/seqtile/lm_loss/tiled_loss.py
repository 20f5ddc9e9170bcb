"""The loss of a causal language model over tiles of tokens: ``model(input_ids, labels=labels)`` without logits.

The model's own forward runs. For its length the head is replaced by one that returns :class:`DeferredLogits`, and the
loss function by one that computes the loss from them: so scales, soft-caps, auxiliary losses and whatever a model's
forward does besides stay its own. The head's real module is then called once, hooks and all, around the whole tile
loop: engines gather its weight there, once per step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import HOOKED_FORWARD, LOSS_FUNCTION, OUTPUT_HOOKS, children_of, hook_on_every_module
from seqtile._effects import Named, Watched, outermost, split_frozen, which
from seqtile._errors import UserError
from seqtile._stand_in import ForwardStandIn
from seqtile._technique import Technique, TechniqueResult
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import mark_leaf, unmark_leaf
from seqtile.lm_loss.deferred_logits import DeferredHead, DeferredLogits, head_width
from seqtile.lm_loss.trl_head import TrlHead
from seqtile.ops.lm_loss.cross_entropy import linear_cross_entropy
from seqtile.ops.lm_loss.logits_tile import LogitScaling, Objective
from seqtile.ops.lm_loss.loss_kernels import LossChoice, missing_kernel, record_choices
from seqtile.ops.lm_loss.module_head import module_cross_entropy, module_logprobs
from seqtile.ops.lm_loss.token_logprobs import TokenScores, token_logprobs
from seqtile.recognise.snapshot import SameSettings
from seqtile.tiling import BlockShape, TileRule, head_sizes

_LOSS_MARK = "_seqtile_loss"


class LossTechnique(Technique):
    """``loss="tiled"``."""

    name = "loss"

    def check(self) -> None:
        """Refuse a model whose loss cannot be tiled.

        Raises:
            UserError: no causal language model, an unknown version of TRL's head, or a kernel that would be ignored or
                is not installed.
        """
        impl = self.options.loss_impl
        if missing := missing_kernel(impl):
            raise UserError("loss-impl.missing", f"loss_impl={impl!r}: {missing}; use loss_impl='torch' or 'auto'")
        for _, module in find_causal_lms(self.model)[0]:
            TrlHead.of(module.__dict__.get("forward"))
            check_kernel(module.get_output_embeddings(), impl)  # type: ignore[operator]

    def install(self, inside: Collection[str]) -> TechniqueResult:
        """Put the tiled loss on the causal language models in the model, in place of an earlier one."""
        self.remove(self.model)
        chosen, frozen = find_causal_lms(self.model)
        for _, module in chosen:
            TiledLoss(module, self.options.loss_rule, self.options.loss_impl).install()
        class_names = ", ".join(type(module).__name__ for _, module in chosen)
        return TechniqueResult(f"loss of {class_names} tiled{which(chosen, frozen)}")

    @classmethod
    def installed(cls, model: nn.Module) -> list[TiledLoss]:
        """The tiled losses of a model, also under another library's forward."""
        return installed_losses(model)

    @classmethod
    def notes(cls, model: nn.Module) -> list[str]:
        return [note for loss in cls.installed(model) for note in loss.notes()]


def check_kernel(head: nn.Module, impl: str) -> None:
    """Refuse another package's kernel by name for a head that is more than its weight.

    Raises:
        UserError: ``impl`` would be ignored: the head runs as a module, in plain PyTorch.
    """
    if impl not in ("torch", "auto") and type(head).forward is not nn.Linear.forward:
        head_class = f"{type(head).__module__}.{type(head).__name__}"
        raise UserError(
            "loss-impl.head-not-plain",
            f"loss_impl={impl!r} needs a plain linear head, got {head_class} (an adapter, a quantized or another "
            "layer); use loss_impl='torch' or 'auto'",
        )


def find_causal_lms(model: nn.Module) -> tuple[Named, Named]:
    """The modules whose forward computes the loss, below whatever wraps them, and such whose weights are frozen.

    Raises:
        UserError: none, or one whose loss is not the plain causal one.
    """

    def computes_loss(module: Any) -> bool:
        if not callable(getattr(module, "get_output_embeddings", None)) or not hasattr(type(module), "loss_function"):
            return False
        return module.get_output_embeddings() is not None and _calls_loss_function(type(module))

    models = outermost(model, computes_loss)
    if not models:
        raise UserError(
            "loss.model-unsupported",
            "loss='tiled' needs a causal language model of transformers whose forward calls its loss function, got "
            f"{type(model).__name__}; drop loss, or call seqtile.linear_cross_entropy in your forward",
        )
    chosen, frozen = split_frozen(models)
    for _, module in chosen:
        if not _is_causal_loss(module.loss_function):
            raise UserError(
                "loss.other-loss-function",
                f"loss='tiled' replaces transformers' causal loss, but {type(module).__name__} uses "
                f"{getattr(module.loss_function, '__name__', module.loss_function)!r}; drop loss",
            )
    return chosen, frozen


def _calls_loss_function(model_class: type) -> bool:
    for base in model_class.__mro__:
        forward = base.__dict__.get("forward")
        if forward is not None:
            try:
                source = inspect.getsource(inspect.unwrap(forward))
            except (OSError, TypeError):
                return False
            if "loss_function(" in source or "super().forward" not in source:
                return "loss_function(" in source
    return False


def _is_causal_loss(function: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return function is ForCausalLMLoss


def installed_losses(model: nn.Module) -> list[TiledLoss]:
    """The tiled losses of a model, also under another library's forward."""
    return [module.__dict__[_LOSS_MARK] for module in model.modules() if _LOSS_MARK in module.__dict__]


class TiledLoss(ForwardStandIn, Watched):
    """Stands in for ``forward`` on the instance of a causal language model."""

    changed = (*ForwardStandIn.changed, _LOSS_MARK)

    def __init__(self, module: nn.Module, rule: TileRule, impl: str = "torch") -> None:
        super().__init__(module)
        self.rule, self.impl, self.active, self.deferring = rule, impl, True, False
        self.trl = TrlHead.of(module.__dict__.get("forward"))
        self.scores_for_trl = False  # which asks for more than another package's kernel computes
        self.kernel: LossChoice | None = None  # what computed the last loss
        self.calls = 0  # handled by the tiled loss while gradients are recorded
        self.why_untiled = ""  # reason of the last such call that it did not handle

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own: trainers read from it which columns to keep, ``generate`` what it may pass."""
        return inspect.signature(self.original)

    def _trl_above(self) -> TrlHead | None:
        """TRL's head where it was put over this forward."""
        forward = self.module.__dict__.get("forward")
        while forward is not None and forward is not self:
            if head := TrlHead.of(forward):
                return head
            forward = getattr(forward, "__wrapped__", None)  # accelerate puts autocast around it
        return None

    def _take_over(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Route calls of TRL's head to this forward, as TRL does with calls that do not request its head."""
        if not (self.active and kwargs.get("fused_lm_head")):
            return None
        head = self._trl_above()
        if head is None or head.forward is not self:
            return None
        return args, {**kwargs, "fused_lm_head": False, "trl_head": replace(head, forward=self.original)}

    def install(self, marked: bool = True) -> None:
        """Put it on the model; unmarked, ``undo`` does not find it."""
        super().install()
        if marked:
            self.module.__dict__[_LOSS_MARK] = self
        self.listen()
        head = self.module.get_output_embeddings()
        if any(True for _ in head.children()):  # an adapter's parts run inside the tile loop
            mark_leaf(head)

    def listen(self) -> None:
        """Hang its hooks on the model."""
        self.active = True
        self.watch()
        self._before_call = self.module.register_forward_pre_hook(self._take_over, with_kwargs=True)

    def remove(self) -> None:
        """Put every attribute back; under another library's forward, do nothing from now on."""
        self.unwatch()
        self._before_call.remove()
        unmark_leaf(self.module.get_output_embeddings())
        attributes = self.module.__dict__
        covered = attributes.get("forward") is not self
        self.active = not covered
        for name in self.changed:
            if not (covered and name == "forward"):
                attributes.pop(name, None)
        attributes.update({name: value for name, value in self.before.items() if not (covered and name == "forward")})

    def without_effect(self) -> list[str]:
        if self.scores_for_trl and self.impl not in ("torch", "auto"):
            return [
                f"loss_impl={self.impl!r} had no effect in the first training step: TRL asks for one score per token, "
                "which it does not support"
            ]
        if self.calls or self.told - {*self.idle}:  # an earlier warning explains it
            return []
        instead = "its forward was not called" if self._trl_above() is None else "TRL's own head ran"
        return [f"loss='tiled' had no effect in the first training step: {self.why_untiled or instead}"]

    def notes(self) -> list[str]:
        notes = self.warnings()
        if self.impl != "torch" and (self.trl or self._trl_above()) is not None:
            notes.append(
                f"TRL asks for one score per token, which loss_impl={self.impl!r} does not support; using PyTorch "
                "instead"
            )
        elif self.impl != "torch" and self.kernel:
            notes.append(f"loss_impl={self.impl!r}: {self.kernel}")
        return notes

    def note(self) -> str:
        return f"loss=tiled, tile={self.rule}"

    def __call__(
        self, *args: Any, return_logits: bool | None = None, trl_head: TrlHead | None = None, **kwargs: Any
    ) -> Any:
        """The model's forward; with labels, in training, without logits.

        Args:
            *args: the model's own.
            return_logits: True: logits and the untiled loss, also in training; False: the tiled loss alone, also in
                evaluation; None: logits in evaluation.
            trl_head: what TRL's head is asked for, where it stands over this forward.
            **kwargs: the model's own. ``logits_to_keep`` also requests logits.
        """
        model = self.module
        if args and args[0] is model:  # accelerate's unwrap_model(keep_fp32_wrapper=False) binds this as a method
            args = args[1:]
        if trl_head is None and self.active and self.trl is not None and kwargs.pop("fused_lm_head", False):
            trl_head = self.trl
        if trl_head is not None:
            self.scores_for_trl = True
            self.calls += torch.is_grad_enabled()  # TRL computes metrics by a second forward under no_grad
            return trl_head.call(self, args, kwargs)
        labels = kwargs.get("labels")
        if labels is None and args:
            names = list(self.__signature__.parameters)
            labels = dict(zip(names, args, strict=False)).get("labels")
        wants_logits = not model.training if return_logits is None else return_logits
        keep = kwargs.get("logits_to_keep", 0)
        deferred = self.deferring and labels is None
        if not self.active:
            return self.original(*args, **kwargs)
        if labels is None and not deferred:
            why = "the model was called without labels (as label_smoothing_factor and compute_loss_func do)"
        elif not deferred and (wants_logits or isinstance(keep, Tensor) or keep):
            why = "logits were requested"
        elif why := self._why_not():
            self.warn(f"loss='tiled' runs untiled: {why}")
        if why:
            if torch.is_grad_enabled():
                self.why_untiled = why
            return self.original(*args, **kwargs)
        self.calls += torch.is_grad_enabled()
        return self.run(self.original, args, kwargs, self._loss, keep_logits=deferred)

    def _why_not(self) -> str:
        """Why this call has to be left to the model, or ""."""
        if torch.compiler.is_compiling():
            return "torch.compile traces the whole model; compile the decoder layers instead"
        if not _is_causal_loss(self.module.loss_function):
            return "the model's loss function was replaced after seqtile.apply"
        if hook := hook_on_every_module() or _listener(self.module.get_output_embeddings()):
            return f"a hook on the head ({hook}) needs logits"
        return ""

    def run(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, compute: Callable[..., Tensor],
        keep_logits: bool = False,
    ) -> Any:  # fmt: skip
        """``forward`` with ``compute(head, later_logits, targets, num_items, ignore_index)`` as its loss.

        Without logits, or with those that are not there yet.
        """
        with self._replaced(compute):
            output = forward(*args, **kwargs)
        if keep_logits:
            return output
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, DeferredLogits))
        if is_dataclass(output):
            later = [f.name for f in fields(output) if isinstance(getattr(output, f.name), DeferredLogits)]
            return replace(output, **dict.fromkeys(later))  # type: ignore[type-var]
        return output

    @contextmanager
    def _replaced(self, compute: Callable[..., Tensor]) -> Iterator[None]:
        """Head and loss function, for the length of the model's own forward."""
        model = self.module
        head = model.get_output_embeddings()
        parent, attribute = _place_of(model, head)
        model_loss = model.loss_function

        def make(hidden: Tensor, why: str) -> Tensor:
            self.warn(f"{type(model).__name__} needs its logits ({why}), so the loss runs untiled")
            return head(hidden)  # type: ignore[no-any-return]

        def loss(
            logits: Any, labels: Any, vocab_size: Any = None, num_items_in_batch: Any = None, ignore_index: int = -100,
            shift_labels: Any = None, **others: Any,
        ) -> Tensor:  # fmt: skip
            if isinstance(logits, DeferredLogits) and logits.written is not None:
                logits = logits.written
            if not isinstance(logits, DeferredLogits):
                return model_loss(  # type: ignore[no-any-return]
                    logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index,
                    shift_labels=shift_labels, **others,
                )  # fmt: skip
            targets = shift_labels
            if targets is None:  # position t predicts token t + 1; the last one predicts nothing
                targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            if targets.numel() == logits.hidden.shape[:-1].numel():  # transformers' own loss flattens both
                targets = targets.reshape(logits.hidden.shape[:-1])
            return compute(head, logits, targets.to(logits.device), num_items_in_batch, ignore_index)

        had = model.__dict__.get(LOSS_FUNCTION, _NOTHING)
        children_of(parent)[attribute] = DeferredHead(head, make, HeadOf(self, head))
        model.__dict__[LOSS_FUNCTION] = loss
        try:
            yield
        finally:
            children_of(parent)[attribute] = head
            if had is _NOTHING:
                model.__dict__.pop(LOSS_FUNCTION, None)
            else:
                model.__dict__[LOSS_FUNCTION] = had

    def _loss(self, head: nn.Module, later: DeferredLogits, targets: Tensor, count: Any, ignore_index: int) -> Tensor:
        rule, scaling = self.rule, later.scaling

        def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            with record_choices() as kernels:
                loss = linear_cross_entropy(
                    hidden, weight, targets, bias=bias, scaling=scaling, ignore_index=ignore_index, num_items=count,
                    tile=rule, impl=self.impl,
                )  # fmt: skip
            self.kernel = kernels[-1]
            return loss

        def module(hidden: Tensor, call: Any, weights: Any, sizes: Any) -> Tensor:
            check_kernel(head, self.impl)  # again: the adapter may have come after seqtile.apply
            aim = Objective(scaling, ignore_index)
            return module_cross_entropy(call, hidden, targets, weights(), sizes, head_width(head), aim, count)

        return self.inside(head, later.hidden, plain, module)  # type: ignore[no-any-return]

    def score(
        self, head: nn.Module, hidden: Tensor, targets: Tensor, scaling: LogitScaling, ignore_index: int, **wanted: Any
    ) -> TokenScores:
        """Per-token scores through the same head."""
        names: list[str] = []
        settings = SameSettings((head,))

        # What leaves the head's module is a tuple of tensors: engines hang on them what gathers the weight again before
        # its backward, and look into nothing else. Copies, since FSDP2 warns of a module that returns views.
        def tensors(scores: TokenScores) -> tuple[Tensor, ...]:
            outputs = {name: value for name, value in vars(scores).items() if value is not None}
            names[:] = outputs
            return tuple(value.clone() for value in outputs.values())

        def plain(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            return tensors(
                token_logprobs(
                    rows, weight, targets, bias=bias, scaling=scaling, ignore_index=ignore_index, tile=self.rule,
                    **wanted,
                )
            )  # fmt: skip

        def module(rows: Tensor, call: Any, weights: Any, sizes: Any) -> tuple[Tensor, ...]:
            aim = Objective(scaling, ignore_index)
            return tensors(
                module_logprobs(call, rows, targets, weights, sizes, head_width(head), aim, settings.changed)
            )

        outputs = self.inside(head, hidden, plain, module)
        return TokenScores(**dict(zip(names, outputs, strict=True)))

    def inside(self, head: nn.Module, hidden: Tensor, plain: Callable[..., Any], module: Callable[..., Any]) -> Any:
        """Call the head with another forward, so that hooks and engines around it act once for all tiles."""
        name = HOOKED_FORWARD if HOOKED_FORWARD in head.__dict__ else "forward"  # accelerate's hooks stay around it
        had = head.__dict__.get(name, _NOTHING)
        head_forward = type(head).forward.__get__(head) if had is _NOTHING else had

        def instead(rows: Tensor, *_: Any, **__: Any) -> Any:
            weight: Any = getattr(head, "weight", None)
            sharded, linear = type(weight).__name__ == "DTensor", type(head).forward is nn.Linear.forward
            if had is _NOTHING and linear and not sharded and not hasattr(head, "parametrizations"):
                if weight.is_floating_point():  # else it is packed
                    return plain(rows, weight, head.bias)
            if sharded:
                raise UserError(
                    "loss.head-not-gathered",
                    "the head's weight is a DTensor that is not gathered, and seqtile cannot tell whether its "
                    "ranks have the same tokens; call seqtile.token_logprobs in your forward, or drop loss",
                )

            inner = ((path, submodule) for path, submodule in head.named_modules() if path)
            refuse_gathering_inside(inner, block="the head", layer="")

            def weights() -> Mapping[str, Tensor]:
                return {f"0.{name}": weight for name, weight in named_weights(head) if weight.requires_grad}

            def call(tile: Tensor, aliases: Mapping[str, Tensor]) -> Tensor:
                return call_with_weights(ParameterSwap([head]), aliases, (head_forward, tile))  # type: ignore[no-any-return]

            return module(rows, call, weights, partial(self._sizes, rows, head))

        head.__dict__[name] = instead
        try:
            return head(hidden)
        finally:
            if had is _NOTHING:
                head.__dict__.pop(name)
            else:
                head.__dict__[name] = had

    def _sizes(self, hidden: Tensor, head: nn.Module, tokens: int) -> tuple[int, ...]:
        shape = BlockShape(
            hidden=hidden.shape[-1], intermediate=max(1, head_width(head)), itemsize=hidden.element_size(),
            weight_numel=0, weight_itemsize=4, device_type=hidden.device.type, live_widths=2,
        )  # fmt: skip
        return head_sizes(tokens, self.rule, shape)


class HeadOf:
    """The head of a model with a tiled loss, behind its deferred logits."""

    def __init__(self, installed: TiledLoss, head: nn.Module) -> None:
        self.installed, self.head = installed, head

    def scores(self, logits: DeferredLogits, targets: Tensor, temperature: float, **wanted: Any) -> TokenScores:
        scaling = logits.scaling
        scaled = LogitScaling(scaling.scale, scaling.softcap, scaling.temperature * temperature)
        ignore_index = wanted.pop("ignore_index", -100)
        return self.installed.score(self.head, logits.hidden, targets, scaled, ignore_index, **wanted)


@contextmanager
def deferred_logits(*models: nn.Module) -> Iterator[None]:
    """Inside, a model with a tiled loss returns deferred logits when it is called without labels.

    Scaling, slices of tokens and ``log_softmax`` of deferred logits are recorded; ``gather`` of the result scores those
    tokens in tiles, as :func:`seqtile.token_logprobs` does. Any other operation materialises them,
    which is logged once.

    Args:
        *models: each with ``seqtile.apply(model, loss="tiled")``, wrapped or not.

    Raises:
        UserError: a model without a tiled loss.
    """
    installed = []
    for model in models:
        losses = installed_losses(model)
        if not losses:
            raise UserError(
                "loss.not-applied",
                f"{type(model).__name__} has no tiled loss; call seqtile.apply(model, loss='tiled') first",
            )
        installed += losses
    were_deferring = [loss.deferring for loss in installed]
    try:
        for loss in installed:
            loss.deferring = True
        yield
    finally:
        for loss, was_deferring in zip(installed, were_deferring, strict=True):
            loss.deferring = was_deferring


_NOTHING: Any = object()

_ENGINE_HOOKS = ("torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.", "accelerate.", "seqtile.")
"""Whose hooks on the head bring its weight and send it away, whatever the head returns."""


def _listener(head: nn.Module) -> str:
    """Somebody's hook that reads or changes what the head returns, by name, or ""."""
    for name in OUTPUT_HOOKS:
        for hook in getattr(head, name).values():
            function = getattr(hook, "func", hook)  # of a partial
            if not str(getattr(function, "__module__", "")).startswith(_ENGINE_HOOKS):
                return str(getattr(function, "__qualname__", type(function).__name__))
    return ""


def _place_of(model: nn.Module, head: nn.Module) -> tuple[nn.Module, str]:
    for parent in model.modules():
        for name, child in children_of(parent).items():
            if child is head:
                return parent, name
    raise UserError("loss.no-head", f"loss='tiled' found no LM head in {type(model).__name__}; drop loss")
