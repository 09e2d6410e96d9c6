"""Methods as texts: what each text means, that it comes back, and what a typing error is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attncond as ac
from attncond.methods import METHODS, Method
from attncond.methods.parse import method_name, parse_method


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("spectral", ac.Spectral()),
        ("Spectral", ac.Spectral()),
        ("Spectral.paper()", ac.Spectral.paper()),
        ("paper", ac.Spectral.paper()),
        ("paper:lam=5", ac.Spectral(lam=5, preserve_norm=False)),
        ("paper-svd", ac.Spectral.paper_svd()),
        ("paper_svd", ac.Spectral.paper_svd()),
        ("polar", ac.Spectral(correction="polar")),
        ("polar:refresh_every=10", ac.Spectral(correction="polar", refresh_every=10)),
        (" spectral : kappa = 1.5 , scope=head ", ac.Spectral(kappa=1.5, scope="head")),
        ("spectral:roles=qk,preserve_norm=False", ac.Spectral(roles="qk", preserve_norm=False)),
        ("spectral:kappa=none,lam=3", ac.Spectral(lam=3)),
        ("precondition:eps=1e-4,detach=true", ac.Precondition(eps=1e-4, detach=True)),
        ("gap", ac.RemoveGap()),
        ("RemoveGap", ac.RemoveGap()),
    ],
)
def test_what_a_text_means(text: str, method: Method) -> None:
    assert parse_method(text) == method


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spectrl", "Did you mean spectral?"),
        ("", "'' is no method. There are spectral"),
        ("svd", "paper-svd"),
        ("spectral:", "has no field ''; it has kappa"),
        ("spectral:kapa=2", "Did you mean kappa?"),
        ("spectral:kappa", "kappa needs a value"),
        ("spectral:kappa=", "kappa needs a value"),
        ("spectral:kappa=two", "kappa must be a number, not 'two'"),
        ("spectral:kappa=0.5", "'spectral:kappa=0.5': kappa must be a finite number above 1"),
        ("spectral:kappa=nan", "kappa must be a finite number"),
        ("spectral:kappa=2,kappa=3", "says kappa twice"),
        ("spectral:kappa=2,lam=3", "not both"),
        ("spectral:scope=heads", "scope must be 'projection' or 'head'"),
        ("spectral:preserve_norm=yes", "must be true or false, not 'yes'"),
        ("polar:kappa=2", "neither kappa nor lam"),
        ("polar:refresh_every=1.5", "refresh_every must be a number"),
        ("gap:eps=1", "has no field 'eps'"),
        ("precondition:eps=none", "eps must be a number"),
        ("precondition:detach=1", "detach must be true or false"),
    ],
)
def test_what_a_mistake_is_told(text: str, said: str) -> None:
    with pytest.raises(ac.ConditioningError) as caught:
        parse_method(text)
    assert said in str(caught.value)


def test_every_method_has_a_name() -> None:
    for cls in METHODS.values():
        assert parse_method(method_name(cls())) == cls()
        assert parse_method(cls.__name__) == cls()


def spectrals() -> st.SearchStrategy[ac.Spectral]:
    common = {
        "preserve_norm": st.booleans(),
        "scope": st.sampled_from(("projection", "head")),
        "roles": st.sampled_from(("q", "k", "v", "qk", "kv", "vq", "qkv", "vkq")),
    }
    above = {"allow_nan": False, "allow_infinity": False}
    return st.one_of(
        st.builds(ac.Spectral, kappa=st.none() | st.floats(1, exclude_min=True, **above), **common),
        st.builds(ac.Spectral, lam=st.floats(0, exclude_min=True, **above), **common),
        st.builds(ac.Spectral, correction=st.just("polar"), refresh_every=st.integers(1), **common),
    )


@given(
    st.one_of(
        spectrals(),
        st.builds(ac.Precondition, eps=st.floats(1e-18, 1e6), detach=st.booleans()),
        st.just(ac.RemoveGap()),
    )
)
def test_a_name_reads_as_its_method(method: Method) -> None:
    assert parse_method(method_name(method)) == method
    assert method_name(parse_method(method_name(method))) == method_name(method)
