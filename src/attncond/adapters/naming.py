"""What the names of weights tell: which of Q, K and V each of them makes."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import Tensor, nn

from attncond.sites import Role

# Which of the three a word of a name stands for: "q_proj", "lin_query", "W_query", "tov", "w_qs".
_ROLE_WORDS: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("q", re.compile(r"^(to|w)?(qs?|query|queries)$")),
    ("k", re.compile(r"^(to|w)?(ks?|keys?)$")),
    ("v", re.compile(r"^(to|w)?(vs?|values?)$")),
)
# "vq" is vector quantisation.
_FUSED_WORD = re.compile(r"^(?:to|w)?(?!vqs?$)([qkv]{2,3})[sz]?$")
# Whole models, as MoCo's encoder_q and encoder_k are.
_MODELS = {"encoder", "model", "tower", "backbone", "network"}
# Parameters that are added to tokens or to logits, or scale them.
_ADDED = {
    *("pos", "position", "positional", "rel", "relative", "embed", "embedding", "embeddings"),
    *("bias", "biases", "scale", "table", "mask", "cache"),
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# The word for the query in a name, with those for key and value that go with it.
_QUERY = re.compile(r"(?:[tT]o|[wW])?(query|queries|Query|qs|q|Q)")
_PARTNERS = {
    "q": ("k", "v"),
    "Q": ("K", "V"),
    "qs": ("ks", "vs"),
    "query": ("key", "value"),
    "Query": ("Key", "Value"),
    "queries": ("keys", "values"),
}
# Fused weights whose names do not say of what. `in_proj` is left out: state-space blocks have it.
_UNNAMED = re.compile(r"^(c_attn|W_pack|in_proj_weight|att_proj|fused_attn_\w+)$")


def roles(name: str) -> str:
    """Which of Q, K and V the words of a name say that it makes, in the order of the words.

    >>> roles("add_k_proj"), roles("to_qkv_mlp"), roles("queryKeyValue"), roles("out_proj")
    ('k', 'qkv', 'qkv', '')
    """
    if _UNNAMED.match(name):
        return "qkv"
    found, words = "", [word.lower() for word in _WORD.findall(name)]
    # Norms have weights of any shape.
    if any("norm" in word or word in _MODELS for word in words):
        return ""
    for word in words:
        if fused := _FUSED_WORD.match(word):
            found += fused[1]
        found += "".join(role for role, pattern in _ROLE_WORDS if pattern.match(word))
    return "".join(dict.fromkeys(found))


def is_layer(module: nn.Module) -> bool:
    """Whether a module says that it is a linear map, wherever its weight is kept."""
    return hasattr(module, "out_features") or hasattr(module, "out_channels")


def maps(child: nn.Module | None) -> bool:
    """Whether a child holds a linear map, also one whose weight is packed, flat or elsewhere.

    A norm of queries or keys has their name, and none.
    """
    return child is not None and any(
        is_layer(m) or any(is_map(n, p) for n, p in m._parameters.items() if p is not None)
        for m in child.modules()
    )


def is_map(name: str, parameter: Tensor) -> bool:
    """Whether a parameter can be a matrix; one without a shape yet can.

    >>> is_map("w_q", Tensor(4, 4)), is_map("q_pos_embed", Tensor(1, 9, 4))
    (True, False)
    """
    if _ADDED.intersection(word.lower() for word in _WORD.findall(name)):
        return False
    return isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.ndim > 1


def triples(names: Collection[str]) -> list[tuple[str, str, str]]:
    """The names that differ in the word for query, key and value alone, whatever stands around it.

    >>> triples(["to_q", "to_k", "to_v", "lin_query", "lin_key", "lin_value", "to_out"])
    [('to_q', 'to_k', 'to_v'), ('lin_query', 'lin_key', 'lin_value')]
    """
    found = []
    for name in names:
        for word in _WORD.finditer(name):
            query = _QUERY.fullmatch(name, word.start(), word.end())
            if query is None:
                continue
            before, after = name[: query.start(1)], name[query.end(1) :]
            key, value = (f"{before}{other}{after}" for other in _PARTNERS[query[1]])
            if key in names and value in names:
                found.append((name, key, value))
    return found


def made(module: nn.Module) -> dict[str, str]:
    """The children and parameters of a module that can be matrices, and which roles they make.

    >>> made(nn.MultiheadAttention(4, 2, bias=False))
    {'out_proj': '', 'in_proj_weight': 'qkv'}
    """
    tables = nn.Embedding | nn.EmbeddingBag  # of biases, say
    names = [n for n, m in module._modules.items() if maps(m) and not isinstance(m, tables)]
    names += [
        n
        for n, p in module._parameters.items()
        # A learned query may be a vector.
        if p is not None and (is_map(n, p) or n == "query")
    ]
    return {n: roles(n) for n in names}
