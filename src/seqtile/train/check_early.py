"""Checks that run before torch, transformers and datasets are imported."""

from __future__ import annotations

import os
import socket
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from seqtile._errors import UserError
from seqtile.train.data import check_path
from seqtile.train.recipe import DEMO, Recipe
from seqtile.train.trainer_fields import check_trainer_section

TRACKERS = {
    "azure_ml": ("azureml",), "clearml": ("clearml",), "codecarbon": ("codecarbon",), "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",), "dvclive": ("dvclive",), "flyte": ("flytekit",), "kubeflow": (), "mlflow": ("mlflow",),
    "neptune": ("neptune",), "swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",), "wandb": ("wandb",),
}  # fmt: skip
"""The trackers that Transformers reports to, and the packages of which one has to be there."""

CONNECT_SECONDS = 2.0
"""How long a connection to the Hub may take; without a network it mostly fails at once."""


def check_early(recipe: Recipe) -> None:
    """Refuse names that lead nowhere, packages that are missing, and what ``trainer:`` cannot do.

    Raises:
        UserError: the model, the dataset or a package is not there, or a key of ``trainer:`` cannot work.
    """
    from huggingface_hub import constants, get_token

    check_trainer_section(recipe)
    check_trackers(recipe.trainer.get("report_to", "none"))
    for dataset in (recipe.dataset, recipe.eval_dataset):
        if dataset is not None and dataset != DEMO:
            check_path(dataset)
            if not Path(dataset).expanduser().exists():
                check_hub_name(dataset, "dataset")
    check_model(recipe.model)
    if recipe.trainer.get("use_liger_kernel") and find_spec("liger_kernel") is None:
        raise UserError(
            "trainer.liger-missing",
            "trainer.use_liger_kernel needs liger-kernel; install it with: pip install liger-kernel",
        )
    if recipe.trainer.get("push_to_hub") and (
        constants.HF_HUB_OFFLINE or get_token() is None or not can_connect(constants.ENDPOINT)
    ):
        raise UserError(
            "trainer.hub-unreachable",
            f"trainer.push_to_hub needs access to {constants.ENDPOINT}, HF_HUB_OFFLINE unset and a token (hf auth "
            "login, or HF_TOKEN); or drop push_to_hub",
        )


def check_model(model: str) -> None:
    """Refuse the name of a model that leads nowhere.

    Raises:
        UserError: no directory of a model, and no Hub id within reach.
    """
    if model != DEMO and not Path(existing_model(model)).is_dir():
        check_hub_name(model, "model")


def existing_model(model: str) -> str:
    """The model's path, or its Hub id as it is.

    Raises:
        UserError: a directory without a model, a file, or a path to nothing.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path)
    if (path / "adapter_config.json").is_file():
        raise UserError(
            "model.adapters-only",
            f"model directory {model!r} has adapters only; give their base model and --lora start={model}, or resume "
            "their run with --resume --output DIR",
        )
    if path.exists():
        raise UserError(
            "model.config-missing",
            f"model {model!r} has no config.json; expected a directory written by save_pretrained",
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError("model.not-found", f"model {model!r} does not exist; expected a model directory or a Hub id")
    return model


def check_trackers(report_to: str | list[str]) -> None:
    """Refuse a tracker that Transformers does not know, or whose package is missing.

    Raises:
        UserError: with the package to install.
    """
    for name in {*([report_to] if isinstance(report_to, str) else report_to)} - {"none", "all"}:
        if name not in TRACKERS:
            raise UserError(
                "report-to.unknown", f"got report_to {name!r}, expected none, all, or some of {', '.join(TRACKERS)}"
            )
        packages = TRACKERS[name]
        if packages and not any(find_spec(package) for package in packages):
            raise UserError(
                "report-to.package-missing", f"report_to {name!r} needs {packages[0]}; run: pip install {packages[0]}"
            )


def check_hub_name(name: str, repo_type: str) -> None:
    """Refuse a Hub id that is neither in the cache nor within reach, before the libraries try it many times over.

    Args:
        name: the id.
        repo_type: ``"model"`` or ``"dataset"``.

    Raises:
        UserError: it is in no cache, and the Hub is not to be reached, or not to be asked.
    """
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{name.replace('/', '--')}"
    # datasets caches prepared data, and reads it without a network.
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    if cached.is_dir() or (repo_type == "dataset" and (prepared / name.replace("/", "___")).is_dir()):
        return
    subject = f"{repo_type} {name!r} is neither a local path nor in the local Hub cache, and"
    if constants.HF_HUB_OFFLINE:
        raise UserError("hub.offline", f"{subject} HF_HUB_OFFLINE is set; check the spelling, or unset it")
    if not can_connect(constants.ENDPOINT):
        raise UserError(
            "hub.unreachable", f"{subject} {constants.ENDPOINT} cannot be reached; check the spelling, or the network"
        )


def can_connect(address: str) -> bool:
    """Whether the server of a URL, or the proxy that is set for it, takes a connection."""
    url = urlsplit(address)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
