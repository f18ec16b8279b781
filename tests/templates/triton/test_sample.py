"""The sampling kernel in Triton's interpreter against NumPy: noise, filters, distributions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.runtime.kernel import Workspace, recording
from octavo.runtime.philox import philox4x32
from tests.rendered_kernel import rendered
from tests.tolerances import NUCLEUS_MASS, SAMPLE_SCORE

VOCAB_SIZES = (1, 7, 256, 1000, 32003)
Floats = NDArray[np.float64]


@pytest.fixture
def workspace() -> Workspace:
    return workspace_on(torch.get_default_device())


@cache
def workspace_on(device: torch.device) -> Workspace:
    made = Workspace.allocate(device)
    made.scratch[: 2**20] = torch.nan
    return made


@pytest.fixture(scope="module")
def modules() -> dict[int, Any]:
    made = {size: rendered("sample", {"vocab_size": size}) for size in (5000, *VOCAB_SIZES)}
    return made | {6: small(6), 7: small(7)}


def small(vocab_size: int) -> Any:
    """With blocks that do not keep the interpreter busy for nothing."""
    module = rendered("sample", {"vocab_size": vocab_size})
    module.BLOCK = 64
    return chosen(module, BLOCK=64, TILES=1)


def chosen(module: Any, **choice: Any) -> Any:
    """Have it run so, whatever the number of rows."""
    for bucket in module.CHOICES.buckets:
        bucket.chosen = choice
    return module


def array(values: Tensor) -> Floats:
    return values.double().cpu().numpy()


class Rows:
    """Parameters of rows: the same for all, or a list."""

    def __init__(self, count: int, **given: Any) -> None:
        def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
            value = given.get(name, neutral)
            values = list(value) if isinstance(value, list | range) else [value] * count
            return torch.tensor(values, dtype=dtype)

        self.temperature = column("temperature", 1.0, torch.float32)
        self.top_k = column("top_k", 0, torch.int32)
        self.top_p = column("top_p", 1.0, torch.float32)
        self.min_p = column("min_p", 0.0, torch.float32)
        self.seed = column("seed", 1, torch.int64)
        self.stream = column("stream", 0, torch.int64)
        self.position = column("position", 0, torch.int64)

    def of(self, index: list[int]) -> Rows:
        picked = Rows(0)
        for name, values in vars(self).items():
            setattr(picked, name, values[index])
        return picked


def drawn(
    module: Any, workspace: Workspace, logits: Tensor, rows: Rows, *, has_filters: bool = True
) -> tuple[list[int], list[int]]:
    """Tokens and faults; the counters are zero again."""
    count = len(logits)
    out = torch.full((count,), -1, dtype=torch.int64)
    fault = torch.full((count,), -1, dtype=torch.int32)
    result = module.run(
        logits, *vars(rows).values(), out=out, fault=fault, has_filters=has_filters,
        workspace=workspace,
    )  # fmt: skip
    assert result is out
    assert not workspace.counters.any()
    return out.tolist(), fault.tolist()


def tokens(*args: Any, **keywords: Any) -> list[int]:
    found, faults = drawn(*args, **keywords)
    assert not any(faults)
    return found


def noise(vocab_size: int, seed: int, stream: int, position: int) -> Floats:
    """Gumbel variables in float64 from the contract's counters."""
    quads = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    seed, stream = seed % 2**64, stream % 2**64
    words = [position, stream % 2**32, stream >> 32]
    counter = np.stack([quads, *(np.full_like(quads, word) for word in words)])
    key = np.array([[seed % 2**32], [seed >> 32]], dtype=np.uint64)
    bits = philox4x32(counter, np.broadcast_to(key, (2, len(quads))))
    uniform = (bits.T.reshape(-1)[:vocab_size].astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-uniform))


def kept(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.bool_]:
    """Which tokens of one row the filters leave, by sorting."""
    scaled = logits / temperature
    stays = np.ones(len(scaled), dtype=bool)
    if min_p > 0.0:
        stays &= scaled >= scaled.max() + np.log(min_p)
    if 0 < top_k < len(scaled):
        stays &= scaled >= np.sort(scaled)[-top_k]
    if top_p < 1.0:
        order = np.sort(scaled[stays])[::-1]
        mass = np.exp(order - order[0])
        last = np.searchsorted(np.cumsum(mass), top_p * mass.sum())
        stays &= scaled >= order[min(last, len(order) - 1)]
    return stays


def assert_best_scores(
    logits: Tensor, rows: Rows, found: list[int], thresholds: Floats | None = None
) -> None:
    """Each token has the best score of its row, as far as float32 can tell."""
    for i, token in enumerate(found):
        values = array(logits[i])
        temperature = rows.temperature[i].item()
        score = values.copy()
        if temperature > 0.0:
            key = (rows.seed[i].item(), rows.stream[i].item(), rows.position[i].item())
            score += temperature * noise(len(values), *map(int, key))
        if thresholds is not None:
            score[values < thresholds[i]] = -np.inf
        scale = max(1.0, np.abs(values).max(), temperature)
        assert score[token] >= score.max() - SAMPLE_SCORE * scale


def limits_of(rows: Rows, i: int) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p and min_p of a row."""
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    temperature, top_k, top_p, min_p = (column[i].item() for column in columns)
    return temperature, int(top_k), top_p, min_p


def normal(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed * 7919 + rows + vocab_size)
    drawn = torch.randn(rows, vocab_size, generator=generator, device="cpu") * spread
    return drawn.to(torch.get_default_device())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("count", [1, 5, 33])
def test_the_best_score_wins(
    modules: dict[int, Any], workspace: Workspace, vocab_size: int, count: int
) -> None:
    if count > 5 and vocab_size > 1000:
        pytest.skip("the interpreter would take half a minute; the split is tested at 5,000")
    logits = normal(count, vocab_size)
    rows = Rows(
        count,
        temperature=[(0.0, 1.0, 0.3, 1e-4, 50.0)[i % 5] for i in range(count)],
        seed=[(i % 7 - 3) * 2**61 + i for i in range(count)],
        stream=[i * 2**31 - 7 for i in range(count)],
        position=[i * 1001 for i in range(count)],
    )
    found = tokens(modules[vocab_size], workspace, logits, rows, has_filters=False)
    assert_best_scores(logits, rows, found)
    greedy = [i for i in range(count) if rows.temperature[i] == 0.0]
    assert [found[i] for i in greedy] == logits[greedy].argmax(-1).tolist()


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 200, "min_p": 0.01, "top_p": 0.95},
    {"top_p": 0.8, "temperature": 0.2},
    {"top_p": 0.8, "temperature": 4.0},
    {"top_k": 3, "temperature": 1e-4},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.5, "temperature": 0.0},
    {},
]
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def filtered_rows(count: int, **keywords: Any) -> Rows:
    """One kind of filter after the other; seeds and positions differ."""
    kinds = [NEUTRAL | FILTERS[i % len(FILTERS)] for i in range(count)]
    columns: dict[str, Any] = {name: [kind[name] for kind in kinds] for name in NEUTRAL}
    return Rows(count, **(columns | {"seed": range(count), "position": range(count)} | keywords))


# All but equal logits fill every list of the search, far apart ones none.
@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [(7, 3.0), (256, 1.0), (1000, 3.0), (32003, 0.0), (32003, 1e-3), (32003, 3.0), (32003, 30.0)],
)
def test_what_filters_keep(
    modules: dict[int, Any], workspace: Workspace, vocab_size: int, spread: float
) -> None:
    module, count = modules[vocab_size], len(FILTERS)
    logits, rows = normal(count, vocab_size, spread=spread) + 5.0, filtered_rows(count)
    found = tokens(module, workspace, logits, rows)
    thresholds = array(workspace.scratch[module.STAGED :][:count])
    assert_best_scores(logits, rows, found, thresholds)
    for i in range(count):
        values, stays = array(logits[i]), array(logits[i]) >= thresholds[i]
        temperature, top_k, top_p, min_p = limits_of(rows, i)
        if temperature == 0.0:
            assert stays.all()
            continue
        narrow = kept(values, temperature, top_k, top_p - NUCLEUS_MASS * (top_p < 1.0), min_p)
        wide = kept(values, temperature, top_k, min(1.0, top_p + NUCLEUS_MASS), min_p)
        assert not (narrow & ~stays).any(), FILTERS[i]
        assert not (stays & ~wide).any(), FILTERS[i]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
def test_top_k_counts_exactly_and_keeps_ties(
    modules: dict[int, Any], workspace: Workspace, k: int
) -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 2.0, 1.0, -0.0, -5.0])
    # 2, 2, 1, 0, 0, -1, -5
    expected = [{1, 3}, {1, 3}, {1, 3, 4}, {0, 1, 3, 4, 5}, {0, 1, 3, 4, 5}, {0, 1, 2, 3, 4, 5}]
    count = 30
    rows = Rows(count, temperature=20.0, top_k=k, position=range(count))
    found = set(tokens(modules[7], workspace, logits.expand(count, -1).contiguous(), rows))
    assert found == (expected[k - 1] if k < 7 else set(range(7)))


PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({}, PROBABILITIES),
    ({"temperature": 0.5}, [p**2 for p in PROBABILITIES]),
    ({"temperature": 2.0}, [p**0.5 for p in PROBABILITIES]),
    ({"top_k": 2}, [0.4, 0.25, 0, 0, 0, 0]),
    ({"top_p": 0.7}, [0.4, 0.25, 0.15, 0, 0, 0]),
    ({"top_p": 0.39}, [1, 0, 0, 0, 0, 0]),
    ({"min_p": 0.3}, [0.4, 0.25, 0.15, 0, 0, 0]),
    # What is left of each filter is what the next one sees: 0.4 of the remaining 0.8 is half.
    ({"top_k": 3, "top_p": 0.45}, [1, 0, 0, 0, 0, 0]),
    ({"min_p": 0.3, "top_p": 0.6}, [0.4, 0.25, 0, 0, 0, 0]),
    # The temperature comes first: squared, the best has 0.16 of 0.2702, 59 %.
    ({"temperature": 0.5, "top_p": 0.55}, [1, 0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("params", "weights"), CASES, ids=str)
def test_frequencies_are_the_distribution(
    modules: dict[int, Any], workspace: Workspace, params: dict[str, Any], weights: list[float]
) -> None:
    has_filters = not params.keys() <= {"temperature"}
    assert_frequencies(modules[6], workspace, weights, 50 if has_filters else 500, params)


@pytest.mark.parametrize("by", ["seed", "stream"])
def test_frequencies_over_seeds_and_streams(
    modules: dict[int, Any], workspace: Workspace, by: str
) -> None:
    params = {by: range(500), "position": 3}
    assert_frequencies(modules[6], workspace, PROBABILITIES, 500, params)


def assert_frequencies(
    module: Any, workspace: Workspace, weights: list[float], count: int, params: dict[str, Any]
) -> None:
    logits = torch.tensor(PROBABILITIES).log().expand(count, -1).contiguous()
    rows = Rows(count, **({"position": range(count)} | params))
    has_filters = bool({"top_k", "top_p", "min_p"} & params.keys())
    found = tokens(module, workspace, logits, rows, has_filters=has_filters)
    expected = count * np.array(weights) / sum(weights)
    counts = np.bincount(found, minlength=6)
    assert not counts[expected == 0].any()
    is_kept = expected > 0
    chi_square = ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum()
    # Passed by chance once in ten thousand at 5 degrees of freedom, the most there are here.
    assert chi_square < 25.7


def test_the_noise_of_many_tokens_is_uniform(modules: dict[int, Any], workspace: Workspace) -> None:
    """Equal logits: each twentieth of the vocabulary is chosen as often, and each id modulo 4."""
    count = 300
    rows = Rows(count, seed=range(count))
    found = np.array(
        tokens(modules[5000], workspace, torch.zeros(count, 5000), rows, has_filters=False)
    )
    for counts in (np.bincount(found // 250, minlength=20), np.bincount(found % 4, minlength=4)):
        expected = count / len(counts)
        # 19 degrees of freedom: 50.8 is passed by chance once in ten thousand.
        assert ((counts - expected) ** 2 / expected).sum() < 50.8


def test_a_row_gets_the_same_token_in_any_company(
    modules: dict[int, Any], workspace: Workspace
) -> None:
    """Alone, with three and with 39 others: each has its own number of splits."""
    module, count = modules[5000], 40
    logits, rows = normal(count, 5000), filtered_rows(count)
    together = tokens(module, workspace, logits, rows)
    for start in range(0, count, 10):
        index = list(range(start, start + 4))
        assert tokens(module, workspace, logits[index], rows.of(index)) == together[start:][:4]
        assert tokens(module, workspace, logits[start:][:1], rows.of([start])) == [together[start]]
    order = np.random.default_rng(1).permutation(count).tolist()
    shuffled = tokens(module, workspace, logits[order], rows.of(order))
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("choice", [(1024, 1), (1024, 5), (2048, 2), (4096, 1), (8192, 8)])
def test_a_row_gets_the_same_token_however_it_is_split(
    workspace: Workspace, modules: dict[int, Any], choice: tuple[int, int]
) -> None:
    module = rendered("sample", {"vocab_size": 5000})
    other = chosen(module, BLOCK=choice[0], TILES=choice[1])
    logits, rows = normal(7, 5000), Rows(7, position=range(7))
    want = tokens(modules[5000], workspace, logits, rows)
    assert tokens(other, workspace, logits, rows) == want


def test_a_row_without_filters_is_drawn_as_in_an_unfiltered_batch(
    modules: dict[int, Any], workspace: Workspace
) -> None:
    logits, rows = normal(9, 1000), Rows(9, temperature=[0.0, 1.0, 0.5] * 3, position=range(9))
    plain = tokens(modules[1000], workspace, logits, rows, has_filters=False)
    rows.top_k[4] = 1
    filtered = tokens(modules[1000], workspace, logits, rows)
    assert filtered == [*plain[:4], logits[4].argmax().item(), *plain[5:]]


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_of_equal_logits_greedy_takes_the_first(workspace: Workspace, tiles: int) -> None:
    """Of equal ones in other programs, in one tile, and in one lane of several tiles."""
    module = chosen(rendered("sample", {"vocab_size": 5000}), BLOCK=1024, TILES=tiles)
    logits = torch.full((5, 5000), -3.0)
    logits[0, [17, 1500, 4999]] = 2.0
    logits[1, [1024, 1023]] = 2.0
    logits[2, 3] = 0.0
    logits[2, 2] = -0.0
    logits[4, [40, 1024 + 40, 3072 + 40]] = 2.0
    found = tokens(module, workspace, logits, Rows(5, temperature=0.0), has_filters=False)
    assert found == [17, 1023, 2, 0, 40]


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_that_is_not_finite_fails_alone(
    modules: dict[int, Any],
    workspace: Workspace,
    bad: float,
    temperature: float,
    has_filters: bool,
) -> None:
    logits = normal(5, 1000)
    rows = Rows(5, temperature=temperature, top_p=0.9 if has_filters else 1.0)
    want = tokens(modules[1000], workspace, logits, rows, has_filters=has_filters)
    logits[1, 999] = bad
    logits[3] = -torch.inf
    found, faults = drawn(modules[1000], workspace, logits, rows, has_filters=has_filters)
    assert faults == [0, 1, 0, 1, 0]
    assert [found[i] for i in (0, 2, 4)] == [want[i] for i in (0, 2, 4)]
    assert all(0 <= token < 1000 for token in found)


def test_banned_tokens_are_never_drawn(modules: dict[int, Any], workspace: Workspace) -> None:
    logits = torch.full((20, 7), -torch.inf)
    logits[:, [2, 5]] = 0.0
    for params in ({}, {"top_k": 4}, {"top_p": 0.99}, {"temperature": 1e30}):
        rows = Rows(20, position=range(20), **params)
        assert set(tokens(modules[7], workspace, logits, rows)) == {2, 5}


def test_the_largest_temperature_is_flat(modules: dict[int, Any], workspace: Workspace) -> None:
    rows = Rows(60, temperature=3e38, position=range(60))
    logits = normal(60, 7)
    assert set(tokens(modules[7], workspace, logits, rows, has_filters=False)) == set(range(7))


def test_rows_may_lie_apart(modules: dict[int, Any], workspace: Workspace) -> None:
    wide = normal(3, 1024)
    rows = Rows(3, position=range(3), top_k=9)
    want = tokens(modules[1000], workspace, wide[:, :1000].contiguous(), rows)
    assert tokens(modules[1000], workspace, wide[:, :1000], rows) == want


def test_the_compiler_sees_all_launches(modules: dict[int, Any]) -> None:
    with recording() as launches:
        modules[1000].record(3, torch.device("meta"))
    names = [(launch.kernel.name, launch.constants.get("FILTERED")) for launch in launches]
    assert names == [("draw", False), ("find_threshold", None), ("draw", True)]
