from __future__ import annotations

import pytest

from attncond.lab.reading import YamlError, parse_yaml, split_values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        (".5e1", 5.0),
        ("1.e2", 100.0),
        ("1e", "1e"),
        ("e3", "e3"),
        ("12", 12),
        ("0.5", 0.5),
        ("", None),
        ("[1e-3, a]", [1e-3, "a"]),
        ("'1e-3'", "1e-3"),
        ("spectral:kappa=2", "spectral:kappa=2"),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_values_are_what_they_look_like(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' stands there twice"),
        ("x: {a: 1, a: 2}", "twice"),
        ("a: [1", "line"),
        ("a: 2020-99-99", "month"),
        ("? [a, b]\n: 1", "unhashable"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("\x00", "special characters"),
        ("[" * 5000, "nested too deeply"),
        ("a: 1\n---\nb: 2", "another document"),
    ],
)
def test_what_is_no_yaml_is_told(text: str, words: str) -> None:
    with pytest.raises(YamlError, match=words):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,2e-3", ["1e-3", "2e-3"]),
        ("5,", ["5"]),
        ("[0.9, 0.99],[0.9, 0.95]", ["[0.9, 0.99]", "[0.9, 0.95]"]),
        ('"spectral:kappa=2,scope=head", gap', ['"spectral:kappa=2,scope=head"', "gap"]),
        ("{depth: 2, heads: 3},{}", ["{depth: 2, heads: 3}", "{}"]),
        ("", []),
    ],
)
def test_several_values_keep_how_they_were_written(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize("text", ["[1", "1]", "1],[2", "{a: 1, a: 2}", "!!python/name:os 1"])
def test_what_are_no_values_is_told(text: str) -> None:
    with pytest.raises(YamlError):
        split_values(text)
