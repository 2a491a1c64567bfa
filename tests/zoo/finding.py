"""Finds the mixture-of-experts families of the installed transformers; no list is kept by hand."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

_DECORATED = re.compile(r"^@use_experts_implementation(?:\(.*\))?\nclass (\w+)", re.MULTILINE)

UNDECORATED = {
    "dbrx": "DbrxExperts",
    "jetmoe": "JetMoeMoE",
    "llama4": "Llama4TextExperts",
    "longcat_flash": "LongcatFlashExperts",
    "nllb_moe": "NllbMoeSparseMLP",
    "step3p7": "Step3p7Experts",
    "switch_transformers": "SwitchTransformersSparseMLP",
}
"""Family -> class of its layer, of those that have but one way to run their experts."""

_MODELS = {
    "glm4v_moe": "Glm4vMoeTextModel",
    "glm5_next": "Glm5NextTextModel",
    "nllb_moe": "NllbMoeForConditionalGeneration",
    "openai_privacy_filter": "OpenAIPrivacyFilterForTokenClassification",
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts": "Qwen3OmniMoeTalkerModel",
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextExperts": "Qwen3OmniMoeThinkerTextModel",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
}
"""Model that stands for a family where the rule of :func:`_model_of` finds none or another."""


@dataclass(frozen=True)
class Family:
    """One experts class of transformers.

    Attributes:
        name: folder in ``transformers.models``, with the class where a folder has several.
        experts: name of the class.
        model: class of the smallest whole text model that has it.
        config: class of that model's settings.
        switchable: it runs as ``grouped_mm``, ``batched_mm`` or ``eager``.
    """

    name: str
    experts: str
    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    switchable: bool

    @property
    def fields(self) -> set[str]:
        """Names of the settings."""
        return {field.name for field in dataclasses.fields(self.config)}


@functools.cache
def families() -> dict[str, Family]:
    """Return the families by name."""
    found: dict[str, Family] = {}
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        folder = path.parent.name
        classes = _DECORATED.findall(path.read_text())
        switchable = bool(classes)
        if path.stem == f"modeling_{folder}" and folder in UNDECORATED:
            classes = [UNDECORATED[folder]]
        for experts in classes:
            name = folder if len(classes) == 1 else f"{folder}.{experts}"
            module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
            model = _model_of(name, module)
            found[name] = Family(name, experts, model, _config_of(model), switchable)
    return found


def _model_of(name: str, module: Any) -> type[PreTrainedModel]:
    """A causal language model, else a text model, else the first model of the file."""
    if name in _MODELS:
        return getattr(module, _MODELS[name])
    models = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and not value.__name__.endswith("PreTrainedModel")
    ]
    for ending in ("ForCausalLM", "TextModel", "Model"):
        for model in models:
            if model.__name__.endswith(ending):
                return model
    raise LookupError(f"{name} has no model in {module.__name__}")


def _config_of(model: type[PreTrainedModel]) -> type[PreTrainedConfig]:
    """The annotation of the constructor: some text models inherit the config of the whole."""
    config = inspect.signature(model.__init__).parameters["config"].annotation
    if isinstance(config, str):
        config = getattr(inspect.getmodule(model), config)
    return config if issubclass(config, PreTrainedConfig) else model.config_class
