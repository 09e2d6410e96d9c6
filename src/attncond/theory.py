"""What the papers prove about the conditioning of attention, what holds, and what does not.

A plain reference in float64 for one small head, written to be read beside arXiv:2603.07162: each
function is one statement of the paper, a correction of it, or a counterexample to it. Matrices are
dense and as the paper writes them (W is D × d, vec stacks columns); ``docs/theory.md`` tells the
whole story.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attncond.methods.spectral import shift_certificate

__all__ = [
    "Head",
    "JacobianBlocks",
    "JacobianCertificate",
    "bound_counterexample",
    "commutation",
    "guggenheimer_bound",
    "jacobian",
    "jacobian_blocks",
    "jacobian_certificate",
    "jacobian_condition",
    "jacobian_rank",
    "lam_for",
    "paper_bound",
    "polar_condition",
    "polar_correction",
    "product_counterexample",
    "pseudo_condition",
    "shift_bound",
    "shift_bound_printed",
    "shift_condition",
    "shift_counterexample",
    "softmax_jacobian",
]

Convention = Literal["wide", "stacked"]

# Below this fraction of σ_max a float64 SVD of these small matrices holds nothing but rounding.
_ZERO = 1e-11


@dataclass(frozen=True, eq=False)
class Head:
    """One attention head on one sequence: softmax(scale · X W_Q W_Kᵀ Xᵀ) X W_V (Eq. 3).

    Args:
        x: Tokens, (N, D).
        w_q, w_k, w_v: Projections, (D, d) as the paper has them; PyTorch stores the transposes.
        scale: What the logits are multiplied by; None is the usual 1/√d, 1.0 is Eq. 3 to the
            letter.

    >>> head = Head(torch.eye(3), *(torch.eye(3, 2) for _ in range(3)))
    >>> head.p.sum(1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("x", "w_q", "w_k", "w_v"):
            object.__setattr__(self, name, _matrix(getattr(self, name), name))
        shapes = {tuple(w.shape) for w in (self.w_q, self.w_k, self.w_v)}
        if len(shapes) > 1 or self.w_q.shape[0] != self.x.shape[1]:
            raise ValueError(
                "a head needs x (N, D) and w_q, w_k, w_v all (D, d), not x "
                f"{tuple(self.x.shape)} with {', '.join(map(str, sorted(shapes)))}"
            )
        if self.scale is None:
            object.__setattr__(self, "scale", self.w_q.shape[1] ** -0.5)
        elif not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a finite number above 0, not {self.scale!r}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, D, d)."""
        return self.x.shape[0], self.x.shape[1], self.w_q.shape[1]

    @property
    def factor(self) -> float:
        """The scale of the logits as a number."""
        assert self.scale is not None
        return self.scale

    @cached_property
    def p(self) -> Tensor:
        """The attention matrix, (N, N)."""
        logits = self.factor * (self.x @ self.w_q) @ (self.x @ self.w_k).mT
        return torch.softmax(logits, dim=-1)

    @cached_property
    def a(self) -> Tensor:
        """The head's output, (N, d)."""
        return self.p @ self.x @ self.w_v


class JacobianBlocks(NamedTuple):
    """∂vec(A)/∂vec(W) for W_Q, W_K and W_V, each (N·d, D·d)."""

    q: Tensor
    k: Tensor
    v: Tensor


def softmax_jacobian(p: Tensor) -> Tensor:
    """Lemma 3.2: Λ(p) = Diag(p) − p pᵀ, the derivative of softmax where its value is p.

    ``(..., n) -> (..., n, n)``. The rows of Λ(p) sum to zero whatever p is, so it is singular.

    >>> softmax_jacobian(torch.tensor([0.5, 0.5]))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def commutation(m: int, n: int) -> Tensor:
    """The permutation T with T vec(W) = vec(Wᵀ) for every W (m, n), vec stacking columns.

    >>> commutation(1, 2)
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    order = torch.arange(m * n).view(n, m).mT.flatten()
    return torch.eye(m * n, dtype=torch.float64)[order]


def jacobian_blocks(head: Head) -> JacobianBlocks:
    """Thm 3.3, product of Kronecker factors by product, with the scale that Eq. 3 leaves out.

    Λ(softmax(·)) of a matrix is read row by row, as the derivative needs it: an N² × N² matrix that
    couples the entries of a row. Diag(vec P) − vec P vec Pᵀ would be another, wrong one.

    >>> blocks = jacobian_blocks(bound_counterexample(1.0))
    >>> blocks.q.shape
    torch.Size([6, 6])
    """
    n, dim, d = head.shape
    q, k, v = head.x @ head.w_q, head.x @ head.w_k, head.x @ head.w_v
    swap = commutation(n, n)
    # vec stacks columns and softmax acts on rows: swap makes rows contiguous, and back.
    softmax = swap.mT @ torch.block_diag(*softmax_jacobian(head.p)) @ swap
    outer = head.factor * torch.kron(v.mT.contiguous(), _eye(n)) @ softmax
    return JacobianBlocks(
        q=outer @ torch.kron(k, head.x),
        k=outer @ torch.kron(head.x, q) @ commutation(dim, d),
        v=torch.kron(_eye(d), head.p @ head.x),
    )


def jacobian(head: Head, convention: Convention = "wide") -> Tensor:
    """The Jacobian of a head with respect to its three weights.

    ``"wide"`` is [J_Q J_K J_V], (N·d, 3·D·d): the derivative of the output. ``"stacked"`` is
    [J_Q; J_K; J_V], (3·N·d, D·d): what Eq. 4 and the proof of Thm 3.4 call the Jacobian, which
    moves all three weights by the same amount.

    >>> jacobian(bound_counterexample(1.0)).shape
    torch.Size([6, 18])
    """
    return torch.cat(jacobian_blocks(head), dim=1 if _known(convention) == "wide" else 0)


def jacobian_rank(head: Head, convention: Convention = "wide") -> int:
    """The rank that the Jacobian has for almost all weights with these tokens.

    Two families of directions never change the output: W_Q → W_Q M, W_K → W_K M⁻ᵀ (d²), and keys
    that all move by one vector (d, where the tokens can express it). So 'J has full rank', which
    Thm 3.4 assumes, fails for the wide Jacobian of a short head in a long sequence.

    >>> jacobian_rank(bound_counterexample(1.0))
    6
    """
    n, _, d = head.shape
    sigma = torch.linalg.svdvals(head.x)
    r = int((sigma > _ZERO * sigma[0]).sum())
    if d > r:
        raise ValueError(f"the rank is known for heads with d <= rank(x), not d={d}, rank {r}")
    if _known(convention) == "stacked":
        return r * d
    ones = torch.ones(n, 1, dtype=torch.float64)
    left = ones - head.x @ (torch.linalg.pinv(head.x, rtol=_ZERO) @ ones)
    return min(n * d, 3 * r * d - d * d - d * bool(left.norm() < 1e-9 * math.sqrt(n)))


def jacobian_condition(head: Head, convention: Convention = "wide") -> float:
    """κ of the Jacobian by a dense SVD: σ_max over the singular value at `jacobian_rank`.

    >>> round(jacobian_condition(bound_counterexample(100.0)), 1)
    54.7
    """
    sigma = torch.linalg.svdvals(jacobian(head, convention))
    return _ratio(sigma[0], sigma[jacobian_rank(head, convention) - 1])


def pseudo_condition(a: Tensor) -> float:
    """σ_max over the smallest singular value that is not zero, of a matrix (m, n).

    The only reading under which Thm 3.4 is finite. It is not submultiplicative:
    see `product_counterexample`.

    >>> pseudo_condition(torch.diag(torch.tensor([4.0, 2.0, 0.0])))
    2.0
    """
    sigma = torch.linalg.svdvals(_matrix(a, "a"))
    if not bool(sigma[0] > 0):
        raise ValueError("pseudo_condition: a zero matrix has no condition number")
    return _ratio(sigma[0], sigma[sigma > _ZERO * sigma[0]][-1])


def paper_bound(head: Head) -> float:
    """The right side of Thm 3.4 (Eq. 10), each κ read as `pseudo_condition`. **Not a bound.**

    κ(X)³ κ(Λ) κ(W_V) (κ(W_Q) + κ(W_K)) + κ(X) κ(P). With the ordinary κ it is infinite, for Λ is
    always singular; with this one `bound_counterexample` exceeds it. `jacobian_certificate` holds.

    >>> round(paper_bound(bound_counterexample(1000.0)), 2)
    6.19
    """
    x = pseudo_condition(head.x)
    softmax = pseudo_condition(torch.block_diag(*softmax_jacobian(head.p)))
    q, k, v = (pseudo_condition(w) for w in (head.w_q, head.w_k, head.w_v))
    return x**3 * softmax * v * (q + k) + x * pseudo_condition(head.p)


@dataclass(frozen=True)
class JacobianCertificate:
    """κ(J) ≤ bound = sqrt(norm_q² + norm_k² + px_max²) / px_min; infinite where it cannot hold.

    ``norm_q`` and ``norm_k`` are ‖J_Q‖ and ‖J_K‖, or what bounds them; ``px_max`` and ``px_min``
    are extreme singular values of PX.
    """

    norm_q: float
    norm_k: float
    px_max: float
    px_min: float

    @property
    def bound(self) -> float:
        """What κ(J) cannot exceed."""
        top = math.hypot(self.norm_q, self.norm_k, self.px_max)
        return top / self.px_min if self.px_min > 0 else math.inf


def jacobian_certificate(
    head: Head, convention: Convention = "wide", *, cheap: bool = False
) -> JacobianCertificate:
    """A bound on κ(J) that is a theorem (ours, in place of Thm 3.4).

    J_V = I ⊗ PX alone keeps σ_min up: wide, JJᵀ ⪰ J_V J_Vᵀ, of use where PX has rank N; stacked,
    JᵀJ ⪰ J_Vᵀ J_V, of use where P is nonsingular. ``cheap`` takes bounds instead of ‖J_Q‖ and
    ‖J_K‖, which need no Jacobian: with S_i = scale · Σ_j p_ij (v_j − a_i) k_jᵀ and
    B_i = Σ_j p_ij (v_j − a_i) x_jᵀ, ‖J_Q‖ ≤ ‖X‖ max‖S_i‖ and ‖J_K‖ ≤ scale · max‖q_i‖ · ‖B‖.

    >>> head = bound_counterexample(100.0)
    >>> jacobian_condition(head) <= jacobian_certificate(head).bound < 200
    True
    """
    n = head.shape[0]
    sigma = torch.linalg.svdvals(head.p @ head.x)
    if _known(convention) == "wide":
        low = float(sigma[n - 1]) if n <= len(sigma) else 0.0
    else:
        tokens, p = torch.linalg.svdvals(head.x), torch.linalg.svdvals(head.p)
        rank = int((tokens > _ZERO * tokens[0]).sum())
        low = float(sigma[rank - 1]) if float(p[-1]) > _ZERO * float(p[0]) else 0.0
    low = low if low > _ZERO * float(sigma[0]) else 0.0
    if cheap:
        norm_q, norm_k = _cheap_norms(head)
    else:
        blocks = jacobian_blocks(head)
        norm_q, norm_k = (float(torch.linalg.matrix_norm(b, 2)) for b in (blocks.q, blocks.k))
    return JacobianCertificate(norm_q, norm_k, float(sigma[0]), low)


def _cheap_norms(head: Head) -> tuple[float, float]:
    q, k, v = head.x @ head.w_q, head.x @ head.w_k, head.x @ head.w_v
    t = head.p[:, :, None] * (v[None] - head.a[:, None])  # (i, j, d)
    s = head.factor * torch.einsum("ije,jf->ief", t, k)
    b = torch.einsum("ije,jc->iec", t, head.x).flatten(0, 1)
    norm_x, norm_b = (float(torch.linalg.matrix_norm(m, 2)) for m in (head.x, b))
    norm_s = float(torch.linalg.matrix_norm(s, 2).max())
    return norm_x * norm_s, head.factor * float(q.norm(dim=1).max()) * norm_b


def polar_correction(w: Tensor) -> Tensor:
    """Thm 3.5: C = σ_max U Vᵀ of the thin SVD W = U S Vᵀ; κ(W + C) = 2σ_max/(σ_max + σ_min).

    The correction is σ_max times the orthogonal polar factor, which needs no SVD
    (`attncond.polar.polar`); this is the paper's way. The proof ends with '< 2', which a singular
    W turns into '= 2'.

    >>> polar_correction(torch.diag(torch.tensor([4.0, -1.0])))
    tensor([[ 4.,  0.],
            [ 0., -4.]], dtype=torch.float64)
    """
    u, sigma, vh = torch.linalg.svd(_matrix(w, "w"), full_matrices=False)
    correction: Tensor = sigma[0] * (u @ vh)
    return correction


def polar_condition(w: Tensor) -> float:
    """κ(W + C) as Thm 3.5 has it, 2σ_max/(σ_max + σ_min): at most 2.

    >>> polar_condition(torch.diag(torch.tensor([4.0, -1.0])))
    1.6
    """
    sigma = torch.linalg.svdvals(_matrix(w, "w"))
    return float(2 * sigma[0] / (sigma[0] + sigma[-1]))


def shift_condition(a: Tensor, lam: float) -> float:
    """κ(A + λI_k) itself, by an SVD; I_k has ones on the main diagonal of the shape of A."""
    matrix = _matrix(a, "a")
    sigma = torch.linalg.svdvals(matrix + lam * torch.eye(*matrix.shape, dtype=torch.float64))
    return _ratio(sigma[0], sigma[-1])


def shift_bound_printed(a: Tensor, lam: float) -> float:
    """Thm 3.8 as printed (Eq. 56): (σ_max + λ)/(λ − σ_min). **Not a bound**, nor is the theorem.

    Weyl's inequality, which the proof cites (Eq. 53), subtracts σ_max in the denominator.

    >>> a, lam = shift_counterexample()
    >>> round(shift_bound_printed(a, lam), 2), round(shift_condition(a, lam))
    (2.21, 110)
    """
    sigma = torch.linalg.svdvals(_matrix(a, "a"))
    return (float(sigma[0]) + lam) / (lam - float(sigma[-1])) if lam > sigma[-1] else math.inf


def shift_bound(a: Tensor, lam: float) -> float:
    """Thm 3.8 corrected: κ(A + λI_k) ≤ (λ + σ_max)/(λ − σ_max) for λ > σ_max, else infinite.

    Where it is at most κ(A), the paper's conclusion κ(A + λI_k) ≤ κ(A) follows.

    >>> round(shift_bound(*shift_counterexample()))
    199
    """
    return shift_certificate(lam, float(torch.linalg.matrix_norm(_matrix(a, "a"), 2)))


def lam_for(kappa: float, sigma_max: float) -> float:
    """The λ whose `shift_bound` is κ: σ_max (κ + 1)/(κ − 1).

    >>> lam_for(2.0, sigma_max=1.5)
    4.5
    """
    if not (math.isfinite(kappa) and kappa > 1):
        raise ValueError(f"kappa must be a finite number above 1, not {kappa!r}")
    return sigma_max * (kappa + 1) / (kappa - 1)


def guggenheimer_bound(m: Tensor) -> float:
    """κ(M) < (2/|det M|)(‖M‖_F/√n)ⁿ (Guggenheimer, Edelman and Johnson, 1995).

    For a rectangular M, |det M| is the product of its n = min(rows, columns) singular values. The
    theory of preconditioned attention rests on it; over diagonal C, the bound of a
    square C·M is least where the rows of C·M have one length.

    >>> guggenheimer_bound(torch.eye(3))
    2.0
    """
    sigma = torch.linalg.svdvals(_matrix(m, "m"))
    if not bool(sigma[-1] > 0):
        return math.inf
    n = len(sigma)
    # Through logarithms: the determinant of a large matrix leaves float64 before the bound does.
    rms = float(torch.linalg.vector_norm(sigma)) / math.sqrt(n)
    log = n * math.log(rms) - float(sigma.log().sum())
    return 2 * math.exp(log) if log < 700 else math.inf


def shift_counterexample() -> tuple[Tensor, float]:
    """(A, λ) that satisfies all that Thm 3.8 asks for and has κ(A + λI) = 110 > κ(A) = 9.9."""
    return torch.diag(torch.tensor([-9.9, 1.0], dtype=torch.float64)), 10.0


def product_counterexample(theta: float) -> tuple[Tensor, Tensor]:
    """(C, D) with pseudo-κ 1 and 1 and full-rank product CD of κ = 1/cos θ (proof of Thm 3.4).

    >>> c, d = product_counterexample(math.acos(0.01))
    >>> round(pseudo_condition(c @ d))
    100
    """
    c = torch.eye(2, 3, dtype=torch.float64)
    d = torch.tensor(
        [[1.0, 0.0], [0.0, math.cos(theta)], [0.0, math.sin(theta)]], dtype=torch.float64
    )
    return c, d


def bound_counterexample(alpha: float) -> Head:
    """A head (N = D = 3, d = 2, J of full rank) whose κ(J) grows with α; `paper_bound` does not.

    α only multiplies W_V: the left side of Thm 3.4 sees that (J_Q and J_K grow, J_V does not), the
    right side consists of condition numbers and cannot.
    """
    u, w, o = (
        torch.nn.functional.normalize(torch.tensor(v, dtype=torch.float64), dim=0)
        for v in ([0.0, 1.0, -1.0], [-2.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    )
    plane = 8**0.25 * torch.stack([u, w], dim=1)
    return Head(_eye(3), plane, plane, alpha * torch.stack([o, u], dim=1))


def _matrix(a: Tensor, name: str) -> Tensor:
    if not isinstance(a, Tensor) or a.ndim != 2 or 0 in a.shape or a.is_complex():
        what = f"{a.dtype} {tuple(a.shape)}" if isinstance(a, Tensor) else type(a).__name__
        raise ValueError(f"{name} must be a real matrix, not {what}")
    if not bool(a.isfinite().all()):
        raise ValueError(f"{name} holds NaN or inf")
    return a.detach().to("cpu", torch.float64)


def _known(convention: Convention) -> Convention:
    if convention not in ("wide", "stacked"):
        raise ValueError(f"convention must be 'wide' or 'stacked', not {convention!r}")
    return convention


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def _ratio(high: Tensor, low: Tensor) -> float:
    return float(high / low) if float(low) > 0 else math.inf
