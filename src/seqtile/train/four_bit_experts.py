"""Load experts in 4 bits, one weight at a time, beside the linear layers that Transformers packs.

A quantizer of this name is registered with Transformers (its way to add one) and is a plain bitsandbytes one for
everything but the experts. A weight is packed as soon as it has been read, so that only one is ever whole.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit  # type: ignore[import-not-found,unused-ignore]
from bitsandbytes.nn.parametrize import (  # type: ignore[import-not-found,unused-ignore]
    replace_parameter_4bit_prequantized,
)
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from seqtile.recognise.packed_experts import packable_experts

_METHOD = "seqtile_bitsandbytes_4bit"


class WithExperts(BitsAndBytesConfig):
    """bitsandbytes' configuration, under another name while the model is loaded: the name selects the quantizer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call,unused-ignore]
        self.quant_method = _METHOD  # type: ignore[assignment]


class _Quantize(Bnb4bitQuantize):  # type: ignore[misc,unused-ignore]
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        quantizer, result = self.hf_quantizer, dict[str, torch.Tensor]()
        for name, value in input_dict.items():
            if name not in quantizer.experts:
                result |= super().convert({name: value}, *args, **kwargs)
                continue
            weight = value[0] if isinstance(value, list) else value
            config = quantizer.quantization_config
            packed, state = quantize_4bit(
                weight, compress_statistics=config.bnb_4bit_use_double_quant, quant_type=config.bnb_4bit_quant_type
            )
            quantizer.experts[name] = state.as_dict(packed=True)
            result[name] = nn.Parameter(packed, requires_grad=False)
        return result


@register_quantizer(_METHOD)
class _Quantizer(Bnb4BitHfQuantizer):  # type: ignore[misc,unused-ignore]
    experts: dict[str, Any]
    """State of each expert weight by name, None before it is read."""

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, *args, **kwargs)
        names = packable_experts(model)
        self.experts = {name: None for name in names if should_convert_module(name, self.modules_to_not_convert)}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.experts or super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> Any:
        return _Quantize(self)  # type: ignore[no-untyped-call,unused-ignore]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, state in self.experts.items():
            if state is not None:  # missing in the checkpoint
                prefix, _, leaf = name.rpartition(".")
                module = model.get_submodule(prefix)
                replace_parameter_4bit_prequantized(module, leaf, state, getattr(module, leaf).device)
        self.experts.clear()
        # From here on it is bitsandbytes', for PEFT, the trainer and what is saved.
        self.quantization_config.quant_method = model.quantization_method = QuantizationMethod.BITS_AND_BYTES
        return super()._process_model_after_weight_loading(model, **kwargs)
