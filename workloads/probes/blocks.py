"""Names the blocks of a model that nobody has named: parts of the size a person thinks in. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict)


def block_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that hold parameters, in the order of their definition: `wte`, `h.0`, `h.1`, `ln_f`.

    A part is a child of the model, or of what merely wraps or holds a list; an item of a list is divided only if it is
    a list itself.
    """
    is_list = isinstance(module, (*LISTS, nn.Sequential))
    children = [(prefix + name, child) for name, child in module.named_children() if _has_parameters(child)]
    for path, child in children:
        is_shell = len(children) == 1 and any(_has_parameters(part) for part in child.children())
        holds_list = any(isinstance(part, LISTS) for part in child.modules())
        if isinstance(child, LISTS) or (not is_list and (is_shell or holds_list)):
            yield from block_modules(child, path + ".")
        else:
            yield path, child


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def named_blocks(model: nn.Module) -> Mapping[str, list[nn.Parameter]]:
    """Every trained parameter once, by its part's name; a shared one is the first part's, a bare one its own."""
    owners: dict[nn.Parameter, str] = {}
    for path, part in block_modules(model):
        for parameter in part.parameters():
            owners.setdefault(parameter, path)
    blocks: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            blocks.setdefault(owners.get(parameter, name), []).append(parameter)
    return blocks
