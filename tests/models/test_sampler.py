"""Which tokens may be drawn, how often, and that company changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contbatch.errors import ContbatchError, InvalidRequest
from contbatch.models.sampler import draw, sample, uniform
from contbatch.request import SamplingParams

DRAWS = 20_000


def _warm(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, **fields})


def _counts(scores: list[float], params: SamplingParams, draws: int = DRAWS) -> np.ndarray:
    row = np.array(scores, dtype=np.float64)
    return np.bincount([draw(row, params, position) for position in range(draws)], minlength=len(scores))


def _one(logits: torch.Tensor, params: SamplingParams, position: int = 9) -> int | Exception:
    return sample(logits[None], ["r"], [position], {"r": params})["r"]


SCORES = [0.0, 2.0, 1.0, 2.0, -1.0, -np.inf]


def test_greedy_takes_the_best_and_of_equals_the_lowest_id() -> None:
    """Also in 16 bits, where many scores are equal."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        logits = torch.tensor([SCORES, [5.0, 1, 1, 1, 5, 5], [1.0, 1, 1, 1, 1, 9]], dtype=dtype)
        greedy = SamplingParams()
        assert sample(logits, "abc", [0, 0, 0], dict.fromkeys("abc", greedy)) == {"a": 1, "b": 0, "c": 5}


def test_draws_follow_the_probabilities() -> None:
    """Frequencies of 20,000 draws are within five standard errors of softmax(scores / temperature)."""
    for temperature in (0.5, 1.0, 2.0):
        share = np.exp(np.array(SCORES) / temperature)
        share /= share.sum()
        counts = _counts(SCORES, _warm(temperature=temperature))
        assert np.all(np.abs(counts / DRAWS - share) <= 5 * np.sqrt(share * (1 - share) / DRAWS))
        assert counts[5] == 0


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3})])
def test_top_k_draws_only_the_k_best(top_k: int, allowed: set[int]) -> None:
    """Of equal scores the lowest ids belong to the best, so top_k=1 is greedy."""
    assert set(np.flatnonzero(_counts(SCORES, _warm(top_k=top_k)))) == allowed


# The probabilities are .5, .25, .15, .1.
NUCLEUS = np.log([0.15, 0.5, 0.1, 0.25]).tolist()


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [
        (1e-9, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.74, {1, 3}),
        (0.76, {0, 1, 3}),
        (0.91, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_draws_only_the_fewest_that_reach_it(top_p: float, allowed: set[int]) -> None:
    """At least one token is always left."""
    assert set(np.flatnonzero(_counts(NUCLEUS, _warm(top_p=top_p)))) == allowed


def test_top_p_counts_what_top_k_left() -> None:
    """After top_k=2 the shares are 2/3 and 1/3: 0.6 is reached by the first alone, though it has .5 of the whole."""
    assert set(np.flatnonzero(_counts(NUCLEUS, _warm(top_k=2, top_p=0.6)))) == {1}
    assert set(np.flatnonzero(_counts(NUCLEUS, _warm(top_k=2, top_p=0.7)))) == {1, 3}


def test_top_p_keeps_the_lowest_ids_of_equals() -> None:
    """Ten equal tokens and 0.35: the first four."""
    assert set(np.flatnonzero(_counts([1.0] * 10, _warm(top_p=0.35)))) == {0, 1, 2, 3}


def test_top_p_on_a_large_vocabulary_equals_a_full_sort() -> None:
    """Leaving out what cannot be kept changes nothing: the drawn ids are those of the plain definition."""
    scores = np.random.default_rng(0).normal(size=5000) * 2
    for top_p in (0.1, 0.5, 0.9, 0.999):
        weights = np.exp(scores - scores.max())
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        allowed = np.sort(order[: int((mass < top_p).sum()) + 1])
        borders = np.cumsum(weights[allowed])
        for position in range(200):
            expected = allowed[np.searchsorted(borders, uniform(3, position) * borders[-1], side="right")]
            assert draw(scores, _warm(top_p=top_p), position) == expected


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """The same again with the same two, others with another seed; positions are independent of each other."""
    row = np.zeros(1000)
    first, again, other = ([draw(row, _warm(seed=seed), p) for p in range(300)] for seed in (3, 3, 4))
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 10
    assert len(set(first)) > 200
    shifted = [draw(row, _warm(seed=4), p) for p in range(-1, 299)]
    assert sum(a == b for a, b in zip(first, shifted, strict=True)) < 10, "seed and position are not told apart"
    numbers = np.array([uniform(7, position) for position in range(DRAWS)])
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.015
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.04


def test_large_seeds_are_different_seeds() -> None:
    """Seeds are not cut to 32 or 64 bits."""
    assert len({uniform(seed, 0) for seed in (1, 1 + 2**32, 1 + 2**64, 1 + 2**200)}) == 4


def test_alone_equals_in_a_batch() -> None:
    """Row by row the same tokens, whoever the neighbours are and whatever they ask for."""
    chance = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 500, generator=chance) * 3
    choices = [
        SamplingParams(),
        _warm(),
        _warm(temperature=0.3, seed=99),
        _warm(top_k=5, seed=5),
        _warm(top_p=0.8, seed=6),
        _warm(temperature=1.7, top_k=50, top_p=0.9, seed=7),
    ]
    names = [str(row) for row in range(24)]
    params = {name: choices[row % len(choices)] for row, name in enumerate(names)}
    together = sample(logits, names, list(range(100, 124)), params)
    for row, name in enumerate(names):
        assert sample(logits[row : row + 1], [name], [100 + row], params) == {name: together[name]}
    backwards = sample(logits.flip(0), names[::-1], list(range(123, 99, -1)), params)
    assert backwards == together


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float, dtype: torch.dtype) -> None:
    """The best score is taken away before dividing, so that nothing grows beyond the number format."""
    logits = torch.tensor([-60000.0, 1, 3, 60000, 59000, -torch.inf], dtype=dtype)
    for params in (_warm(temperature=temperature), _warm(temperature=temperature, top_k=4, top_p=0.9)):
        assert _one(logits, params) == 3


@pytest.mark.filterwarnings("error")
def test_a_huge_temperature_is_uniform() -> None:
    """All finite scores become equally likely; a score of minus infinity stays impossible."""
    counts = _counts(SCORES, _warm(temperature=1e300), 5000)
    assert counts[5] == 0 and counts[:5].min() > 850


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_fails_alone(bad: float) -> None:
    """Its request gets an exception that names it; the other rows their tokens."""
    logits = torch.zeros(3, 8)
    logits[:, 4] = 1.0
    logits[1, 6] = bad
    for params in (SamplingParams(), _warm(top_k=1)):
        answers = sample(logits, "abc", [7, 7, 7], dict.fromkeys("abc", params))
        assert (answers["a"], answers["c"]) == (4, 4)
        error = answers["b"]
        assert isinstance(error, ContbatchError) and "'b'" in str(error) and "position 7" in str(error)


def test_a_row_without_any_finite_score_fails() -> None:
    """All minus infinity: there is nothing to choose."""
    assert isinstance(_one(torch.full((5,), -torch.inf), _warm()), ContbatchError)


@pytest.mark.parametrize(("field", "value"), [("temperature", float("nan")), ("temperature", -1.0), ("seed", None)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_value_that_got_past_validation_fails_alone(field: str, value: object) -> None:
    """A bad sampling value never takes the batch down with it."""
    params = _warm()
    object.__setattr__(params, field, value)
    logits = torch.tensor([[0.0, 2000.0, 1.0]] * 2)
    answers = sample(logits, ["bad", "good"], [1, 1], {"bad": params, "good": SamplingParams()})
    assert isinstance(answers["bad"], InvalidRequest) and "'bad'" in str(answers["bad"])
    assert answers["good"] == 1
