"""attncond diagnose: measure a model's attention, and write the page that shows it."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attncond.cli.common import Debug, Json, Model, mistakes
from attncond.diagnose import Comparison, Finding, Report
from attncond.diagnose.command import (
    Job,
    check_comparable,
    checked_output,
    read_earlier,
    write,
)
from attncond.diagnose.inputs import Inputs, Wanted, choose
from attncond.errors import DiagnosisError
from attncond.loading import load
from attncond.methods import Method
from attncond.methods.parse import parse_method
from attncond.sources import split

EXAMPLES = (
    "attncond diagnose timm:vit_tiny_patch16_224 --images photos --out report.html",
    "attncond diagnose hf:./my-model --text book.txt --out report.html --out report.json",
    "attncond diagnose my_models:build --batch my_models:batch --method spectral:kappa=1.5",
)

_WEIGHTS, _INPUT, _MEASURE, _ANSWER = "Weights", "Input", "What is measured", "Answer"
_LISTED = 5


def diagnose_command(
    source: Model,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights: a .safetensors file, a folder with one, or the index of a sharded one. "
            "An hf folder's own are taken by default. Pickles are refused.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Not those in the folder.", rich_help_panel=_WEIGHTS),
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Condition the model and compare it with what it was: spectral, paper, paper-svd, "
            "polar, precondition, gap, or with fields: spectral:kappa=1.5,scope=head. Give it "
            "again to add another.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of images, or one image.", rich_help_panel=_INPUT
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text file in UTF-8.", rich_help_panel=_INPUT),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the tokenizer, if not the model's.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns the input: a tensor, a tuple of arguments or a dict "
            "of them. Without any of these the input is random.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Do not run the model.", rich_help_panel=_INPUT),
    ] = False,
    samples: Annotated[
        int, typer.Option(min=1, help="Images or texts.", rich_help_panel=_INPUT)
    ] = 4,
    length: Annotated[
        int, typer.Option(min=4, help="Tokens of a text.", rich_help_panel=_INPUT)
    ] = 128,
    seed: Annotated[
        int, typer.Option(help="Of random weights and input.", rich_help_panel=_INPUT)
    ] = 0,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Numbers as in the table, or patterns of paths: 0-3,-1,blocks.1*",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="LIST", help="Numbers: 0,3", rich_help_panel=_MEASURE)
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=2, help="Tokens in a Jacobian, at the most.", rich_help_panel=_MEASURE),
    ] = 32,
    jacobian: Annotated[
        bool,
        typer.Option(
            "--jacobian/--no-jacobian", help="The slowest part.", rich_help_panel=_MEASURE
        ),
    ] = True,
    loss: Annotated[
        str | None,
        typer.Option(
            help="For norms of gradients: sum (of the output) or output (its own .loss).",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    time_budget: Annotated[
        float,
        typer.Option(
            help="Seconds after which nothing new is measured, for each model; inf for no end. The "
            "report says what is missing.",
            rich_help_panel=_MEASURE,
        ),
    ] = 300,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_MEASURE)
    ] = "auto",
    out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A page (.html) or the numbers (.json); give it again for both. A file that is "
            "there is replaced.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            metavar="FILE",
            help="An earlier report (.json) to compare with, in place of the stock model.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how well conditioned the attention of a model is, and show it on a page.

    Nothing is downloaded and no code of a checkpoint is run. Exit code 1 if weights or activations
    are not finite; other findings, even many, are no failure.
    """
    with mistakes(debug):
        # A user's function may print; stdout belongs to the answer.
        with contextlib.redirect_stdout(sys.stderr):
            methods = _methods(method or ())
            outputs = [checked_output(path) for path in out or ()]
            before = None if earlier is None else read_earlier(earlier)
            where = _device(device)
            if not time_budget > 0:
                raise DiagnosisError(f"--time-budget must be above 0 seconds, not {time_budget:g}")
            options: dict[str, Any] = {
                "layers": _layers(layers),
                "heads": _heads(heads),
                "samples": samples,
                "tokens": tokens,
                "jacobian": jacobian,
                "loss": loss,
                "time_budget": None if math.isinf(time_budget) else time_budget,
            }
            if weights_only and (images or text or batch):
                raise DiagnosisError("--weights-only runs nothing: it takes no input")
            if random_weights and checkpoint is not None:
                raise DiagnosisError("give --checkpoint or --random-weights, not both")
            loaded = load(source, checkpoint, seed=seed, random=random_weights)
            if before is not None:
                check_comparable(loaded.model, before, earlier)
            prefix, rest = split(source)
            wanted = Wanted(images, text, tokenizer, batch, samples, length, seed)
            inputs = Inputs(None, "none: weights alone")
            if not weights_only:
                folder = Path(rest) if prefix == "hf" else None
                inputs = choose(loaded.model, folder, wanted)
            loaded.model.to(where)
            job = Job(source, loaded, inputs, options, own=batch is not None)
            report, before = job.run(methods, before)
        change = None if before is None else before.compare(report)
        written = [write(path, report, before) for path in outputs]
        if as_json:
            facts = report.to_dict()
            if change is not None:
                facts["comparison"] = change.to_dict()
            print(json.dumps(facts, indent=1, allow_nan=False))
        else:
            _show(report, change, written)
        if any(finding.severity == "error" for finding in report.findings):
            raise typer.Exit(1)


def _methods(names: Sequence[str]) -> list[Method]:
    """Those named by --method; Python's own message about a second one speaks of handles."""
    given: dict[type[Method], str] = {}
    methods = []
    for name in names:
        method = parse_method(name)
        first = given.get(type(method))
        if first is not None:
            raise DiagnosisError(
                f"--method {first} and --method {name} are both {type(method).__name__}, and a "
                "model takes one of a kind: leave one out. --compare shows one beside the "
                "report of the other."
            )
        given[type(method)] = name
        methods.append(method)
    return methods


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # each backend has its own way to say that it is not there
        raise DiagnosisError(f"--device {name}: this device cannot be used here") from error
    if device.type == "meta":
        raise DiagnosisError("--device meta: the model could not run there")
    return device


def _layers(text: str | None) -> list[int | str] | None:
    if text is None:
        return None
    found: list[int | str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        found += _range(part) or [int(part) if part.removeprefix("-").isdecimal() else part]
    return found


def _range(text: str) -> list[int]:
    """0-3 is 0, 1, 2, 3; anything else is nothing."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        return []
    return list(range(int(first), int(last) + 1))


def _heads(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [n for part in text.split(",") for n in _range(part) or [int(part)]]
    except ValueError:
        raise DiagnosisError(f"--heads takes numbers, as in 0,3 or 0-3, not '{text}'") from None
    if min(found) < 0:
        raise DiagnosisError(f"--heads takes numbers from 0, not '{text}'")
    return found


def _show(report: Report, change: Comparison | None, written: Sequence[Path]) -> None:
    for name in ("source", "weights", "input", "method"):
        if report.info[name] is not None:
            print(f"{name:8} {report.info[name]}")
    print(report.summary())
    if change is not None:
        print(f"\nBefore and after:\n{replace(change, gone=(), new=()).summary()}")
        for what, found in (("gone", change.gone), ("new", change.new)):
            _list(what, found)
    if written:
        print(f"Written: {', '.join(map(str, written))}")
    else:
        print("--out report.html writes all of it as a page to look at.")


def _list(what: str, findings: Sequence[Finding]) -> None:
    for finding in findings[:_LISTED]:
        print(f"{what}: {finding.message}")
    if len(findings) > _LISTED:
        print(f"{what}: {len(findings) - _LISTED} more")
