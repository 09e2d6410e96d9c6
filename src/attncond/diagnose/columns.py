"""What a report's table holds: every column by name, with its meaning."""

from __future__ import annotations

__all__ = ["COLUMNS", "IDENTITY", "TEXT"]

IDENTITY: dict[str, str] = {
    "layer": "number of the attention in the model's order",
    "path": "where its module is in the model",
    "cls": "its class",
    "kind": "self, cross, class, window, cross-covariance, channel or linear attention",
    "call": "which run of it in the forward pass, from 0; shared layers run several times",
    "head": "query head, or missing in the row of the whole attention",
}

_SPECTRUM = {
    "sigma_max": "largest singular value",
    "sigma_min": "smallest singular value",
    "kappa": "condition number; inf where singular in float64",
    "stable_rank": "squared Frobenius norm over squared spectral norm",
}


def _weights() -> dict[str, str]:
    found = {}
    for role in "qkv":
        for name, text in _SPECTRUM.items():
            found[f"{role}_{name}"] = f"W_{role.upper()} as the forward pass uses it: {text}"
        for name, text in _SPECTRUM.items():
            found[f"raw_{role}_{name}"] = f"the stored W_{role.upper()}: {text}"
        found[f"{role}_grad_norm"] = (
            f"Frobenius norm of the loss's gradient in the stored W_{role.upper()}"
        )
    return found


_ATTENTION = {
    "attention_sigma_1": "largest singular value of the attention matrix that meets the values",
    "attention_sigma_2": "its second singular value",
    "attention_gap": "the difference of the two",
    "attention_stable_rank": "its squared Frobenius norm over sigma_1 squared",
}

COLUMNS: dict[str, str] = {
    **IDENTITY,
    "heads": "query heads of the attention",
    "entropy": "mean entropy of a query's weights in nats; queries with one key do not count",
    "entropy_min": "least entropy of a query",
    "entropy_relative": "mean of entropy over the logarithm of the keys that the query sees",
    "saturation": "share of queries that give one key more than 0.99",
    **_ATTENTION,
    **{
        f"raw_{name}": f"the same of the softmax, before gap removal: {text}"
        for name, text in _ATTENTION.items()
    },
    "output_kappa": "condition number of the head's output A, (queries, head_dim), conditioned as "
    "it leaves the head; inf where singular in float64",
    "output_sigma_max": "largest singular value of that A",
    "output_sigma_min": "smallest singular value of that A",
    "logit_max": "largest absolute logit that is not masked",
    "logit_rms": "root mean square of the logits that are not masked",
    "tokens": "tokens that the queries are projected from",
    "token_stable_rank": "stable rank of XXᵀ at the attention's input; 1 is collapse in width",
    "token_residue": "‖X − 1·mean(X)‖/‖X‖ there; 0 is collapse in depth",
    "token_rms": "root mean square of the input's entries",
    **_weights(),
    "jacobian_kappa": "κ of the head's Jacobian in W_Q, W_K, W_V at its structural rank",
    "jacobian_kappa_error": "an estimate of its absolute error",
    "jacobian_sigma_max": "largest singular value of that Jacobian",
    "jacobian_sigma_min": "its smallest singular value at that rank",
    "jacobian_rank": "the structural rank",
    "jacobian_tokens": "tokens that it was computed with",
    "jacobian_paper_bound": "right side of Thm 3.4 of arXiv:2603.07162, which is not a bound",
    "jacobian_certificate": "a bound on κ that holds; inf where there is none",
    "jacobian_path": "how it was computed: closed form, dense (the module's own code run again in "
    "float64 and differentiated) or matrix-free (the same, too large to write down: no κ)",
    "jacobian_status": "the path, unresolved, or why there is none",
    "jacobian_unresolved": "heads whose κ is beyond float64; that of the whole is of the others",
}

TEXT = frozenset(("path", "cls", "kind", "jacobian_path", "jacobian_status"))
