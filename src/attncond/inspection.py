"""Find the attention of a model: what is supported, what is not, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from attncond.adapters import Adapter, find_adapter, structural
from attncond.adapters.naming import made
from attncond.errors import UnsupportedAttentionError
from attncond.sites import SCRIPTED, Kind, Site, class_name
from attncond.suggestion import suggested

# A class that says it attends, whatever it calls its weights.
_ATTENDS = re.compile(r"(MultiHead\w*|Self|Cross|Causal|DotProduct)Attention$", re.IGNORECASE)


@dataclass(frozen=True)
class Unsupported:
    """Something that looks like attention and that no adapter can read.

    ``adapter``: the lines that would support it, as far as names tell them; none where its weights
    are known to be no Q, K and V.
    """

    path: str
    cls: str
    parameters: tuple[str, ...]
    reason: str
    adapter: str = field(default="", repr=False)


@dataclass(frozen=True)
class Plan:
    """What :func:`inspect` found. ``print(plan)`` shows it as a table."""

    sites: tuple[Site, ...]
    unsupported: tuple[Unsupported, ...]

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain data, for JSON."""
        sites = [
            {
                "path": site.path,
                "class": site.cls,
                "kind": site.kind,
                "heads": site.heads,
                "layout": site.layout,
                "projections": [
                    {
                        "role": p.role,
                        "parameter": f"{p.path}.{p.name}" if p.path else p.name,
                        "heads": p.heads,
                        "head_dim": p.head_dim,
                        "in_features": p.in_features,
                        "transposed": p.axis == 1,
                    }
                    for p in site.projections
                ],
            }
            for site in self.sites
        ]
        return {"sites": sites, "unsupported": [asdict(u) for u in self.unsupported]}

    def __str__(self) -> str:
        count = len(self.sites)
        lines = [
            f"{count} attention site{'s' * (count != 1)}, {len(self.unsupported)} not supported"
        ]
        if self.sites:
            head = ("path", "class", "kind", "heads", "layout", "q, k, v: heads x head_dim x in")
            body = [
                (
                    site.path or "(the model)",
                    site.cls.rsplit(".", 1)[-1],
                    site.kind,
                    str(site.heads),
                    site.layout,
                    "  ".join(
                        f"{p.role} {p.heads}x{p.head_dim}x{p.in_features}" for p in site.projections
                    ),
                )
                for site in self.sites
            ]
            lines += ["", table(head, body)]
        if self.unsupported:
            lines += ["", unsupported_table(self.unsupported)]
        return "\n".join(lines)


def table(head: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> str:
    """Rows of text in aligned columns."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    rows = [head, tuple("-" * w for w in widths), *body]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
    )


def unsupported_table(rows: tuple[Unsupported, ...], advice: bool = True) -> str:
    """The rows that no adapter reads, and what a user can do about them."""
    body = [
        (u.path or "(the model)", u.cls, ", ".join(u.parameters) or "-", u.reason) for u in rows
    ]
    text = "not supported:\n" + table(("path", "class", "parameters", "reason"), body)
    if not advice:
        return text
    given = next((u.adapter for u in rows if u.adapter), "")
    if not given:
        return f"{text}\n\ndocs/adapters.md tells how to teach attncond a class."
    lines = "\n".join(f"    {line}" for line in given.splitlines())
    return f"""{text}

To support a class, tell attncond where its Q, K and V are:

{lines}

This is made from names. The forward tells whether each of them is a matrix times the input (for
x @ W: transposed=True), whether the rows of a fused weight are in this order, role after role, or
head after head (head_major=True), and what the class calls its heads. What is no attention returns
(). docs/adapters.md has more."""


def inspect(model: nn.Module) -> Plan:
    """Find every attention in ``model``; works on the meta device and changes nothing.

    A module that stands at several paths is listed once, under the first.

    >>> print(inspect(nn.MultiheadAttention(8, 2)))  # doctest: +ELLIPSIS
    1 attention site, 0 not supported
    ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect needs a torch.nn.Module, not {type(model).__name__}")
    paths: dict[int, str] = {id(m): path for path, m in model.named_modules()}
    unsupported: list[Unsupported] = []
    covered: list[str] = []  # prefixes of modules that are settled, one way or the other
    # Those of them with sites; other parts of them may attend, too.
    attending: dict[str, list[Site]] = {}

    for path, module in model.named_modules():
        known = _known(module)
        if not known and _claimed(module, path, attending):
            continue  # it holds weights of an attention around it, whose adapter named them
        try:
            found = _sites_of(module, known)
        except UnsupportedAttentionError as error:
            told = isinstance(error.__cause__, AttributeError) or not (
                known or str(error) in structural.NO_ROWS
            )
            lines = suggested(model, path, module) if told else ""
            unsupported.append(_unsupported(path, module, str(error), lines))
            covered.append(path)
            continue
        if found is None:
            continue
        kind_of = _kind_by_parent(model, path)
        for site in found:
            projections = tuple(
                replace(p, path=paths.get(id(p.owner), "")) for p in site.projections
            )
            kind = kind_of if kind_of and site.kind == "self" else site.kind
            attending.setdefault(path, []).append(
                replace(site, module=module, path=path, projections=projections, kind=kind)
            )
        covered.append(path)

    for path, module in model.named_modules():
        if path in covered or any(_below(path, c) for c in covered if c not in attending):
            continue
        inside = any(_below(path, c) for c in attending)
        settled = _holding(path, covered) | _claimed(module, path, attending)
        if reason := _looks_like_attention(module, settled, inside):
            scripted = isinstance(module, torch.jit.ScriptModule)
            lines = "" if scripted else suggested(model, path, module)
            reason = SCRIPTED if scripted else reason
            unsupported.append(_unsupported(path, module, reason, lines))
            covered.append(path)
    sites = tuple(site for found in attending.values() for site in found)
    return Plan(sites, tuple(unsupported))


def _known(module: nn.Module) -> Adapter | None:
    return None if isinstance(module, torch.jit.ScriptModule) else find_adapter(module)


def _sites_of(module: nn.Module, adapter: Adapter | None) -> tuple[Site, ...] | None:
    """The sites of a module; None if it is unknown, () if an adapter says there is no attention."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # it has no class to go by; the names in it are looked at later
    try:
        found = adapter(module) if adapter else structural.match(module)
    except AttributeError as error:  # a subclass, or another version, that keeps them elsewhere
        raise UnsupportedAttentionError(f"not as its adapter expects it: {error}") from error
    if found is None:
        return None
    return (found,) if isinstance(found, Site) else tuple(found)


def _kind_by_parent(model: nn.Module, path: str) -> Kind | None:
    """T5 and its children use one class for self and cross attention; its layer's class tells."""
    if not path:
        return None
    parent = class_name(model.get_submodule(path.rpartition(".")[0])).rpartition(".")[2]
    return "cross" if "CrossAttention" in parent else None


def _below(path: str, other: str) -> bool:
    """Whether a module is a part of another."""
    return not other or path.startswith(f"{other}.")


def _holding(path: str, covered: list[str]) -> set[str]:
    """The children of a module that hold, or are, one that is settled already."""
    prefix = f"{path}." if path else ""
    return {c[len(prefix) :].partition(".")[0] for c in covered if c.startswith(prefix)}


def _claimed(module: nn.Module, path: str, attending: dict[str, list[Site]]) -> set[str]:
    """The children and parameters of a module with weights of a site around it."""
    steps = path.split(".") if path else []
    around = [s for n in range(len(steps)) for s in attending.get(".".join(steps[:n]), ())]
    weights = {id(p.raw) for site in around for p in site.projections}
    if not weights:
        return set()
    children = {n: m for n, m in module._modules.items() if m is not None}
    return {n for n, p in module._parameters.items() if id(p) in weights} | {
        n for n, m in children.items() if any(id(p) in weights for p in m.parameters())
    }


def _names(module: nn.Module) -> list[str]:
    return [n for n, m in module._modules.items() if m is not None] + [
        n for n, p in module._parameters.items() if p is not None
    ]


def _looks_like_attention(module: nn.Module, settled: set[str], inside: bool) -> str | None:
    """What makes a module look like attention, apart from the children that are ``settled``.

    ``inside``: it is a part of one, as diffusers' processors are.
    """
    parts = {n: roles for n, roles in made(module).items() if n not in settled}
    adapter = "its adapter returned None" if _known(module) else "no adapter for this class"
    if fused := [n for n, roles in parts.items() if len(roles) > 1]:
        return f"{adapter}; the order of rows in '{fused[0]}' cannot be guessed"
    found = set("".join(parts.values()))
    # Roles may be missing: learned queries, keys or the whole matrix of another layer. That is told
    # from a scoring head or a vector of queries by the class's name alone.
    name = class_name(module).rpartition(".")[2]
    recurrent = "receptance" in parts  # which is RWKV's
    named = not settled and "Attention" in name and not recurrent  # of its own
    if found >= {"q", "k"} or (found and named) or (inside and len(found) > 1):
        return f"{adapter}; its query, key and value were not recognised"
    attends = _ATTENDS.search(name) or ("Attention" in name and structural.heads_name(module))
    if parts and not settled and attends and not recurrent:
        return f"{adapter}; its class is named as attention, but no weight as query, key or value"
    return None


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None


def _unsupported(path: str, module: nn.Module, reason: str, adapter: str) -> Unsupported:
    parameters = [
        n for n in _names(module) if n in module._parameters or _has_parameters(module._modules[n])
    ]
    return Unsupported(path, class_name(module), tuple(parameters), reason, adapter)
