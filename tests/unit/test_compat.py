"""What seqtile relies on inside other libraries: each private name has a contract, and the contract can fail."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import pkgutil
import re
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from seqtile import _compat
from seqtile._compat import CONTRACTS, Contract, examine
from seqtile.cli import main
from zoo import causal_lm

apply_module = importlib.import_module("seqtile.models.apply")
ROOT = Path(__file__).parents[2]
BY_NAME = {contract.name: contract for contract in CONTRACTS}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_nothing_has_moved(contract: Contract) -> None:
    finding = examine(contract)
    if finding.status == "not installed":
        pytest.skip(f"{contract.library} is not installed")
    assert finding.status == "ok", f"{contract.name}: {finding.why}; it was in {contract.source}"


def test_what_is_installed_here_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_compat.TESTED, "torch", ("2.11", "9"))  # `make test-newest-torch` is there to run beyond it
    assert _compat.untested.__wrapped__() == ""


@pytest.mark.parametrize(("version", "said"), [
    ("2.16.0", r"torch 2\.16\.0 \(tested: 2\.13 to 2\.13\)"), ("3.0", r"torch 3\.0"), ("2.9.1+cu130", r"torch 2\.9"),
    ("2.13.3+cu130", "^$"), ("2.13.0", "^$"),
])  # fmt: skip
def test_a_version_outside_the_range_is_named(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "installed", lambda library: version if library == "torch" else None)
    assert re.search(said, _compat.untested.__wrapped__())


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(apply_module, "untested", lambda: "not tested with torch 9")
    apply_module._warn_of_versions.cache_clear()
    for _ in range(2):
        model = causal_lm("llama")
        seqtile.apply(model)
    apply_module._warn_of_versions.cache_clear()
    assert [record.message for record in caplog.records if "not tested" in record.message] == [
        "not tested with torch 9"
    ]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_each_contract_says_where_it_was_seen_and_when_it_goes(contract: Contract) -> None:
    assert contract.remove_when and contract.file
    assert contract.source.startswith("https://github.com/") and contract.source.endswith(contract.file)


def test_each_name_has_one_contract() -> None:
    assert len(BY_NAME) == len(CONTRACTS) > 50


def test_no_private_name_is_without_a_contract() -> None:
    """Every name that is bound for others here, by the contracts that use it; every method that is overridden."""
    tree = ast.parse(Path(_compat.__file__).read_text(encoding="utf-8"))
    bound = {
        ast.unparse(target)
        for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign))
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "_find"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }  # fmt: skip
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    used, queue = set[str](), [name for name in functions if name.startswith("_check_")]
    for name in queue:  # what a check reads, and what is read by the functions that it calls
        read = {one.id for one in ast.walk(functions[name]) if isinstance(one, ast.Name)}
        used |= read
        queue += [one for one in functions if one in read and one not in queue]
    for node in ast.walk(tree):  # a value that is made of others
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {ast.unparse(one) for one in targets} & used:
                used |= {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    assert len(bound) > 40 and sorted(bound - used) == []
    assert {f"trl.SFTTrainer.{name}" for name in _compat.OVERRIDDEN} <= BY_NAME.keys()


def test_the_versions_are_the_highest_that_are_tested() -> None:
    """Who raises a pin reads the private names again: their links name the version."""
    files = [ROOT / "constraints" / name for name in ("torch.txt", "highest.txt")]
    if not files[0].is_file():
        pytest.skip("no constraints here: the tests run from an installed package")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(file.read_text() for file in files), re.MULTILINE))
    seen = {name: version for name, version in _compat.SEEN.items() if version and name != "python"}
    assert seen == {name: pins[name] for name in seen}


GONE: Any = _compat._find("torch.nothing_of_that_name")
"""What :mod:`seqtile._compat` binds where a name of torch is gone."""

NUMBERS = itertools.count()

BREAKS: dict[str, Any] = {
    # a name of _compat and what it would be, or the dotted name of what disappears
    "torch.nn.Parameter._is_param": ("call_parameter", lambda tensor: None),
    "torch.autograd.forward_ad._current_level": ("in_forward_mode", lambda: False),
    "torch._C._functorch.maybe_current_level": ("transform_level", lambda: None),
    "atexit._run_exitfuncs": "atexit._run_exitfuncs",
    "torch.nn.Module._modules": ("MODULES", "_gone"),
    "torch.nn.Module._parameters": ("PARAMETERS", "_gone"),
    "torch.nn.Module._buffers": ("BUFFERS", "_gone"),
    "torch.nn.Module._forward_hooks": ("HOOKS", ("_gone", *_compat.HOOKS[1:])),
    "torch.nn.Module._call_impl": ("CALL_CODE", None),
    "torch.nn.Module._replicate_for_data_parallel": "torch.nn.Module._replicate_for_data_parallel",
    "torch.Tensor._version": ("version_of", GONE),
    "torch.Tensor._is_view": ("is_view", GONE),
    "torch.Tensor._base": ("base_of", GONE),
    "torch.UntypedStorage._cdata": ("storage_key", lambda storage: next(NUMBERS)),
    "torch.Tensor._make_wrapper_subclass": ("make_wrapper_subclass", GONE),
    "torch.autograd.graph._engine_run_backward": ("run_backward", GONE),
    "torch._C._storage_Use_Count": ("_USES_IN_A_MODE", (5, 2)),
    "torch.Tensor._post_accumulate_grad_hooks": ("has_gradient_step", lambda weight: hasattr(weight, "_gone")),
    "torch.distributed.fsdp.FlatParameter._is_flat_param": ("is_flat_parameter", lambda one: hasattr(one, "_gone")),
    "torch.distributed.tensor.DTensor._local_tensor": "torch.distributed.tensor.DTensor.to_local",
    "torch._ops.OpOverload._schema": ("OpOverload", int),
    "torch.utils._python_dispatch.TorchDispatchMode": ("TorchDispatchMode", GONE),
    "torch.utils._python_dispatch._disable_current_modes": ("disable_current_modes", GONE),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type": ("is_wrapper_subclass", GONE),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": ("dispatch_modes", GONE),
    "torch._C._disabled_torch_function_impl": ("disabled_torch_function", GONE),
    "torch._C.DisableTorchFunctionSubclass": ("disable_torch_function_subclass", GONE),
    "torch._C._get_dispatch_mode": ("_dispatch_mode", GONE),
    "torch._C._dispatch_has_kernel_for_dispatch_key": ("has_kernel", GONE),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("FakeTensorMode", GONE),
    "torch.utils._pytree.tree_flatten": ("tree_leaves", GONE),
    "torch.ops.aten._grouped_mm": ("GROUPED_MM", GONE),
    "torch.ops.aten._local_scalar_dense": ("READ_NUMBER", GONE),
    "torch._C.PyTorchFileReader": ("TorchArchive", GONE),
    "torch.ops.aten._unsafe_view": ("unsafe_view", Tensor.view),  # a view of autograd's
    "torch.ops.aten._scaled_dot_product_flash_attention": ("ATTENTION_KERNELS", ("_gone",)),
    "torch.nn.attention._cur_sdpa_kernel_backends": ("allowed_sdpa_kernels", lambda **_: []),
    "torch._C._current_graph_task_id": ("backward_pass", lambda: -1),
    "torch._C._autograd._get_current_graph_task_keep_graph": ("_keeps_graph", GONE),
    "torch.utils.checkpoint._enable_checkpoint_early_stop": "torch.utils.checkpoint._enable_checkpoint_early_stop",
    "torch.utils.checkpoint._VersionWrapper.val": "torch.utils.checkpoint._VersionWrapper.get_val",
    "torch.cuda._initialized": "torch.cuda._initialized",
    "torch.cuda.memory._record_memory_history": "torch.cuda.memory._record_memory_history",
    "transformers.PreTrainedModel._set_gradient_checkpointing": ("SET_CHECKPOINTING", "_gone"),
    "transformers.PreTrainedModel._gradient_checkpointing_func": ("CHECKPOINT_FUNCTION", "_gone"),
    "transformers.PreTrainedModel._require_grads_hooks": ("INPUT_HOOKS", ("_gone",)),
    "transformers.PreTrainedModel._loss_function": ("LOSS_FUNCTION", "_gone"),
    "transformers.models.recurrent_gemma.RecurrentGemmaRglru._rnn_scan": ("RG_LRU_SCAN", "_gone"),
    "transformers.PretrainedConfig._attn_implementation": ("compute_attention_plainly", lambda config: None),
    "transformers.PreTrainedModel._supports_sdpa": ("supports_sdpa", lambda model: True),
    "transformers.PreTrainedModel._supports_attention_backend": ("attention_is_exchangeable", lambda kind: True),
    "transformers.modeling_layers.GradientCheckpointingLayer.forward": ("checkpoints_in_forward", lambda layer: None),
    "transformers.utils.import_utils.define_import_structure": ("names_in_models", dict),
    "transformers.utils.output_capturing._active_collector": ("captures_nothing", lambda hook: False),
    "accelerate.hooks._old_forward": ("HOOKED_FORWARD", "_gone"),
    "accelerate.Accelerator._original_forward": ("PREPARED_FORWARD", "_gone"),
    "peft.tuners.lora.model._adapter_names_pre_forward_hook": "peft.tuners.lora.model._adapter_names_pre_forward_hook",
    "peft.tuners.tuners_utils._check_lora_target_modules_mamba": ("refuses_adapter", lambda config, kind, name: False),
    "trl.trainer.utils._fused_forward": ("_FUSED_HEAD", ("original_forward", "gone")),
    "trl.experimental.online_dpo.OnlineDPOTrainer._forward": ("ONLINE_DPO_FORWARD", "_gone"),
    "trl.experimental.gkd.GKDTrainer.generalized_jsd_loss": "trl.experimental.gkd.GKDTrainer.generalized_jsd_loss",
    "trl.SFTTrainer._metrics": "trl.SFTTrainer.compute_loss",
    "trl.SFTTrainer._get_grad_norm": "transformers.Trainer._get_grad_norm",
    "trl.SFTTrainer._save_checkpoint": "transformers.Trainer._maybe_log_save_evaluate",
    "trl.SFTTrainer._prepare_dataset": "trl.SFTTrainer._prepare_dataset",
    "trl.SFTTrainer._clip_grad_norm": "transformers.Trainer._clip_grad_norm",
    "torch._utils._rebuild_tensor_v2": "torch._utils._rebuild_tensor_v2",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager": ("shapes_only", GONE),
    "torch.Tensor._make_subclass": ("fake_on", GONE),
    "torch._C._DisableTorchDispatch": ("without_dispatch", nullcontext),
    "torch.ops.aten._to_copy": ("TO_COPY", GONE),
    "trl.SFTTrainer._get_output_dir": "transformers.Trainer._get_output_dir",
    "deepspeed.utils.mixed_precision_linkage._hp_mapping": ("is_in_zero12", lambda weight: hasattr(weight, "_gone")),
    "deepspeed.runtime.zero.post_bwd_fn": "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload",
    "deepspeed.utils.z3_leaf_module._z3_leaf": ("LEAF", "_gone"),
    "deepspeed.runtime.zero.ds_shape": ("_source_of", lambda module: "param.ds_id = 0"),
    "axolotl.monkeypatch.tiled_mlp._tiled_mlp_dist_impl": ("_source_of", lambda module: ""),
    "swift.arguments._import_external_plugins": ("SWIFT_IMPORTS_PLUGINS", "_gone"),
    "swift.trainers._old_checkpoint": ("_folder_of", lambda package: Path(__file__).parent / "no_such_folder"),
    "unsloth_zoo.tiled_mlp.patch_mlp": ("_source_of", lambda module: ""),
}


def test_each_contract_is_broken_once() -> None:
    assert BREAKS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", BREAKS)
def test_a_name_that_moves_fails_its_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = BY_NAME[name]
    if _compat.installed(contract.library) is None:
        pytest.skip(f"{contract.library} is not installed")
    assert examine(contract).status == "ok"
    if "output_capturing" in name and importlib.util.find_spec("transformers.utils.output_capturing") is None:
        pytest.skip("this transformers captures outputs without hooks")
    if isinstance(BREAKS[name], str):
        owner, _, attribute = BREAKS[name].rpartition(".")
        monkeypatch.delattr(pkgutil.resolve_name(owner), attribute)
    else:
        monkeypatch.setattr(_compat, *BREAKS[name])
    assert examine(contract).status == "moved"
    monkeypatch.undo()
    assert examine(contract).status == "ok"


def test_a_name_that_is_gone_raises_at_its_first_use_and_says_what_to_do() -> None:
    uses = (
        lambda: GONE(1), lambda: GONE.default, lambda: isinstance(1, GONE), lambda: list(GONE),
        lambda: types.new_class("A", (GONE,)),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(_compat.MovedError, match="nothing_of_that_name, which torch .*seqtile doctor --compat"):
            use()


def test_the_doctor_names_what_has_moved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = [contract for contract in CONTRACTS if contract.library in ("python", "torch", "ms-swift")]
    monkeypatch.setattr(_compat, "CONTRACTS", small)
    monkeypatch.setattr(_compat, "installed", lambda library: None if library == "ms-swift" else "1.0")
    assert main(["doctor", "--compat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [contract.name for contract in small]
    assert sum(line.endswith("not installed") for line in lines) == 2
    assert sum(line.endswith(" ok") for line in lines) == len(small) - 2

    monkeypatch.setattr(_compat, "backward_pass", GONE)
    assert main(["doctor", "--compat"]) == 1
    shown = capsys.readouterr().out
    moved = [line for line in shown.splitlines() if line.endswith("  moved")]
    assert [line.split()[0] for line in moved] == ["torch._C._current_graph_task_id"]
    assert BY_NAME["torch._C._current_graph_task_id"].source in shown
    assert shown.splitlines()[-1] == f"1 moved: install torch {_compat.SEEN['torch']}, or a newer seqtile"


def test_a_forward_that_takes_fused_lm_head_is_trls_whatever_its_name() -> None:
    original_forward, temperature, cast_lm_head_to_fp32, outputs = torch.relu, 0.5, False, ("log_probs",)

    def renamed(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return original_forward, temperature, cast_lm_head_to_fp32, outputs

    def moved(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return original_forward, temperature, outputs

    found = _compat.trl_head_settings(renamed.__get__(nn.Identity()))
    assert found == {
        "original_forward": torch.relu, "temperature": 0.5, "cast_lm_head_to_fp32": False, "outputs": ("log_probs",),
    }  # fmt: skip
    assert _compat.trl_head_settings(nn.Identity().forward) is None
    with pytest.raises(KeyError, match="cast_lm_head_to_fp32"):
        _compat.trl_head_settings(moved)


def test_transformers_models_are_imported_without_reading_their_files_again() -> None:
    code = """
import transformers
from transformers.utils import import_utils
from seqtile._compat import import_models

def fail(path):
    raise AssertionError(f"{path} was read again")

own, import_utils.create_import_structure_from_path = import_utils.create_import_structure_from_path, fail
import_models()
import_utils.create_import_structure_from_path = own
before = import_utils.define_import_structure
import_models()
assert import_utils.define_import_structure is before and before.__module__ == import_utils.__name__
import transformers.models
assert "llama" in dir(transformers.models) and transformers.models.LlamaConfig is transformers.LlamaConfig
"""
    subprocess.run([sys.executable, "-c", code], check=True)
