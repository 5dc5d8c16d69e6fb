"""Noise and sensitivity of all that a private client computes, and what it promises."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from helpers import kept
from scipy.stats import binomtest, kstest

pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")

from opacus.grad_sample import GradSampleModuleFastGradientClipping

from harmomoe.base.artefacts import read_manifest, stages_run
from harmomoe.bundle.files import read_bundle
from harmomoe.bundle.invitation import invite
from harmomoe.bundle.manifest import PRIVATE_PARTS
from harmomoe.client.client import Client
from harmomoe.client.disclosure import disclose
from harmomoe.client.expert import expert_factors, load_adapter, load_expert, new_expert
from harmomoe.client.policy import PARTS, Guarantee, Policy, pack
from harmomoe.client.privacy import (
    Average,
    Gradients,
    Noise,
    PrivateData,
    noised_mean,
    train_privately,
)
from harmomoe.config.accounting import Mechanism, total_epsilon
from harmomoe.config.settings import Config, ExpertSettings, Privacy, changed, guaranteed, preset
from harmomoe.data.domains import load_benchmark
from harmomoe.data.samples import labelled, union_label_space
from harmomoe.describe import class_means
from harmomoe.describe.lda import bounded_mean
from harmomoe.models.evaluate import measure
from harmomoe.models.model import Model
from harmomoe.models.weights import open_seed

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
SOURCES = pytest.mark.parametrize("random_state", [None, 5], ids=["system", "seeded"])
ONE_STEP = ExpertSettings(rank=4, alpha=8, learning_rate=1.0, momentum=0.0, weight_decay=0.0)


# ---- random numbers


@SOURCES
def test_numbers_are_uniform_and_normal(random_state):
    source = Noise(random_state)
    drawn = source.uniform(20_000)
    assert 0 < drawn.min() and drawn.max() < 1
    assert kstest(drawn, "uniform").pvalue > 1e-5
    found = source.normal((100, 200))
    assert found.shape == (100, 200) and found.dtype == torch.float64
    assert kstest(found.flatten(), "norm").pvalue > 1e-5


def test_the_system_never_repeats_itself_and_a_random_state_does():
    assert not np.array_equal(Noise().uniform(9), Noise().uniform(9))
    assert np.array_equal(Noise(3).uniform(9), Noise(3).uniform(9))
    assert not np.array_equal(Noise(3).uniform(9), Noise(4).uniform(9))


@SOURCES
def test_batches_are_poisson(random_state):
    "Each sample with the rate, whatever the others do: sizes vary as a binomial does."
    source, rate, times = Noise(random_state), 0.2, 3000
    taken = np.zeros((times, 30), bool)
    for row in taken:
        row[source.batch(30, rate)] = True
    for counts, tries in ((taken.sum(), times * 30), (taken[:, 0].sum(), times)):
        assert binomtest(int(counts), tries, rate).pvalue > 1e-5
    both = int((taken[:, 0] & taken[:, 1]).sum())
    assert binomtest(both, times, rate**2).pvalue > 1e-5
    assert taken.sum(1).var() == pytest.approx(30 * rate * (1 - rate), rel=0.15)
    assert list(source.batch(4, 1.0)) == [0, 1, 2, 3]


@SOURCES
def test_groups_take_part_by_one_of_their_samples(random_state):
    "Each with the rate, by any of its samples alike."
    groups, source = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5])], Noise(random_state)
    rate, times, taken = 0.4, 4000, np.zeros((4000, 6), bool)
    for row in taken:
        row[source.rows(groups, rate)] = True
    per_group = np.stack([taken[:, rows].sum(1) for rows in groups], 1)
    assert per_group.max() == 1
    for group, rows in enumerate(groups):
        counts = taken[:, rows].sum(0)
        assert binomtest(int(per_group[:, group].sum()), times, rate).pvalue > 1e-5
        for count in counts:
            assert binomtest(int(count), times, rate / len(rows)).pvalue > 1e-5
    assert source.rows(groups, 1e-9).shape == (0,)
    alone = [np.array([row]) for row in range(9)]
    assert np.array_equal(Noise(3).rows(alone, 0.5), Noise(3).batch(9, 0.5))


# ---- means


@SOURCES
def test_a_mean_has_the_noise_that_it_says_and_no_bias(random_state):
    u = torch.tensor(np.random.default_rng(0).normal(size=(50, 4)))
    source, bound, noise = Noise(random_state), 1.5, 3.0
    drawn = torch.stack([noised_mean(u, bound, noise, source) for _ in range(4000)])
    scaled = (drawn - bounded_mean(u, bound)) / (noise * bound / 50)
    assert kstest(scaled.flatten(), "norm").pvalue > 1e-5
    assert torch.allclose(scaled.T.cov(), torch.eye(4).double(), atol=0.12)


def test_an_average_without_noise_is_exact_and_remembers_its_bound():
    u = torch.tensor(np.random.default_rng(0).normal(size=(50, 4)))
    average = Average()
    assert torch.equal(average(u, 1.5), bounded_mean(u, 1.5)) and average.bound == 1.5
    noised = Average(2.0, Noise(1))
    assert torch.equal(noised(u, 1.5), noised_mean(u, 1.5, 2.0, Noise(1))) and noised.bound == 1.5
    groups = np.arange(len(u)) % 3
    for given in (None, groups):  # in parts it is the same
        whole, parts = (noised_mean(x, 1.5, 2.0, Noise(1), given) for x in (u, u.split(7)))
        assert torch.allclose(whole, parts, rtol=1e-12)


def test_a_mean_over_groups_is_that_of_their_means_and_moves_by_a_groups_share():
    rng = np.random.default_rng(0)
    u, bound, groups = torch.tensor(rng.normal(size=(40, 4))), 1.5, rng.permutation(40) % 7
    exact = lambda u: noised_mean(u, bound, 0.0, Noise(0), groups)
    means = [bounded_mean(u[groups == group], bound) for group in range(7)]
    assert torch.allclose(exact(u), torch.stack(means).mean(0), rtol=1e-12)
    for group in range(7):
        far = u.clone()
        far[groups == group] = torch.tensor([1e6, 0, 0, 0]).double()
        emptied = far.clone()
        emptied[groups == group] = 0
        moved = (exact(far) - exact(emptied)).norm().item()
        assert moved == pytest.approx(bound / 7, rel=1e-9)
    noised = Average(2.0, Noise(1), groups)(u, bound)
    drawn = Noise(1).normal((4,))
    assert torch.allclose(noised, exact(u) + 2.0 * bound * drawn / 7, rtol=1e-12)


@pytest.mark.slow
def test_who_is_in_cannot_be_told_better_than_promised():
    """The best test there is between two neighbours, on many draws: its lower bound on epsilon
    stays below what is promised, and shows that little less would be wrong."""
    noise, bound, delta, times = 1.0, 2.0, 1e-2, 200_000
    u = torch.zeros(10, 3).double()
    u[0, 0] = 100.0  # whose part is the whole bound
    source = Noise(7)
    sides = []
    for data in (u, torch.zeros_like(u)):
        shape = (times, 3)
        mean = bounded_mean(data, bound)
        sides.append((mean + noise * bound * source.normal(shape) / 10)[:, 0])
    found = []
    for cut in torch.linspace(0, 0.6, 25):
        right, wrong = ((side > cut).double().mean().item() for side in sides)
        if wrong > 1e-3:
            found.append(np.log(max(right - delta, 1e-9) / wrong))
    promised = total_epsilon((Mechanism(noise),), delta)
    assert 0.7 * promised < max(found) <= promised * 1.03


# ---- gradients of single samples


class Case:
    "An expert, its loss and some samples."

    def __init__(self, seed, domain, pool, both=True):
        self.seed, self.space = seed, union_label_space(domain.classes, pool.classes)
        self.loader = seed.batches(labelled(domain.train), self.space, random_state=0)
        self.task, self.number = seed.task(self.space), len(domain.train)
        self.expert = new_expert(seed, ONE_STEP, 0).train()
        with torch.no_grad():  # a first factor gets no gradient while the second is 0
            for name, p in self.expert.named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        self.parameters = [p for p in self.expert.parameters() if p.requires_grad]

    def batch(self, rows):
        return self.loader.collate_fn([self.loader.dataset[int(row)] for row in rows])

    def by_hand(self, row):
        "The gradient of one sample, by a batch of one."
        self.expert.zero_grad()
        self.task.loss(self.expert, self.batch([row])).backward()
        return [p.grad.clone() for p in self.parameters]


@pytest.fixture(params=["images", "texts"])
def case(request, tiny):
    if request.param == "images":
        return Case(tiny.seed, tiny.a, tiny.pool)
    seed = open_seed(str(request.getfixturevalue("tiny_decoder")))
    benchmark = load_benchmark(request.getfixturevalue("tiny_texts"), "colours,animals", "sayings")
    return Case(seed, benchmark.clients[0], benchmark.pool)


def test_hooks_give_the_gradients_of_batches_of_one(case):
    wanted = [case.by_hand(row) for row in range(6)]
    gradients = Gradients(case.expert, case.task.loss)
    found, norms, _ = gradients.each(case.batch(range(6)), 6)
    gradients.close()
    for row in range(6):
        for one, mine in zip(wanted[row], found):
            assert torch.allclose(mine[row], one, rtol=1e-3, atol=1e-4 * one.abs().max() + 1e-8)
        norm = torch.cat([one.flatten() for one in wanted[row]]).norm()
        assert norms[row].item() == pytest.approx(norm.item(), rel=1e-3)


def test_ghost_norms_are_those_of_hooks(case):
    "Opacus computes norms in a second way, without gradients of single samples."
    gradients = Gradients(case.expert, case.task.loss)
    _, norms, _ = gradients.each(case.batch(range(6)), 6)
    gradients.close()
    ghost = GradSampleModuleFastGradientClipping(
        case.expert, max_grad_norm=1.0, use_ghost_clipping=True, strict=False
    )
    case.task.loss(ghost, case.batch(range(6))).backward()
    found = ghost.get_norm_sample()
    ghost.remove_hooks()
    assert torch.allclose(found, norms, rtol=1e-3)


def test_a_sum_does_not_depend_on_chunks_and_no_sample_moves_it_by_more_than_the_bound(case):
    bound, rows = 0.5, np.arange(7)
    gradients = Gradients(case.expert, case.task.loss, chunk=3)
    flat = lambda rows: torch.cat(
        [x.flatten() for x in gradients.cut_sum(case.loader, rows, bound)[0]]
    )
    whole = flat(rows)
    gradients.chunk = 7
    assert torch.allclose(flat(rows), whole, rtol=1e-3, atol=1e-5)
    moved = [(flat(np.delete(rows, row)) - whole).norm().item() for row in rows]
    assert max(moved) <= bound * 1.001 and max(moved) > 0.9 * bound
    assert not flat(rows[:0]).any()  # an empty batch
    gradients.close()


def test_what_hooks_leave_behind_is_nothing(case):
    gradients = Gradients(case.expert, case.task.loss)
    gradients.each(case.batch(range(2)), 2)
    gradients.close()
    case.task.loss(case.expert, case.batch(range(3))).backward()
    assert all(getattr(p, "grad_sample", None) is None for p in case.parameters)


# ---- steps


def step_once(tiny, mechanism, random_state=1, learn_public=True, clip=1e6, both=True, groups=None):
    "What one step of plain gradient descent adds to the factors."
    how = learn_public, clip, both, groups
    data = PrivateData(tiny.a.train, tiny.b.train, mechanism, Noise(random_state), *how)
    space = union_label_space(tiny.a.classes, tiny.b.classes, tiny.pool.classes)
    start = new_expert(tiny.seed, ONE_STEP, 0)
    expert, losses, bound = train_privately(tiny.seed, data, space, ONE_STEP)
    pairs = zip(expert.named_parameters(), start.named_parameters())
    return {n: (p - q).detach() for (n, p), (_, q) in pairs if "lora_" in n}, losses, bound


def test_without_cutting_and_noise_a_step_is_the_ordinary_one(tiny):
    "All samples, private and public, in one batch; the mean of their losses."
    space = union_label_space(tiny.a.classes, tiny.b.classes, tiny.pool.classes)
    expert = new_expert(tiny.seed, ONE_STEP, 0)
    losses = []
    for part in (tiny.a.train, tiny.b.train):
        loader = tiny.seed.batches(labelled(part), space, 100, 0)
        [batch] = loader
        losses.append(len(part) * tiny.seed.task(space).loss(expert, batch))
    (sum(losses) / 54).backward()
    found, [loss], _ = step_once(tiny, Mechanism(1e-3), clip=1e3)
    for name, p in expert.named_parameters():
        if "lora_" in name:
            # noise of 1e-3 norms of 1e3, over 54 samples
            assert (found[name] + p.grad).abs().max() < 6 / 54
    assert loss == pytest.approx(sum(losses).item() / 54, rel=1e-4)


def test_a_step_has_the_noise_that_it_says(tiny):
    noise, clip = 50.0, 0.01
    steps = [step_once(tiny, Mechanism(noise), state, clip=clip)[0] for state in (1, 2)]
    apart = torch.cat([(steps[0][n] - steps[1][n]).flatten() for n in steps[0]]).double()
    wanted = noise * clip / 54 * 2**0.5
    assert apart.std().item() == pytest.approx(wanted, rel=0.05)
    assert kstest(apart / wanted, "norm").pvalue > 1e-5


def test_a_step_is_divided_by_the_number_that_was_expected(tiny):
    "Half of the samples: twice the noise, whoever was in the batch."
    spread = []
    for rate in (1.0, 0.5):
        steps = [step_once(tiny, Mechanism(1e3, rate), s, clip=1e-4)[0] for s in (1, 2)]
        spread.append(torch.cat([(steps[0][n] - steps[1][n]).flatten() for n in steps[0]]).std())
    assert (spread[1] / spread[0]).item() == pytest.approx(2.0, rel=0.08)


def test_no_private_sample_moves_a_step_by_more_than_the_bound(tiny):
    clip, given = 0.05, dict(mechanism=Mechanism(1e-3), clip=0.05, learn_public=False)
    flat = lambda found: torch.cat([x.flatten() for x in found.values()])
    whole = flat(step_once(tiny, **given)[0])
    for row in (0, 11, 29):
        rows = [i for i in range(30) if i != row]
        fewer = replace(tiny.a, train=tiny.a.train.select(rows))
        other = type(tiny)(**{**vars(tiny), "a": fewer})
        # emptied, the sample would still count: the mean is over 30
        moved = 30 * (flat(step_once(other, **given)[0]) * 29 / 30 - whole).norm()
        # the same noise is in both
        assert moved <= clip * 1.01


def test_no_group_moves_a_step_by_more_than_the_bound(tiny):
    "However many samples it has. Noise is there, but a thousandth of the bound in each number."
    clip, own = 0.05, np.r_[np.zeros(12, np.int64), 1:19]  # 12 of the 30 samples are one's
    given = dict(mechanism=Mechanism(1e-3), clip=clip, learn_public=False)
    flat = lambda found: torch.cat([x.flatten() for x in found.values()])
    whole = flat(step_once(tiny, groups=own, **given)[0])
    fewer = replace(tiny.a, train=tiny.a.train.select(range(12, 30)))
    rest = flat(step_once(type(tiny)(**{**vars(tiny), "a": fewer}), **given)[0])
    moved = (18 * rest - 19 * whole).norm()  # emptied, the group would still count
    noise = 1e-3 * clip * (2 * len(whole)) ** 0.5
    assert 0.5 * clip < moved <= clip + 1.2 * noise


def test_adapters_move_and_first_factors_only_if_they_may(tiny):
    for both in (False, True):
        mechanism = Mechanism(0.5, 0.5, 4)
        found, losses, bound = step_once(tiny, mechanism, clip=None, both=both)
        assert len(losses) == 2 and bound > 0
        for name, moved in found.items():
            assert moved.any() == (both or "lora_B" in name), name


def test_where_no_gradient_comes_noise_does_not_stand_in(tiny, monkeypatch):
    loss = type(tiny.seed.task(["a"])).loss
    path = tiny.seed.layers[0]

    def cut_off(task, backbone, batch):
        block = backbone.base_model.model.get_submodule(path)
        handle = block.register_forward_hook(lambda module, inputs, output: output.detach())
        try:
            return loss(task, backbone, batch)
        finally:
            handle.remove()

    monkeypatch.setattr(type(tiny.seed.task(["a"])), "loss", cut_off)
    with pytest.raises(RuntimeError, match="no gradient reaches 2 adapters, for example .*lora_B"):
        step_once(tiny, Mechanism(1.0))


# ---- a whole client

CHANGES = {"privacy.epsilon": 8, "privacy.components": 4}


@pytest.fixture(scope="module")
def private(tiny, tmp_path_factory):
    "A client that gives a guarantee, and its bundle."
    public = tiny.public.with_config(changed(tiny.settings, CHANGES))
    client = Client(public, tiny.a, tmp_path_factory.mktemp("private") / "a")
    return client, read_bundle(client.bundle(), public)


def test_a_bundle_says_what_it_promises_and_by_what(private):
    client, bundle = private
    given = bundle.manifest.facts.guarantee
    assert 7.9 < given.epsilon <= 8 and given.delta == pytest.approx(30**-1.1)
    assert given.secure and given.unit == "sample" and given.accountant.startswith("dp-accounting ")
    assert given.parts.keys() == {*PRIVATE_PARTS} - {"means"}
    in_order = [given.parts[part] for part in PRIVATE_PARTS if part in given.parts]
    sums = tuple(Mechanism(p.noise, p.rate, p.sums) for p in in_order)
    assert total_epsilon(sums, given.delta) == given.epsilon
    given.check()
    adapter = given.parts["adapter"]
    assert (adapter.rate, adapter.sums) == (16 / 42, 6) and adapter.noise * 4 == sums[0].noise
    for part, folder in dict(relevance="relevance", routing="routing", adapter="expert").items():
        [made] = kept(client.folder, folder)
        assert read_manifest(made)["facts"]["bound"] == given.parts[part].bound


def test_a_guarantee_for_groups_counts_them(tiny, tmp_path):
    public = tiny.public.with_config(changed(tiny.settings, CHANGES))
    train = tiny.a.train.add_column("group", [f"p{row // 2}" for row in range(30)])
    client = Client(public, replace(tiny.a, train=train), tmp_path / "a")
    assert np.array_equal(np.unique(client.groups), np.arange(15)) and len(client.groups) == 30
    bundle = read_bundle(client.bundle(), public)
    given = bundle.manifest.facts.guarantee
    assert given.unit == "group" and given.delta == pytest.approx(15**-1.1)
    assert bundle.manifest.facts.private_samples == 30 and given.epsilon <= 8
    adapter = given.parts["adapter"]
    assert (adapter.rate, adapter.sums) == (16 / (15 + 12), 4)
    given.check()
    said = disclose(client.bundle(), public).guarantee()
    assert "for all private samples of a group together" in said
    assert "how many samples and groups there are" in said


def test_one_group_cannot_be_hidden(tiny, tmp_path):
    public = tiny.public.with_config(changed(tiny.settings, CHANGES))
    train = tiny.a.train.add_column("group", ["p"] * 30)
    with pytest.raises(ValueError, match="1 sample or group"):
        Client(public, replace(tiny.a, train=train), tmp_path / "a").bundle()


def test_what_was_drawn_is_kept(private):
    client, bundle = private
    with stages_run() as ran:
        client.bundle()
    assert ran == []


def test_another_draw_differs_everywhere_and_a_random_state_repeats_it(private, tiny, tmp_path):
    def made(folder, **changes):
        public = tiny.public.with_config(changed(tiny.settings, CHANGES | changes))
        return read_bundle(Client(public, tiny.a, tmp_path / folder).bundle(), public)

    seeded = [made(f, **{"privacy.secure": False}) for f in ("one", "two")]
    assert seeded[0].digest == seeded[1].digest
    assert not seeded[0].manifest.facts.guarantee.secure
    others = private[1], made("three"), seeded[0]
    for one, other in ((0, 1), (0, 2)):
        [a], [b] = (others[i].routing.values() for i in (one, other))
        assert not torch.equal(a.vectors, b.vectors)
        pairs = zip(others[one].factors.values(), others[other].factors.values())
        assert all(not torch.equal(x[1], y[1]) for x, y in pairs)


def test_first_factors_say_nothing(private, tiny):
    client, bundle = private
    start = new_expert(tiny.seed, tiny.settings.expert, tiny.settings.random_state)
    first = [p for name, p in start.named_parameters() if "lora_A" in name]
    found = [a for a, _ in bundle.factors.values()]
    assert all(any(torch.equal(a, p) for p in first) for a in found)


def test_no_noise_gets_into_layers_that_stay_untouched(tiny, tmp_path):
    changes = CHANGES | {"expert.untouched": 0.5, "privacy.factors": "both"}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    made = Client(public, tiny.a, tmp_path / "a").expert
    for (path, _), pair in expert_factors(public.seed, load_adapter(public.seed, made)).items():
        assert {bool(p.any()) for p in pair} == {path != public.seed.layers[0]}


def test_a_closed_form_without_noise_has_no_promise(tiny, tmp_path):
    changes = {"relevance.method": "lda", "routing.method": "lda", "router.form": "moments"}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    client = Client(public, tiny.a, tmp_path / "a")
    bundle = read_bundle(client.bundle(), public)
    assert bundle.manifest.facts.guarantee is None and client.budget is None
    assert [*bundle.routing] == ["moments"] and client.relevance.facts["method"] == "lda"


def test_an_expert_of_proxies_alone_is_trained_without_noise(tiny, tmp_path):
    changes = CHANGES | {"expert.private": False}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    bundle = read_bundle(Client(public, tiny.a, tmp_path / "a").bundle(), public)
    assert bundle.manifest.facts.guarantee.parts.keys() == {"relevance", "routing"}


def test_texts_have_it_too(tiny_texts, tiny_decoder, tiny_settings, tmp_path):
    from harmomoe.describe.public import Public

    benchmark = load_benchmark(tiny_texts, "colours,animals", "sayings")
    changes = CHANGES | {"router.context": "prefix", "router.form": "logistic"}
    config = changed(tiny_settings, changes | {"routing.forms": "mean"})
    public = Public(open_seed(str(tiny_decoder)), benchmark.pool, config, tmp_path / "public")
    client = Client(public, benchmark.clients[0], tmp_path / "colours")
    bundle = read_bundle(client.bundle(), public)
    assert [*bundle.routing] == ["mean", "logistic"]
    assert bundle.manifest.facts.guarantee.epsilon <= 8
    moved = load_adapter(public.seed, client.expert).named_parameters()
    assert all(p.any() for name, p in moved if "lora_B" in name)


# ---- refusals


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"gate.epochs": 1}, "gate.epochs is 1, .* set it to 0"),
        ({"relevance.method": "finetune"}, "relevance.method is 'finetune', .* choose 'lda'"),
        ({"expert.precision": "bf16"}, "expert.precision is 'bf16'"),
    ],
)
def test_settings_that_have_no_guarantee_are_refused(changes, words):
    with pytest.raises(ValueError, match=f"settings: privacy.epsilon is 8, but {words}"):
        changed(Config(), {"privacy.epsilon": 8} | changes)


def test_evidence_has_no_closed_form():
    for changes in ({"privacy.epsilon": 8}, {"routing.method": "lda"}):
        for form in ({"router.form": "evidence"}, {"routing.forms": "evidence"}):
            with pytest.raises(ValueError, match="'evidence', which has no closed form"):
                changed(Config(), changes | form)


def test_presets_can_be_guaranteed():
    for name in ("paper", "gated", "text", "embedded", "ratios", "embedded-text"):
        config = guaranteed(preset(name), 3)
        assert config.privacy.epsilon == 3 and config.gate.epochs == 0
        assert config.expert.warmup_steps == 0  # there are few steps
    assert guaranteed(preset("gated"), None) == preset("gated")


@pytest.mark.parametrize("name, times", [("ratios", 10), ("text", 10), ("paper", 1)])
def test_steps_with_noise_are_few_and_long(name, times):
    usual, private = preset(name).expert, guaranteed(preset(name), 3).expert
    assert private.learning_rate == times * usual.learning_rate
    assert private.epochs == 2 * usual.epochs and private.rank == usual.rank


def test_experts_of_images_are_made_from_means_and_steps_from_there_are_shorter():
    assert guaranteed(preset("ratios"), 3, images=True).privacy.factors == "auto"
    rate = lambda factors: (
        guaranteed(
            changed(preset("ratios"), {"privacy.factors": factors}), 3, images=True
        ).expert.learning_rate
    )
    assert 3 * rate("means+B") == rate("both")
    ranks = dict(both=16, means=16, auto=32, lda=32)
    for factors, rank in ranks.items():  # what is given stands
        given = changed(preset("ratios"), {"privacy.factors": factors})
        found = guaranteed(given, 3, images=True)
        assert (found.privacy.factors, found.expert.rank) == (factors, rank)


@pytest.mark.parametrize(
    "factors, start, steps",
    [
        ("B", "", True),
        ("both", "", True),
        ("auto", "auto", False),
        ("means", "means", False),
        ("lda+B", "lda", True),
    ],
)
def test_factors_say_where_steps_start_and_whether_there_are_any(factors, start, steps):
    privacy = Privacy(factors=factors)
    assert (privacy.start, privacy.steps) == (start, steps)


def test_experts_of_proxies_alone_learn_as_ever():
    config = changed(preset("ratios"), {"expert.private": False})
    assert guaranteed(config, 3).expert == config.expert


def test_clients_of_another_kind_promise_nothing(tiny, tmp_path):
    class Other(Client):
        "Trains in its own way."

    public = tiny.public.with_config(changed(tiny.settings, CHANGES))
    with pytest.raises(ValueError, match="what a Other sends has no guarantee"):
        Other(public, tiny.a, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_missing_package_is_said_before_any_work(tiny, tmp_path, monkeypatch):
    from harmomoe.config import accounting

    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    public = tiny.public.with_config(changed(tiny.settings, CHANGES))
    with pytest.raises(ImportError, match=r"harmomoe\[privacy\]"):
        Client(public, tiny.a, tmp_path / "a")


# ---- policy and invitation


def asks(epsilon, delta=0.5, unit="sample"):
    return Policy(list(PARTS), Guarantee(epsilon, delta, unit), 10)


@pytest.mark.parametrize(
    "policy, changes, words",
    [
        (asks(7.0), {}, "epsilon 7.99.*: lower privacy.epsilon"),
        (asks(8.0, 1e-5), {}, "delta 0.024: lower privacy.delta"),
        (asks(8.0), {"privacy.secure": False}, "can be drawn again: set privacy.secure"),
        (asks(8.0), {"privacy.epsilon": None}, "none: set privacy.epsilon"),
        (asks(8.0, unit="group"), {}, "one for each sample, not for each group: name the column"),
    ],
)
def test_a_policy_that_asks_for_more_packs_nothing(policy, changes, words, tiny, tmp_path):
    public = tiny.public.with_config(changed(tiny.settings, CHANGES | changes))
    client = Client(public, tiny.a, tmp_path / "a")
    invitation = invite("colours", public, "tiny", "pool")
    with pytest.raises(ValueError, match=words):
        pack(client, policy, invitation)
    assert not (tmp_path / "a").exists()


def test_a_policy_that_asks_for_no_more_packs_and_the_invitation_takes_it(private, tiny, tmp_path):
    client, _ = private
    invitation = invite("colours", client.public, "tiny", "pool")
    sent = read_bundle(pack(client, asks(8.0), invitation, tmp_path / "sent"), client.public)
    invitation.admit(sent)
    plain = read_bundle(
        Client(tiny.public, tiny.a, tiny.work / "a").bundle(tmp_path / "plain", invitation.digest),
        tiny.public,
    )
    with pytest.raises(ValueError, match="has no guarantee, but this invitation"):
        invitation.admit(plain)
    stricter = invite(
        "colours",
        client.public.with_config(changed(client.public.config, {"privacy.epsilon": 1})),
        "tiny",
        "pool",
    )
    with pytest.raises(ValueError, match="has epsilon 7.99.* asks for epsilon 1 "):
        stricter.check_promise(sent)


def test_a_promise_that_the_noise_does_not_keep_is_found(private):
    client, bundle = private
    given = bundle.manifest.facts.guarantee
    parts = given.parts | dict(adapter=replace(given.parts["adapter"], noise=0.5))
    lie = replace(given, parts=parts)
    with pytest.raises(ValueError, match="is promised at delta .*, but the parts take"):
        lie.check()
    facts = replace(bundle.manifest.facts, guarantee=lie)
    told = replace(bundle, manifest=replace(bundle.manifest, facts=facts))
    with pytest.raises(ValueError, match="the parts take"):
        invite("colours", client.public, "tiny", "pool").check_promise(told)
    assert asdict(given) == asdict(bundle.manifest.facts.guarantee)


def test_default_settings_are_told_as_before():
    told = Config().told
    assert "privacy" not in told and "method" not in told["routing"]
    private = Config(privacy=Privacy(epsilon=8)).told
    assert private["privacy"]["epsilon"] == 8.0
    assert changed(Config(), told) == Config() and changed(Config(), private).privacy.wanted


# ---- experts from means of classes

MEANS = CHANGES | {"privacy.factors": "means"}


@pytest.fixture(scope="module", params=["means", "lda"])
def from_means(request, tiny, tmp_path_factory):
    "A client whose expert is made from means of classes, maybe with covariance, and its bundle."
    changes = MEANS | {"privacy.factors": request.param}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    client = Client(public, tiny.a, tmp_path_factory.mktemp(request.param) / "a")
    return client, read_bundle(client.bundle(), public)


def test_an_expert_from_means_is_one_release(from_means):
    client, bundle = from_means
    given = bundle.manifest.facts.guarantee
    adapter, routing = given.parts["adapter"], given.parts["routing"]
    assert (adapter.rate, adapter.sums) == (1.0, 1) and adapter.noise * 4 == routing.noise
    assert given.epsilon <= 8 and given.parts.keys() == {*PRIVATE_PARTS} - {"means"}
    given.check()
    assert read_manifest(client.expert)["facts"]["losses"] == []


def test_it_changes_one_map_alone(from_means):
    client, bundle = from_means
    last = client.public.seed.layers[-1], client.public.seed.ffn.linears[-1]
    assert {name for name, (_, b) in bundle.factors.items() if b.any()} == {last}


@pytest.mark.parametrize("factors", ["means", "lda"])
def test_with_next_to_no_noise_it_names_its_classes(factors, tiny, tmp_path):
    changes = MEANS | {"privacy.epsilon": 60, "privacy.secure": False, "expert.rank": 8}
    changes |= {"privacy.factors": factors}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    client = Client(public, tiny.a, tmp_path / "a")
    expert = Model(public.seed, load_expert(public.seed, client.expert))
    of = lambda model: measure(model, tiny.a.train, tiny.a.classes).correct
    assert of(expert) > of(Model(public.seed, public.seed.backbone))


@pytest.mark.parametrize("factors", ["means+B", "lda+B"])
def test_steps_go_on_from_means(factors, tiny, tmp_path):
    changes = MEANS | {"privacy.factors": factors, "privacy.secure": False}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    client = Client(public, tiny.a, tmp_path / "a")
    bundle = read_bundle(client.bundle(), public)
    given, facts = bundle.manifest.facts.guarantee, read_manifest(client.expert)["facts"]
    assert given.epsilon <= 8 and given.parts.keys() == {*PRIVATE_PARTS}
    given.check()
    means, adapter = given.parts["means"], given.parts["adapter"]
    assert (means.rate, means.sums) == (1.0, 1) and adapter.noise == means.noise
    assert facts["bound_of_means"] == means.bound and facts["bound"] == adapter.bound
    assert all(b.any() for _, b in bundle.factors.values())  # steps change all maps


@pytest.mark.parametrize("enough, same", [(0, "lda"), (1e9, "means")])
def test_the_number_of_samples_decides_what_it_is_made_from(
    enough, same, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(class_means, "ENOUGH", enough)
    found = []
    for factors in ("auto", same):
        changes = MEANS | {"privacy.factors": factors, "privacy.secure": False}
        public = tiny.public.with_config(changed(tiny.settings, changes))
        client = Client(public, tiny.a, tmp_path / factors)
        found.append(expert_factors(public.seed, load_adapter(public.seed, client.expert)))
    auto, other = found
    assert all(torch.equal(auto[place][1], b) for place, (_, b) in other.items())


def test_steps_of_no_length_leave_the_expert_from_means(tiny, tmp_path):
    changes = MEANS | {"privacy.factors": "means+B", "expert.learning_rate": 1e-12}
    public = tiny.public.with_config(changed(tiny.settings, changes))
    client = Client(public, tiny.a, tmp_path / "a")
    drawn = expert_factors(public.seed, new_expert(public.seed, public.config.expert))
    found = expert_factors(public.seed, load_adapter(public.seed, client.expert))
    last = public.seed.layers[-1], public.seed.ffn.linears[-1]
    assert {place for place, (_, b) in found.items() if b.abs().max() > 1e-6} == {last}
    for place, (a, _) in found.items():
        as_long = a.norm() == pytest.approx(drawn[place][0].norm().item())
        assert as_long and torch.equal(a, drawn[place][0]) == (place != last)


def test_language_models_have_no_means(tiny_texts, tiny_decoder, tiny_settings, tmp_path):
    from harmomoe.describe.public import Public

    benchmark = load_benchmark(tiny_texts, "colours,animals", "sayings")
    config = changed(tiny_settings, MEANS | {"router.context": "prefix", "router.form": "logistic"})
    public = Public(open_seed(str(tiny_decoder)), benchmark.pool, config, tmp_path / "public")
    with pytest.raises(ValueError, match="privacy.factors is 'means', but experts of language"):
        Client(public, benchmark.clients[0], tmp_path / "colours")
