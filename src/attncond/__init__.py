"""Make the attention of any PyTorch transformer well conditioned in one line, and measure it."""

from attncond._version import __version__
from attncond.adapters import register
from attncond.errors import (
    AlreadyConditionedError,
    ConditioningError,
    NotFoldableError,
    UnsupportedAttentionError,
)
from attncond.inspection import Plan, Unsupported, inspect
from attncond.sites import Projection, Site, fused, join, project, separate

__all__ = [
    "AlreadyConditionedError",
    "ConditioningError",
    "NotFoldableError",
    "Plan",
    "Projection",
    "Site",
    "Unsupported",
    "UnsupportedAttentionError",
    "__version__",
    "fused",
    "inspect",
    "join",
    "project",
    "register",
    "separate",
]
