"""Names the blocks of a model that nobody has named: parts of the size a person thinks in. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def block_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that hold parameters, in the order of their definition: `wte`, `h.0`, `h.1`, `ln_f`.

    A part is a child of the model, or of what merely wraps or holds a list; an item of a list is never divided.
    """
    children = [
        (prefix + name, child) for name, child in module.named_children() if any(True for _ in child.parameters())
    ]
    for path, child in children:
        is_shell = len(children) == 1 and any(True for _ in child.children())
        if isinstance(module, LISTS) or not (is_shell or _holds_list(child)):
            yield path, child
        else:
            yield from block_modules(child, path + ".")


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in module.modules())


def named_blocks(model: nn.Module) -> Mapping[str, list[nn.Parameter]]:
    """Every trained parameter once, by its part's name; a shared one belongs to the first part, a bare one is its own."""
    owners: dict[nn.Parameter, str] = {}
    for path, part in block_modules(model):
        for parameter in part.parameters():
            owners.setdefault(parameter, path)
    blocks: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            blocks.setdefault(owners.get(parameter, name), []).append(parameter)
    return blocks
