"""Builds a family small and random: the whole model, and its MoE layer with what it is called with.

Nothing here knows a family but ``settings.py``: every setting whose name is known is made small,
and the layer's arguments are those that the model calls it with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.finding import Family
from tests.zoo.settings import VOCABULARY, WITHOUT_EMBEDDING, settings_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Zoo:
    """One family, built.

    Attributes:
        model: whole text model, on the CPU, in eval mode.
        layers: path of each MoE layer that it runs, the module around the experts.
    """

    model: nn.Module
    layers: list[str]

    @property
    def layer(self) -> nn.Module:
        """The first MoE layer."""
        return self.model.get_submodule(self.layers[0])

    def model_arguments(self, tokens: int) -> Arguments:
        """Return what to call the model with: token ids [1, tokens], or what takes their place."""
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(3, VOCABULARY, (1, tokens), generator=generator)
        named = {"input_ids": ids}
        if type(self.model).__name__ in WITHOUT_EMBEDDING:
            size = self.model.config.hidden_size
            named = {"inputs_embeds": torch.randn(1, tokens, size, generator=generator)}
        if self.model.config.is_encoder_decoder:
            named["decoder_input_ids"] = ids
        return (), named

    def layer_arguments(self, tokens: int) -> Arguments:
        """Return what the model calls its first MoE layer with."""
        calls: list[Arguments] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            without_cache = {"cache": None} if "cache" in kwargs else {}
            calls.append((args, kwargs | without_cache))

        handle = self.layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            args, kwargs = self.model_arguments(tokens)
            with torch.no_grad():
                self.model(*args, **kwargs)
        finally:
            handle.remove()
        return calls[0]


def build(family: Family, implementation: str | None = None, seed: int = 0) -> Zoo:
    """Return the family with small random weights; `implementation` is one of the experts."""
    known = family.fields | set(family.config.attribute_map)
    config = family.config(**settings_of(family.name, known))
    config._attn_implementation = "eager"
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(seed)
    model = family.model(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    zoo = Zoo(model, [])
    zoo.layers = _layers_run(zoo, family)
    return zoo


def _layers_run(zoo: Zoo, family: Family) -> list[str]:
    """Paths of the modules around the experts that text reaches; of a whole block its own path."""
    ran: list[str] = []
    handles = []
    for name, module in zoo.model.named_modules():
        if type(module).__name__ == family.experts:
            around = name if not name.endswith("experts") else name.rpartition(".")[0]
            note = functools.partial(_note, ran, around)
            handles.append(module.register_forward_pre_hook(note))
    if not handles:
        raise LookupError(f"{family.name}: {family.model.__name__} has no {family.experts}")
    args, kwargs = zoo.model_arguments(8)
    with torch.no_grad():
        zoo.model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return ran


def _note(ran: list[str], path: str, *_: Any) -> None:
    ran.append(path)


def floats(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in floats(part)]
