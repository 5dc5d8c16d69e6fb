"Means of classes under noise, and what the last FFN is made to add."

import pytest
import torch
import torch.nn.functional as F

from harmomoe.bundle.files import TIMES
from harmomoe.describe.class_means import (
    COUNTED,
    class_map,
    class_means,
    class_moments,
    class_scores,
    last_inputs,
    look_at_last,
    map_from_means,
    map_from_moments,
)
from harmomoe.describe.lda import bounded, bounded_mean, public_coordinates

OWN = torch.randn(90, 5, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(90) % 3


def test_without_noise_they_are_the_means_of_what_was_cut():
    for bound in (0.7, 100.0):
        cut = bounded(OWN, bound)
        wanted = torch.stack([cut[LABELS == c].mean(0) for c in range(3)])
        assert torch.allclose(class_means(OWN, LABELS, 3, bound), wanted, rtol=1e-12)


@pytest.mark.parametrize("row", [0, 1, 44])
def test_no_sample_moves_the_release_by_more_than_the_bound(row):
    far, moved = OWN.clone(), []
    far[row] = 1e6

    def note(parts, largest):
        assert parts.norm(dim=1).max() <= largest * (1 + 1e-12)
        emptied = parts.clone()
        emptied[row] = 0
        moved.append((parts.sum(0) - emptied.sum(0)).norm().item())
        assert largest == pytest.approx(2.0 * (1 + COUNTED**2) ** 0.5)
        assert moved[0] <= largest * (1 + 1e-12)
        return bounded_mean(parts, largest)

    class_means(far, LABELS, 3, 2.0, note)
    assert len(moved) == 1


def test_a_class_that_is_all_noise_is_shrunk_to_nothing_and_a_sure_one_stays():
    generator = torch.Generator().manual_seed(1)
    own = torch.cat([torch.zeros(30, 5), torch.full((30, 5), 0.8)]).double()
    labels, noise = torch.arange(60) // 30, 0.02

    def noised(parts, largest):
        drawn = torch.randn(parts.shape[1], generator=generator, dtype=torch.float64)
        return bounded_mean(parts, largest) + noise * largest * drawn

    found = torch.stack([class_means(own, labels, 2, 2.0, noised, noise) for _ in range(200)])
    plain = torch.stack([class_means(own, labels, 2, 2.0, noised) for _ in range(200)])
    lengths = lambda means: means.norm(dim=2).mean(0)
    assert lengths(found)[0] < 0.6 * lengths(plain)[0]  # whose true length is 0
    assert lengths(found)[1] == pytest.approx(0.8 * 5**0.5, rel=0.1)


def test_what_a_shift_does_is_what_the_derivative_says(tiny):
    seed = tiny.seed
    last = look_at_last(seed, tiny.pool.train.select(range(16)))
    shift = 1e-3 * torch.randn(seed.width, generator=torch.Generator().manual_seed(2))
    backbone = seed.new_backbone()
    with torch.no_grad():
        backbone.get_submodule(".".join(last.path)).bias += shift
        [batch] = seed.batches(tiny.pool.train.select(range(16)), batch_size=16)
        moved = seed.hidden(backbone, batch).double().cpu() - last.embeddings
    said = last.moves @ shift.double()
    assert torch.cosine_similarity(moved.mean(0), said, dim=0) > 0.98
    assert moved.mean(0).norm().item() == pytest.approx(said.norm().item(), rel=0.1)


def test_the_class_token_alone_has_a_say_in_clip_and_inputs_are_what_enters(tiny):
    seed, some = tiny.seed, tiny.pool.train.select(range(8))
    last, seen = look_at_last(seed, some), []
    module = seed.backbone.get_submodule(".".join(last.path))
    handle = module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    seed.embed(some)
    handle.remove()
    found = last.inputs.float()
    assert torch.allclose(found, seen[0][:, 0].cpu(), rtol=1e-4, atol=1e-5)


def test_the_change_has_its_rank_and_means_without_a_signal_change_nothing(tiny):
    seed, some = tiny.seed, tiny.pool.train.select(range(40))
    last = look_at_last(seed, some)
    look = public_coordinates(F.normalize(last.embeddings, dim=-1)[None], 4)
    space = [*tiny.a.classes, "a purple disc", "a yellow disc"]
    means = torch.randn(3, look.size, generator=torch.Generator().manual_seed(3)).double()
    there = look.of(F.normalize(last.embeddings, dim=-1)[None])
    made = class_map(seed, last, class_scores(there, means), space, 2)
    assert made.path == last.path and made.a.shape[0] == made.b.shape[1] == 2
    assert made.a.norm().item() == pytest.approx(made.b.norm().item(), rel=1e-4)
    none = class_map(seed, last, class_scores(there, torch.zeros_like(means)), space, 2)
    assert not (none.b @ none.a).any()


def test_the_same_means_give_the_same_change(tiny):
    given = tiny.seed.embed(tiny.a.train), torch.tensor(tiny.a.train["label"])
    given = tiny.pool.train.select(range(30)), *given, tiny.a.classes, 3, 2
    one, other = (map_from_means(tiny.seed, *given, components=4) for _ in range(2))
    assert torch.equal(one.a, other.a) and torch.equal(one.b, other.b)


def test_few_public_samples_give_a_lower_rank_and_factors_that_a_server_takes(tiny):
    given = tiny.seed.embed(tiny.a.train), torch.tensor(tiny.a.train["label"])
    space = [*tiny.a.classes, "a purple disc"]
    made = map_from_means(tiny.seed, tiny.pool.train.select(range(3)), *given, space, 3, rank=6)
    weight = tiny.seed.backbone.get_submodule(".".join(made.path)).weight
    assert len(made.a) == made.b.shape[1] <= 3
    assert 0 < made.a.norm() * made.b.norm() < TIMES * weight.norm()


# ---- the covariance within classes


def test_moments_without_noise_are_means_and_covariance_of_what_was_cut():
    for bound in (0.7, 100.0):
        cut = bounded(OWN, bound)
        means, within = class_moments(OWN, LABELS, 3, bound)
        assert torch.allclose(means, class_means(OWN, LABELS, 3, bound), rtol=1e-12)
        centred = cut - means[LABELS]
        assert torch.allclose(within, centred.T @ centred / 90, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("row", [0, 44])
def test_no_sample_moves_the_moments_by_more_than_the_bound(row):
    far, moved = OWN.clone(), []
    far[row] = 1e6

    def note(parts, largest):
        parts = torch.cat([*parts])
        assert parts.norm(dim=1).max() <= largest * (1 + 1e-12)
        assert largest == pytest.approx(2.0 * (2 + COUNTED**2) ** 0.5)
        moved.append(parts[row].norm().item() / largest)
        return bounded_mean(parts, largest)

    class_moments(far, LABELS, 3, 2.0, note)
    assert moved == [pytest.approx(1.0)]  # a sample at the bound uses all of it


def test_a_covariance_that_is_all_noise_leaves_nearest_means():
    def noised(parts, largest):
        found = bounded_mean(parts, largest)
        found[-15:] += 1e3 * torch.randn(15, generator=torch.Generator().manual_seed(4)).double()
        return found

    means, within = class_moments(OWN, LABELS, 3, 100.0, noised, 10.0)
    assert (torch.linalg.eigvalsh(within) > 0).all()
    level = 10.0 * 150.0 * 100.0 * 10**0.5  # s √(2k)
    assert torch.linalg.eigvalsh(within).min().item() == pytest.approx(level)


def test_scores_are_those_of_linear_discriminant_analysis():
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    own = OWN + LABELS[:, None] * torch.tensor([1.0, -0.5, 0, 0, 0.3])
    own = own @ torch.randn(5, 5, generator=torch.Generator().manual_seed(5)).double()
    means, within = class_moments(own, LABELS, 3, 100.0)
    usual = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / 3] * 3).fit(own, LABELS)
    assert (class_scores(own, means, within).argmax(1).numpy() == usual.predict(own)).all()
    assert (class_scores(own, means).argmax(1) == torch.cdist(own, means).argmin(1)).all()


def test_other_samples_are_seen_as_the_public_ones_were(tiny):
    some = tiny.pool.train.select(range(40))
    last = look_at_last(tiny.seed, some)
    assert torch.allclose(last_inputs(tiny.seed, last, some), last.inputs)
    assert last.say.sum().item() == pytest.approx(1.0)


def test_the_same_moments_give_the_same_change(tiny):
    labels, space = torch.tensor(tiny.a.train["label"]), [*tiny.a.classes, "a purple disc"]
    given = tiny.pool.train.select(range(30)), tiny.a.train, labels, space, 3, 2
    one, other = (map_from_moments(tiny.seed, *given) for _ in range(2))
    assert torch.equal(one.a, other.a) and torch.equal(one.b, other.b)
    assert one.path == (tiny.seed.layers[-1], tiny.seed.ffn.linears[-1]) and one.b.any()
