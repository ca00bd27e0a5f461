"""The command `beams`: its client's search is a beam search, and both systems find the same answers."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.loadtest.studies import beams
from quire.loadtest.studies.beams import TOKEN, Beam, survivors


def test_survivors_are_the_best_of_all_continuations() -> None:
    rng = random.Random(7)
    kept = [Beam((beam,), -rng.random()) for beam in range(3)]
    likeliest = [{f"{TOKEN}{token}": -rng.expovariate(1) for token in rng.sample(range(50), 6)} for _ in kept]
    every = [
        (beam.score + logprob, (*beam.tokens, int(token.removeprefix(TOKEN))))
        for beam, candidates in zip(kept, likeliest, strict=True)
        for token, logprob in candidates.items()
    ]
    wanted = sorted(every, reverse=True)[:3]
    assert [(beam.score, beam.tokens) for beam in survivors(kept, likeliest, 3)] == wanted


def test_widths_are_read_and_checked() -> None:
    parser = argparse.ArgumentParser()
    beams.add_arguments(parser)
    assert parser.parse_args(["--widths", "4:64,50:10"]).widths == [(4, 64), (50, 10)]
    for wrong in ("4", "a:b", "0:3", "4:64:2", ""):
        with pytest.raises(SystemExit):
            parser.parse_args(["--widths", wrong])


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
def test_all_systems_search_alike(checkpoint: Callable[[str], Path]) -> None:
    parser = argparse.ArgumentParser()
    beams.add_arguments(parser)
    words = [str(checkpoint("llama")), "--requests=3", "--rounds=1", "--kv-blocks=200", "--dtype=float32"]
    args = parser.parse_args([*words, "--widths=3:5,2:4"])
    row, second = beams.measure(args, args.model)
    assert (row["width"], row["tokens"], second["width"], second["tokens"]) == (3, 5, 2, 4)
    assert second["same"] == {"resubmission": 1.0, "transformers": 1.0}
    assert row["same"] == {"resubmission": 1.0, "transformers": 1.0}
    assert row["score"]["quire"] == pytest.approx(row["score"]["resubmission"], abs=1e-3)
    for name, ratio in row["times_as_fast_as"].items():
        assert ratio == pytest.approx(row["seconds"][name] / row["seconds"]["quire"])
