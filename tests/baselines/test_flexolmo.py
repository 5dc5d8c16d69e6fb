"Experts that are trained beside the public one."

import shutil

import pytest
import torch
from helpers import kept, routing_of
from watching import equal, untrained

from harmomoe.base.artefacts import read_manifest, stages_run
from harmomoe.baselines.flexolmo import AnchoredClient, anchored_pair, flexolmo
from harmomoe.bundle.files import read_bundle
from harmomoe.config.settings import changed
from harmomoe.data.samples import labelled, union_label_space
from harmomoe.describe.routing import layer_means
from harmomoe.models.training import Checkpoint, train

OTHERS = "flexolmo_dpp", "flexolmo_random"
pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def public_of(tiny, changes={}):
    "What everybody has, with FlexOlmo's settings."
    return tiny.public.with_config(flexolmo.adjust(changed(tiny.settings, changes)))


def trained_pair(client):
    "The Mixture of two that a client trains."
    public, domain, config = client.public, client.domain, client.public.config
    pair = anchored_pair(public, domain.name, client.start())
    classes = union_label_space(domain.classes, public.pool.classes)
    given = labelled(domain.train), classes, config.expert, config.random_state
    pair.losses = train(public.seed, pair.backbone, *given)
    return pair


def test_it_trains_one_line_beside_the_public_one_and_sends_the_pair(tiny, logits, tmp_path):
    public = public_of(tiny, {"expert.weight_decay": 0.1})
    client = AnchoredClient(public, tiny.a, tmp_path)
    pair, bundle = trained_pair(client), read_bundle(client.bundle(), public)
    assert read_manifest(client.expert)["facts"]["losses"] == pair.losses
    for index, (path, layer) in enumerate(zip(tiny.seed.layers, pair.layers)):
        router = layer.router
        assert not router.vectors[0].any() and router.biases[0] == 0
        assert router.biases[1] != 0 and router.lam == 0
        assert torch.equal(routing_of(bundle).vectors[index], router.vectors[1])
        assert torch.equal(routing_of(bundle).biases[index], router.biases[1])
        for linear in tiny.seed.ffn.linears:
            a, b = bundle.factors[path, linear]
            assert torch.equal(a, layer.a[linear]) and torch.equal(b, layer.b[linear].T) and b.any()
    both = public.with_config(changed(untrained(public.config), {"router.top_k": 2}))
    merged = flexolmo.serve([bundle], both)
    assert torch.allclose(logits(merged)["all"], logits(pair)["all"], atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"router.context": "prompt"},
        {"router.context": "prefix", "router.form": "logistic", "routing.beginnings": 3},
    ],
    ids=str,
)
def test_lines_start_from_the_difference_of_two_means_over_whole_samples(change, tiny, tmp_path):
    client = AnchoredClient(public_of(tiny, change), tiny.a, tmp_path)
    data = tiny.a.train, tiny.public.sample
    own, all_ = (layer_means(tiny.seed, tiny.seed.backbone, part).mean(1) for part in data)
    assert torch.allclose(client.start(), own - all_, atol=1e-6)


@pytest.mark.parametrize("client", "abc")
def test_all_its_forms_share_one_expert(client, play):
    for name in ("flexolmo", *OTHERS):
        assert len(kept(play(name).work / client, "anchored")) == 1


def test_what_the_server_alone_decides_trains_nothing_anew_and_what_an_expert_depends_on_does(
    play, tiny, tmp_path
):
    folder = shutil.copytree(play("flexolmo").work / "a", tmp_path / "a")
    public_of(tiny).means("mean")  # everybody has them; whether this process has depends on others
    for changes, wanted in (
        ({}, []),
        ({"router.top_k": 2, "router.form": "moments", "finetune.epochs": 7}, []),
        ({"proxies.number": 11}, ["proxies"]),
        ({"expert.epochs": 1}, ["anchored"]),
        ({"routing.public_samples": 39}, ["means", "anchored"]),
    ):
        client = AnchoredClient(public_of(tiny, changes), tiny.a, folder)
        with stages_run() as ran:
            client.bundle()
        assert ran == wanted, changes


def test_an_expert_that_is_interrupted_goes_on_where_it_was(play, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "due", lambda self: True)
    client, task, learnt = AnchoredClient(public_of(tiny), tiny.a, tmp_path), tiny.seed.task, []

    def task_that_ends(classes):
        found = task(classes)
        loss = found.loss

        def counted(backbone, batch):
            if len(learnt) == 3:
                raise KeyboardInterrupt
            learnt.append(batch)
            return loss(backbone, batch)

        found.loss = counted
        return found

    monkeypatch.setattr(tiny.seed, "task", task_that_ends)
    with pytest.raises(KeyboardInterrupt):
        client.expert
    learnt.clear()
    monkeypatch.setattr(AnchoredClient, "start", None)  # was looked for once
    [whole] = kept(play("flexolmo").work / "a", "anchored")
    assert read_manifest(client.expert)["files"] == read_manifest(whole)["files"]
    assert len(learnt) == 1  # the last of two epochs of two batches


def test_weights_of_the_experts_sum_to_one_as_those_of_a_pair(play, tiny):
    played = play("flexolmo")
    config = changed(untrained(played.public.config), {"router.top_k": 2})
    merged = flexolmo.serve(played.received, played.public.with_config(config))
    for layer in merged.layers:
        weights, _ = layer.router(torch.randn(1, 5, tiny.seed.width))
        assert len(layer.router.vectors) == 4 and weights.shape[-1] == 2
        assert torch.allclose(weights.sum(-1), torch.ones(1, 5))


@pytest.mark.parametrize("name", OTHERS)
def test_its_forms_differ_in_the_proxies_alone(name, play):
    for one, two in zip(play("flexolmo").received, play(name).received):
        assert one.ids.tolist() != two.ids.tolist()
        for key, pair in one.factors.items():
            assert equal(pair, two.factors[key])
        assert torch.equal(routing_of(one).vectors, routing_of(two).vectors)
        assert torch.equal(routing_of(one).biases, routing_of(two).biases)
