"""The lines that would teach attncond a class, made from the names of its weights."""

from __future__ import annotations

from torch import nn

from attncond.adapters.naming import is_layer, made, triples
from attncond.adapters.structural import heads_name
from attncond.sites import class_name, layers_with


def suggested(model: nn.Module, path: str, module: nn.Module) -> str:
    """The lines that would support a module, with its own names as far as they are known."""
    holder, place = module, "module"
    if _is_container(module):  # a class that others use, too; the one around it is meant
        outer, _, name = path.rpartition(".")
        holder, place = model.get_submodule(outer), f"module{_step(name)}"
        if not path or _is_container(holder):
            return ""
    so_many = f"heads=module.{heads_name(holder) or 'num_heads'}"
    found = made(module)

    def separate(**names: str) -> str:
        inside = {r: n for r, n in names.items() if n in module._parameters}
        owners = [
            place if r in inside else _weight(module, place, names[r]) if r in names else "None"
            for r in "qkv"
        ]
        listed = ", ".join(f'"{inside.get(r, "weight")}"' for r in "qkv")
        known = f"names=({listed}), " if inside else ""
        return f"ac.separate({', '.join(owners)}, {known}{so_many})"

    sets = [separate(q=q, k=k, v=v) for q, k, v in triples(found)]
    if not sets:
        single = {r: n for n, r in reversed(found.items()) if len(r) == 1}
        sets = [separate(**single)] if single else []
        for name, roles in found.items():
            if len(roles) > 1 and name in module._parameters:
                sets.append(f'ac.fused({place}, "{roles}", {so_many}, name="{name}")')
            elif len(roles) > 1:
                sets.append(f'ac.fused({_weight(module, place, name)}, "{roles}", {so_many})')
        sets = [f"ac.join({', '.join(sets)})"] if len(sets) > 1 else sets
    given = ", ".join(sets) or f"ac.separate(module.q, module.k, module.v, {so_many})"
    return f'@ac.register("{class_name(holder)}")\ndef adapter(module):\n    return {given}'


def _weight(module: nn.Module, place: str, name: str) -> str:
    """How an adapter names a child that is a projection, or that holds one layer with a weight."""
    child = module._modules[name]
    assert child is not None
    inner = [] if is_layer(child) else layers_with(child, "weight")
    parts = inner[0].split(".") if len(inner) == 1 and inner[0] else []
    return place + "".join(map(_step, [name, *parts]))


def _step(name: str) -> str:
    return f"[{name}]" if name.isdigit() else f".{name}"


def _is_container(module: nn.Module) -> bool:
    return type(module).__module__ == nn.ModuleDict.__module__
