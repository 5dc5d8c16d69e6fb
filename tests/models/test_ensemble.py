"Several models whose answers are averaged, and a model for each client."

import json

import pytest
import torch
from families import REPLIES, model, only, seed_of
from networks import same

from harmomoe.base.artefacts import read_manifest
from harmomoe.models.ensemble import Ensemble, EnsembleFacts, Personal, PersonalFacts
from harmomoe.models.model import Model, load_model, read_model


@pytest.fixture(scope="module")
def experts(tiny):
    "The three clients' experts as dense models."
    return {bundle.client: bundle.expert(tiny.seed) for bundle in tiny.bundles}


@pytest.fixture(scope="module")
def batch(tiny):
    "Twelve samples."
    [one] = tiny.seed.batches(tiny.pool.test, tiny.pool.classes)
    return one


@pytest.fixture(scope="module")
def classifier():
    "Vectors and biases that weigh three members, differently for every sample."
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(3, 32, generator=generator), torch.randn(3, generator=generator)


@pytest.fixture(params=[False, True], ids=["equal", "weighted"])
def ensemble(request, tiny, experts, classifier):
    "Both kinds of ensembles."
    backbones = [expert.backbone for expert in experts.values()]
    return Ensemble(tiny.seed, backbones, *classifier * request.param)


@torch.no_grad()
def probabilities(model, classes, batch):
    return model.scorer(classes)(batch).double().exp()


@torch.no_grad()
def of_members(experts, classes, batch):
    "The members' own probabilities, [B, K, C]."
    scores = [expert.scorer(classes)(batch) for expert in experts.values()]
    return torch.stack([score.double().softmax(-1) for score in scores], 1)


# ---- the mean


def test_ensemble_is_the_mean_of_its_members_probabilities(tiny, experts, batch):
    ensemble = Ensemble(tiny.seed, [expert.backbone for expert in experts.values()])
    found = probabilities(ensemble, tiny.pool.classes, batch)
    members = of_members(experts, tiny.pool.classes, batch)
    assert members.std(1).max() > 0.01
    assert torch.allclose(found, members.mean(1), atol=1e-6)


@torch.no_grad()
def test_weights_are_a_softmax_of_what_the_seed_sees(tiny, experts, classifier, batch):
    vectors, biases = classifier
    ensemble = Ensemble(tiny.seed, [expert.backbone for expert in experts.values()], *classifier)
    z = tiny.seed.hidden(tiny.seed.backbone, batch).double()
    weights = (z @ vectors.double().T + biases.double()).softmax(-1)
    assert weights.shape == (12, 3) and weights.std(0).min() > 0.01
    assert torch.allclose(ensemble.log_weights(batch).double().exp(), weights, atol=1e-5)
    members = of_members(experts, tiny.pool.classes, batch)
    wanted = (weights[..., None] * members).sum(1)
    assert torch.allclose(probabilities(ensemble, tiny.pool.classes, batch), wanted, atol=1e-5)


@torch.no_grad()
def test_an_ensemble_of_one_is_that_one(tiny, experts, batch):
    alone, classes = experts["a"], tiny.pool.classes
    wanted = alone.scorer(classes)(batch).log_softmax(-1)
    for given in ((), (torch.randn(1, 32), torch.randn(1))):
        found = Ensemble(tiny.seed, [alone.backbone], *given).scorer(classes)(batch)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_it_does_not_matter_what_the_other_samples_of_a_batch_are(ensemble, tiny, batch):
    together = probabilities(ensemble, tiny.pool.classes, batch)
    assert torch.allclose(together.sum(1), torch.ones(12).double(), atol=1e-5)
    small = tiny.seed.batches(tiny.pool.test, tiny.pool.classes, 5)
    apart = torch.cat([probabilities(ensemble, tiny.pool.classes, part) for part in small])
    assert torch.allclose(apart, together, atol=1e-5)


@pytest.mark.parametrize("classes", [[], ["red disc"]], ids=str)
def test_there_must_be_something_to_choose_from(classes, ensemble):
    with pytest.raises(ValueError, match="of classes, of which it needs two"):
        ensemble.scorer(classes)


@torch.no_grad()
@pytest.mark.parametrize("weighted", [False, True])
def test_plain_text_has_the_mean_of_its_probabilities_token_by_token_by_bayes_rule(weighted):
    """Which is what a mean over whole texts comes to. At every second place the most probable token
    of the mixture is the one that follows."""
    seed = seed_of()
    members = [model("llama", random_state=k) for k in (0, 1)]
    vectors = torch.randn(2, seed.embedding_size, generator=torch.Generator().manual_seed(0))
    given = (vectors, torch.tensor([0.3, 0.0])) if weighted else ()
    ensemble, batch = Ensemble(seed, members, *given), only(seed, REPLIES)
    first = ensemble.log_weights(batch).double().exp().expand(len(batch["labels"]), 2)
    assert weighted == bool((first[:, 0] - first[:, 1]).abs().max() > 0.1)
    asked = batch["input_ids"], batch["attention_mask"], batch["asked"]
    size, totals, counts, differs = batch["labels"].shape[1], [], [], 0
    each = [seed.logits(member, *asked, size).double().softmax(-1) for member in members]
    for row, label in enumerate(batch["labels"]):
        weights, total, right = first[row], 0.0, 0
        for number, place in enumerate((label != -100).nonzero()[:, 0].tolist()):
            follows = torch.stack([probabilities[row, place - 1] for probabilities in each])
            likeliest = (weights @ follows).argmax()
            differs += bool((likeliest != follows.argmax(1)).any())
            if number % 2:
                label[place] = likeliest
            right += bool(label[place] == likeliest)
            of_token = follows[:, label[place]]
            total += (weights @ of_token).log().item()
            weights = weights * of_token / (weights @ of_token)
        totals.append(total)
        counts.append(right)
    found = ensemble.scorer([])(batch)
    assert found[:, 0].tolist() == pytest.approx(totals, rel=1e-4)
    assert found[:, 1].tolist() == counts and differs > sum(counts) / 2 > 0


@torch.no_grad()
def test_mixture_of_one_is_that_one():
    seed = seed_of()
    batch, task = only(seed, REPLIES), seed.task([])
    member = model("llama", random_state=1)
    wanted = task.scores(member, batch)
    assert torch.allclose(task.mixed([member], torch.zeros(1, 1), batch), wanted)


def test_every_member_is_active_and_so_is_the_seed_if_it_chooses_the_weights(
    tiny, experts, classifier
):
    one = tiny.seed.backbone
    size, backbones = (
        sum(p.numel() for p in one.parameters()),
        [e.backbone for e in experts.values()],
    )
    equal, weighted = Ensemble(tiny.seed, backbones), Ensemble(tiny.seed, backbones, *classifier)
    assert equal.count_parameters() == dict(total=3 * size, active=3 * size)
    count = 4 * size + 3 * 32 + 3
    assert weighted.count_parameters() == dict(total=count, active=count)


def test_an_ensemble_answers_for_every_domain(ensemble):
    assert ensemble.for_domain("a") is ensemble.for_domain("nobody") is ensemble


# ---- a model for each client


def test_everybody_has_a_model(experts):
    personal = Personal(experts)
    assert all(personal.for_domain(name) is experts[name] for name in "abc")
    with pytest.raises(ValueError, match="no client 'd'; there are a, b, c"):
        personal.for_domain("d")


def test_models_for_each_client_cannot_be_scored_as_one(experts, tiny):
    with pytest.raises(TypeError, match="ask `for_domain`"):
        Personal(experts).scorer(tiny.pool.classes)


def test_a_sample_meets_one_model_and_the_largest_is_counted(experts, merge_with):
    largest = merge_with(top_k=3)
    one, two = experts["a"].count_parameters(), largest.count_parameters()
    assert two["total"] > one["total"]
    assert Personal(experts).count_parameters() == one
    assert Personal(dict(a=experts["a"], b=largest)).count_parameters() == two


# ---- their folders


def test_saved_ensemble_comes_back_the_same(ensemble, tiny, batch, tmp_path):
    folder = ensemble.save(tmp_path / "model", dict(method="a test"))
    assert read_manifest(folder, "model")["inputs"] == dict(method="a test")
    again = load_model(folder)
    assert type(again) is Ensemble and again.seed.name == tiny.seed.name
    if ensemble.vectors is not None:  # the seed is needed for the weights alone
        assert again.seed.identity == tiny.seed.identity
    assert all(same(one, two) for one, two in zip(again.backbones, ensemble.backbones))
    assert again.count_parameters() == ensemble.count_parameters()
    found, wanted = (probabilities(e, tiny.pool.classes, batch) for e in (again, ensemble))
    assert torch.equal(found, wanted)


def test_saved_models_of_all_clients_come_back_under_their_names_and_of_their_kinds(
    experts, tiny, merge_with, tmp_path
):
    equal = Ensemble(tiny.seed, [expert.backbone for expert in experts.values()])
    members = dict(zoe=merge_with(top_k=2), a=experts["a"], b=equal)
    again = load_model(Personal(members).save(tmp_path / "model"))
    assert type(again) is Personal and list(again.members) == list(members)
    for name, member in members.items():
        assert type(again.for_domain(name)) is type(member)
        assert again.for_domain(name).count_parameters() == member.count_parameters()
    for name in ("zoe", "a"):
        assert same(again.for_domain(name).backbone, members[name].backbone)


@pytest.mark.parametrize("which", ["vectors", "member"])
def test_ensemble_with_a_number_that_is_not_finite_is_not_saved(
    which, tiny, experts, classifier, tmp_path
):
    backbones, (vectors, biases) = [tiny.seed.new_backbone()], classifier
    vectors = vectors[:1].clone()
    with torch.no_grad():
        (vectors if which == "vectors" else next(backbones[0].parameters())).view(-1)[0] = torch.inf
    with pytest.raises(FloatingPointError, match="is not finite"):
        Ensemble(tiny.seed, backbones, vectors, biases[:1]).save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_damaged_member_is_named(experts, tiny, tmp_path):
    backbones = [expert.backbone for expert in experts.values()]
    folder = Ensemble(tiny.seed, backbones).save(tmp_path / "model")
    file = folder / "1" / "open_clip_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="1/open_clip_model.*was changed after it was written"):
        load_model(folder)
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_model(tmp_path / "nothing")


def test_classifier_of_another_number_of_members_is_refused(tiny, classifier, tmp_path):
    vectors, biases = classifier
    folder = Ensemble(tiny.seed, [tiny.seed.backbone] * 2, vectors, biases).save(tmp_path / "model")
    with pytest.raises(ValueError, match="does not hold the vectors and biases of 2 members"):
        read_model(folder)


@pytest.mark.parametrize(
    "change", [dict(members=0), dict(members="many"), dict(kind="no")], ids=str
)
def test_facts_that_cannot_be_are_refused_and_the_file_is_named(change, tiny, tmp_path):
    file = Ensemble(tiny.seed, [tiny.seed.backbone]).save(tmp_path / "model") / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="model.json"):
        read_model(tmp_path / "model")


def test_facts_are_checked_by_themselves_too():
    with pytest.raises(ValueError, match="members is 0, but must be positive"):
        EnsembleFacts(0, False)
    with pytest.raises(ValueError, match="members must be at least one"):
        PersonalFacts([])
    for names in (["a", "a"], ["a", "A"]):
        with pytest.raises(ValueError, match="two clients are called"):
            PersonalFacts(names)
    for name in ("../a", "/a", "", ".a", "seed", "St. Mary"):
        with pytest.raises(ValueError, match="the client's name"):
            PersonalFacts(["b", name])


def test_members_have_names_that_a_client_may_have(tiny, tmp_path):
    "Of models that are made, before they are trained, and of models that are read."
    one = Model(tiny.seed, tiny.seed.backbone)
    with pytest.raises(ValueError, match="the client's name '../a'"):
        Personal({"../a": one})
    file = Personal({"a": one}).save(tmp_path / "model") / "model.json"
    file.write_text(file.read_text().replace('"a"', '"../a"'))
    with pytest.raises(ValueError, match="model.json: .*the client's name '../a'"):
        read_model(tmp_path / "model")


def test_a_dense_model_answers_for_every_domain_too(experts):
    assert type(experts["a"]) is Model and experts["a"].for_domain("b") is experts["a"]
