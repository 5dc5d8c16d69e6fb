"Greedy MAP: every method against independent references, on random and on awkward pools."

import itertools
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from harmomoe.base.engine import Local, Processes
from harmomoe.describe.dpp import (
    METHODS,
    brute_force,
    greedy_map,
    greedy_map_partitioned,
    log_det,
    residual_floor,
    unit_rows,
    weighted_kernel,
)
from harmomoe.describe.greedy import bounds

EVERY = [*METHODS, "auto"]


def quiet(*args, **kwargs):
    "greedy_map where a short result is expected."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return greedy_map(*args, **kwargs)


def strict_greedy(features, relevance, m):
    """Greedy on the float64 weighted kernel by slogdet, candidate after candidate, the first
    maximum wins."""
    kernel, chosen, gains, before = weighted_kernel(features, relevance), [], [], 0.0
    for _ in range(m):
        value = np.full(len(kernel), -np.inf)
        for item in set(range(len(kernel))) - set(chosen):
            value[item] = log_det(kernel[np.ix_(chosen + [item], chosen + [item])])
        chosen.append(int(value.argmax()))
        gains.append(value.max() - before)
        before = value.max()
    return chosen, gains


def exact_det(matrix):
    "Determinant of a matrix of Fractions, by elimination."
    matrix, result = [row[:] for row in matrix], Fraction(1)
    for k in range(len(matrix)):
        pivot = next((i for i in range(k, len(matrix)) if matrix[i][k]), None)
        if pivot is None:
            return Fraction(0)
        if pivot != k:
            matrix[k], matrix[pivot], result = matrix[pivot], matrix[k], -result
        result *= matrix[k][k]
        for i in range(k + 1, len(matrix)):
            factor = matrix[i][k] / matrix[k][k]
            matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[k])]
    return result


def exact_greedy(features, relevance, m):
    """Greedy in rational arithmetic, with exact ties, for integer features and rational
    relevance.

    det of the cosine kernel is det of the integer Gram matrix over the product of its diagonal,
    so no root is needed."""
    gram = [[Fraction(int(a @ b)) for b in features] for a in features]
    weight = [Fraction(r) ** 2 / gram[i][i] for i, r in enumerate(relevance)]
    chosen = []
    while len(chosen) < m:
        value = [
            weight[i] * exact_det([[gram[a][b] for b in chosen + [i]] for a in chosen + [i]])
            if i not in chosen
            else Fraction(0)
            for i in range(len(features))
        ]
        if max(value) == 0:
            break
        chosen.append(value.index(max(value)))
    return chosen


@pytest.mark.parametrize("method", EVERY)
def test_equals_strict_greedy_on_generic_pools(method):
    for random_state in range(12):
        rng = np.random.default_rng(random_state)
        n, d = int(rng.integers(8, 40)), int(rng.integers(4, 30))
        m = int(rng.integers(1, min(n, d) + 1))
        features, relevance = rng.standard_normal((n, d)), rng.uniform(0.05, 1, n)
        items, gains = greedy_map(features, relevance, m, method)
        expected, expected_gains = strict_greedy(features, relevance, m)
        assert items.tolist() == expected
        np.testing.assert_allclose(gains, expected_gains, rtol=0, atol=1e-8)
        assert items.dtype == np.int64 and gains.dtype == np.float64


@pytest.mark.parametrize("method", EVERY)
def test_ties_duplicates_zeros_and_rank_against_exact_arithmetic(method):
    """Small integers and three values of relevance: nearly every step has exact ties, and most
    pools run out of rank."""
    short = 0
    for random_state in range(30):
        rng = np.random.default_rng(random_state)
        n, d = int(rng.integers(4, 14)), int(rng.integers(1, 6))
        features = rng.integers(-1, 2, (n, d))
        features[~features.any(axis=1), 0] = 1
        copies = features[rng.permutation(n)[: n // 2]]
        features = np.concatenate([features, copies])
        relevance = [Fraction(int(k), 2) for k in rng.integers(0, 3, len(features))]
        if not any(relevance):
            continue
        expected = exact_greedy(features, relevance, len(features))
        items, gains = quiet(features, [float(r) for r in relevance], len(features), method)
        assert items.tolist() == expected, random_state
        assert np.isfinite(gains).all()
        short += len(expected) < len(features)
    assert short > 20


@pytest.mark.parametrize("method", ["kernel", "features", "lazy"])
def test_steep_spectrum_against_extended_precision(method):
    """Residuals fall from 1 to the floor, as they do on real embeddings; the reference is
    Gram-Schmidt in long double."""
    for random_state in range(3):
        rng = np.random.default_rng(random_state)
        steep = rng.standard_normal((300, 48)) * np.logspace(0, -4.5, 48)
        features = steep @ rng.standard_normal((48, 48))
        relevance = rng.beta(2, 1, 300)
        unit = features.astype(np.longdouble)
        unit /= np.sqrt((unit**2).sum(axis=1, keepdims=True))
        residual, basis = np.ones(300, np.longdouble), np.zeros((48, 48), np.longdouble)
        expected = []
        while (residual > residual_floor(0)).any():
            item = int(np.where(residual > residual_floor(0), relevance**2 * residual, 0).argmax())
            direction = unit[item]
            for _ in range(2):
                direction = direction - (basis @ direction) @ basis
            basis[len(expected)] = direction / np.sqrt(direction @ direction)
            residual = residual - (unit @ basis[len(expected)]) ** 2
            expected.append(item)
            residual[expected] = 0
        items, _ = quiet(features, relevance, 48, method)
        assert 35 < len(expected) < 48 and items.tolist() == expected


def test_methods_agree_on_large_tied_pools():
    for random_state in range(5):
        rng = np.random.default_rng(random_state)
        half = rng.standard_normal((150, 20)) @ rng.standard_normal((20, 48))  # rank 20
        longer = half * rng.uniform(0.1, 10, (150, 1))
        features = np.concatenate([half, longer, rng.standard_normal((20, 48))])
        relevance = rng.choice([0, 0.25, 0.5, 1.0], len(features))
        first, *others = [quiet(features, relevance, 60, method) for method in METHODS]
        for items, gains in others:
            assert np.array_equal(items, first[0])
            np.testing.assert_allclose(gains, first[1], rtol=0, atol=1e-8)
        assert len(set(first[0])) == len(first[0]) < 60 and relevance[first[0]].all()


@pytest.mark.parametrize("method", EVERY)
def test_gains_fall_and_sum_to_log_det(method):
    rng = np.random.default_rng(0)
    features, relevance = rng.standard_normal((80, 40)), rng.uniform(0.1, 1, 80)
    items, gains = greedy_map(features, relevance, 30, method)
    assert (np.diff(gains) <= 1e-10).all()
    block = weighted_kernel(features, relevance)[np.ix_(items, items)]
    assert abs(gains.sum() - log_det(block)) < 1e-9
    shorter, _ = greedy_map(features, relevance, 11, method)
    assert np.array_equal(shorter, items[:11])  # m only says when to stop


@pytest.mark.parametrize("method", EVERY)
def test_m_equals_n_is_a_permutation(method):
    rng = np.random.default_rng(3)
    items, gains = greedy_map(rng.standard_normal((12, 20)), rng.uniform(0.1, 1, 12), 12, method)
    assert sorted(items) == list(range(12)) and np.isfinite(gains).all()


@pytest.mark.parametrize("method", EVERY)
def test_all_equal_items_give_the_first_and_one_warning(method):
    message = "stopped after 1 of m=3 items.*0 have relevance 0 and 5 lie in the span"
    with pytest.warns(UserWarning, match=message) as caught:
        items, gains = greedy_map(np.ones((6, 4)), np.full(6, 0.5), 3, method)
    assert items.tolist() == [0] and gains == pytest.approx([2 * np.log(0.5)]) and len(caught) == 1
    assert caught[0].filename == __file__  # it names the line that asked for too many


@pytest.mark.parametrize("method", EVERY)
def test_orthogonal_items_come_in_order_of_relevance_then_index(method):
    relevance = np.array([0.5, 0.9, 0.5, 0.9, 1.0])
    assert greedy_map(np.eye(5), relevance, 5, method)[0].tolist() == [4, 1, 3, 0, 2]
    assert greedy_map(np.eye(5), None, 3, method)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("method", EVERY)
def test_zero_relevance_is_never_picked(method):
    rng = np.random.default_rng(1)
    # 1e-200 squared underflows to 0, and is not 0
    relevance = np.array([0, 0.3, 0, 1e-200, 0.9, 0])
    with pytest.warns(UserWarning, match="stopped after 3 of m=5"):
        items, gains = greedy_map(rng.standard_normal((6, 10)), relevance, 5, method)
    assert items[-1] == 3 and set(items) == {1, 3, 4} and np.isfinite(gains).all()


@pytest.mark.parametrize("method", EVERY)
def test_one_column_of_features_allows_one_pick(method):
    items, gains = quiet(np.array([[2.0], [-5.0], [0.1]]), np.array([0.2, 0.7, 0.7]), 2, method)
    assert items.tolist() == [1] and gains == pytest.approx([2 * np.log(0.7)])


def test_scale_of_features_and_relevance_does_not_matter():
    rng = np.random.default_rng(5)
    features, relevance = rng.standard_normal((40, 16)), rng.uniform(0.1, 1, 40)
    items, gains = greedy_map(features, relevance, 12)
    scaled = features * 10.0 ** rng.uniform(-200, 200, (40, 1))
    # relevance above 1 is fine for a kernel
    other, other_gains = greedy_map(scaled, relevance * 1e3, 12)
    assert np.array_equal(items, other)
    np.testing.assert_allclose(other_gains - gains, 2 * np.log(1e3), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_other_numpy_types(dtype):
    rng = np.random.default_rng(6)
    features = (10 * rng.standard_normal((50, 24))).round().astype(dtype)
    relevance = rng.uniform(0.1, 1, 50).astype(np.float32)
    items, _ = greedy_map(features, relevance, 20)
    expected, _ = greedy_map(features.astype(float), relevance.astype(float), 20, "naive")
    assert np.array_equal(items, expected)
    assert features.dtype == dtype  # and the input is left alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_torch_input(dtype):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 24, generator=generator).to(dtype).requires_grad_()
    relevance = torch.rand(50, generator=generator).requires_grad_()
    before = features.detach().clone()
    items, gains = greedy_map(features, relevance, 20)
    same = (x.detach().double().numpy() for x in (features, relevance))
    expected, expected_gains = greedy_map(*same, 20, "naive")
    assert isinstance(items, np.ndarray) and np.array_equal(items, expected)
    np.testing.assert_allclose(gains, expected_gains, rtol=0, atol=1e-9)
    assert torch.equal(features.detach(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_input():
    features, relevance = torch.randn(50, 24).cuda(), torch.rand(50).cuda()
    for method in ("auto", "lazy"):
        there, _ = greedy_map(features, relevance, 20, method)
        here, _ = greedy_map(features.cpu(), relevance.cpu(), 20, method)
        assert np.array_equal(there, here)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["kernel", "features", "lazy"])
def test_rank_is_found_in_every_stored_type(dtype, method):
    for random_state in range(4):
        rng = np.random.default_rng(random_state)
        low_rank = rng.standard_normal((300, 30)) @ rng.standard_normal((30, 96))
        low_rank = torch.from_numpy(low_rank).to(dtype)
        items, _ = quiet(low_rank, rng.uniform(0.3, 1, 300), 80, method)
        assert len(items) == 30 == len(set(items))


def test_brute_force_is_the_maximum_and_greedy_never_beats_it():
    for random_state in range(5):
        rng = np.random.default_rng(random_state)
        features, relevance = rng.standard_normal((9, 5)), rng.uniform(0.1, 1, 9)
        kernel = weighted_kernel(features, relevance)
        items, value = brute_force(features, relevance, 3)
        subsets = itertools.combinations(range(9), 3)
        everything = {s: np.linalg.det(kernel[np.ix_(s, s)]) for s in subsets}
        assert tuple(items) == max(everything, key=everything.get)
        assert np.exp(value) == pytest.approx(max(everything.values()), rel=1e-10)
        assert greedy_map(features, relevance, 3)[1].sum() <= value + 1e-10
    assert brute_force(np.eye(5), None, 2)[0].tolist() == [0, 1]  # a tie: first in dictionary order
    assert brute_force(np.ones((3, 2)), None, 2)[1] < -30  # every pair is singular
    with pytest.raises(ValueError, match="use greedy_map"):
        brute_force(np.eye(40), None, 20)


def test_kernel_diagonal_symmetry_and_floor():
    rng = np.random.default_rng(2)
    features, relevance = rng.standard_normal((30, 7)).astype(np.float32), rng.uniform(0, 1, 30)
    kernel = weighted_kernel(features, relevance)
    assert np.array_equal(np.diag(kernel), relevance**2) and np.array_equal(kernel, kernel.T)
    single, half = np.finfo(np.float32).eps, np.finfo(np.float16).eps
    assert residual_floor(0.0) == residual_floor(single) < residual_floor(half)
    assert unit_rows(torch.ones(2, 2, dtype=torch.bfloat16))[1] == torch.finfo(torch.bfloat16).eps


GOOD = dict(features=np.eye(4), relevance=np.ones(4), m=2)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(features=np.ones(4)), ValueError, r"\[n, d\] matrix, got shape \(4,\)"),
        (dict(features=np.ones((4, 0))), ValueError, "non-empty"),
        (dict(features=np.ones((2, 2, 2))), ValueError, "matrix"),
        (dict(features=np.diag([1.0, 1, np.nan, 1])), ValueError, "row 2 holds NaN or infinity"),
        (dict(features=np.diag([1.0, -np.inf, 1, 1])), ValueError, "row 1 holds NaN or infinity"),
        (dict(features=np.diag([1.0, 1, 1, 0])), ValueError, "row 3 is all zeros"),
        (dict(features=np.array([["a"]] * 4)), TypeError, "real numbers"),
        (dict(features=np.eye(4) * 1j), TypeError, "real numbers"),
        (dict(features=torch.eye(4) * 1j), TypeError, "real numbers"),
        (dict(relevance=np.ones(3)), ValueError, r"shape \(4,\), got \(3,\)"),
        (dict(relevance=np.ones((4, 1))), ValueError, r"shape \(4,\), got \(4, 1\)"),
        (dict(relevance=np.array([1, 1, np.nan, 1])), ValueError, "item 2 has nan"),
        (dict(relevance=np.array([1, np.inf, 1, 1])), ValueError, "item 1 has inf"),
        (dict(relevance=np.array([1, 1, 1, -0.5])), ValueError, "item 3 has -0.5"),
        (dict(relevance=np.zeros(4)), ValueError, "nothing to choose"),
        (dict(m=5), ValueError, "m=5"),
        (dict(m=0), ValueError, "m=0"),
        (dict(m=-1), ValueError, "m=-1"),
        (dict(m=2.0), TypeError, "whole number"),
        (dict(m="2"), TypeError, "whole number"),
        (dict(method="fastest"), ValueError, "'auto' or one of"),
    ],
)
def test_bad_input_is_one_clear_error(change, error, message):
    with pytest.raises(error, match=message):
        greedy_map(**{**GOOD, **change})


@pytest.fixture
def few_hot(monkeypatch):
    """So few hot rows, and such small tiles, that pools of a test need many rounds, tiles and
    chunks."""
    for name, value in dict(HOT=4, MOST=16, CHUNK=3, TILE=8, BLOCK=16).items():
        monkeypatch.setattr(bounds, name, value)


def test_lazy_equals_naive_in_many_small_pools(few_hot):
    """Generic, repeated, tied and rank-deficient pools, stored in every type, relevance from
    1e-200 to 1e150."""
    for random_state in range(60):
        rng = np.random.default_rng(random_state)
        n, d = int(rng.integers(5, 90)), int(rng.integers(1, 24))
        features = rng.standard_normal((n, d))
        if random_state % 3 == 1:
            features = features[rng.integers(0, n, n)] * rng.uniform(0.1, 9, (n, 1))
        if random_state % 3 == 2:
            features = rng.standard_normal((n, 3)) @ rng.standard_normal((3, d))
        types = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
        dtype = types[random_state % 4]
        features = torch.from_numpy(features).to(dtype)
        relevance = [
            rng.uniform(0, 1, n),
            rng.choice([0.0, 0.5, 1.0], n),
            np.ones(n),
            10 ** rng.uniform(-200, 150, n),
        ][random_state // 4 % 4]
        relevance[0] = max(relevance[0], 1e-3)
        m = int(rng.integers(1, n + 1))
        items, gains = quiet(features, relevance, m, "lazy")
        expected, expected_gains = quiet(features, relevance, m, "naive")
        assert np.array_equal(items, expected), random_state
        np.testing.assert_allclose(gains, expected_gains, rtol=1e-12, atol=1e-6)
        assert len(set(items)) == len(items)


@pytest.mark.parametrize("clusters", [0, 60])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_lazy_equals_features_on_larger_pools(clusters, dtype):
    rng = np.random.default_rng(clusters)
    features, relevance = rng.standard_normal((12_000, 64)), np.ones(12_000)
    if clusters:
        centres = rng.standard_normal((clusters, 64))
        features = 0.5 * features + centres[rng.integers(0, clusters, 12_000)]
        features[7_000:9_000] = features[:2_000]  # exact copies
        relevance = rng.beta(1, 4, 12_000)
        relevance[7_000:9_000] = relevance[:2_000]
    features = features.astype(dtype)
    items, gains = greedy_map(features, relevance, 60, "lazy")
    expected, expected_gains = greedy_map(features, relevance, 60, "features")
    assert np.array_equal(items, expected)
    np.testing.assert_allclose(gains, expected_gains, rtol=0, atol=1e-9)


def test_lazy_reads_a_mapped_file_and_scales_rows_beyond_float32(tmp_path):
    rng = np.random.default_rng(0)
    features, relevance = rng.standard_normal((5_000, 32)), rng.uniform(0.1, 1, 5_000)
    np.save(tmp_path / "pool.npy", features.astype(np.float32))
    mapped = np.load(tmp_path / "pool.npy", mmap_mode="r")
    expected = greedy_map(np.array(mapped), relevance, 30, "features")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(greedy_map(mapped, relevance, 30)[0], expected)
    scaled = features * 10.0 ** rng.uniform(-200, 200, (5_000, 1))
    expected, _ = greedy_map(features, relevance, 30, "lazy")
    assert np.array_equal(greedy_map(scaled, relevance, 30, "lazy")[0], expected)


def test_lazy_keeps_its_picks_when_products_are_coarse(monkeypatch):
    rng = np.random.default_rng(1)
    features, relevance = rng.standard_normal((6_000, 32)), rng.beta(1, 3, 6_000)
    expected = greedy_map(features, relevance, 30, "features")[0]
    exact = bounds.Rows.float32

    def coarse(rows, ids):
        values, factor = exact(rows, ids)
        return values.bfloat16().float(), factor

    monkeypatch.setattr(bounds.Rows, "float32", coarse)
    assert np.array_equal(greedy_map(features, relevance, 30, "lazy")[0], expected)


def test_lazy_takes_ties_by_the_thousand_in_order():
    items, _ = greedy_map(np.tile(np.eye(40), (300, 1)), None, 40, "lazy")
    assert items.tolist() == list(range(40))


def test_partitioned_is_no_worse_than_the_best_part():
    rng = np.random.default_rng(2)
    features, relevance = rng.standard_normal((90, 20)), rng.uniform(0.1, 1, 90)
    parts, weights = np.split(features, 3), np.split(relevance, 3)
    items, gains = greedy_map_partitioned(parts, weights, 12)
    assert len(set(items)) == 12
    block = weighted_kernel(features, relevance)[np.ix_(items, items)]
    assert abs(gains.sum() - log_det(block)) < 1e-9
    assert gains.sum() >= max(greedy_map(*part, 12)[1].sum() for part in zip(parts, weights))
    one = greedy_map_partitioned([features], [relevance], 12)[0]
    assert np.array_equal(one, greedy_map(features, relevance, 12)[0])
    with pytest.raises(ValueError, match="3 parts, 2 arrays"):
        greedy_map_partitioned(parts, weights[:2], 12)


@pytest.mark.parametrize("engine", [Local(), Processes(2)])
def test_parts_in_files_and_other_processes_give_the_same(engine, tmp_path):
    rng = np.random.default_rng(2)
    features = rng.standard_normal((91, 20)).astype(np.float32)
    relevance = rng.uniform(0.1, 1, 91)
    parts, weights = np.array_split(features, 3), np.array_split(relevance, 3)
    wanted = greedy_map_partitioned(parts, weights, 12)
    files = [[], []]
    for k, pair in enumerate(zip(parts, weights)):
        for name, place, rows in zip(("features", "relevance"), files, pair):
            place.append(tmp_path / f"{name}{k}.npy")
            np.save(place[-1], rows)
    found = greedy_map_partitioned(*files, 12, engine=engine)
    assert np.array_equal(found[0], wanted[0]) and np.allclose(found[1], wanted[1], rtol=1e-12)
