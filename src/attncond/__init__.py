"""Make the attention of any PyTorch transformer well conditioned in one line, and measure it."""

from attncond._version import __version__
from attncond.adapters import register
from attncond.conditioning import Handle, condition, handle
from attncond.diagnose import Report, diagnose
from attncond.errors import (
    AlreadyConditionedError,
    ConditioningError,
    DiagnosisError,
    NotFoldableError,
    UnsupportedAttentionError,
)
from attncond.inspection import Plan, Unsupported, inspect
from attncond.methods import Precondition, RemoveGap, Spectral
from attncond.monitor import Monitor
from attncond.sites import Projection, Site, fused, join, project, separate
from attncond.weights import Certificate

__all__ = [
    "AlreadyConditionedError",
    "Certificate",
    "ConditioningError",
    "DiagnosisError",
    "Handle",
    "Monitor",
    "NotFoldableError",
    "Plan",
    "Precondition",
    "Projection",
    "RemoveGap",
    "Report",
    "Site",
    "Spectral",
    "Unsupported",
    "UnsupportedAttentionError",
    "__version__",
    "condition",
    "diagnose",
    "fused",
    "handle",
    "inspect",
    "join",
    "project",
    "register",
    "separate",
]
