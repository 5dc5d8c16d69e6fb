"""An expert and its gate: the loss against its definition, what may move and what must not, and
the two halves taken apart."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harmomoe.base.artefacts import read_manifest, stages_run
from harmomoe.bundle.files import read_bundle
from harmomoe.client.client import Client
from harmomoe.client.expert import expert_factors, load_adapter, load_expert
from harmomoe.client.gate import GateLoss, gated_pair, take_apart, train_gate
from harmomoe.config.settings import GateSettings, changed
from harmomoe.data.samples import labelled, union_label_space
from harmomoe.models.training import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
GATED = {"router.form": "evidence", "router.seed_expert": True, "gate.epochs": 2}
GATED |= {"gate.batch_size": 8, "router.top_k": 2, "router.norm_topk_prob": True}


@pytest.fixture(scope="module")
def gated(tiny, tmp_path_factory):
    "Client a with a gate: its expert before, its routing before, and the pair of both."
    public = tiny.public.with_config(changed(tiny.settings, GATED))
    folder = tmp_path_factory.mktemp("gated")
    client = Client(public, tiny.a, folder)
    plain = Client(public.with_config(changed(public.config, {"gate.epochs": 0})), tiny.a, folder)
    start = plain.routing_of("evidence")
    adapter = load_adapter(public.seed, plain.expert)
    given = public, "a", tiny.a.classes, *client.training_data, adapter, start
    pair = lambda: gated_pair(public, "a", adapter, start)
    return SimpleNamespace(client=client, plain=plain, public=public, given=given, pair=pair)


def loss_of(gated, pair):
    private, proxies = gated.client.training_data
    per_private = len(proxies) / len(private)
    return GateLoss(pair, gated.public, gated.client.domain.classes, proxies, per_private)


def weights(pair):
    return {name: p.detach().clone() for name, p in pair.backbone.named_parameters()}


# ---- the pair


def test_wide_open_it_is_the_expert_and_shut_it_is_the_seed(gated, tiny):
    pair, seed = gated.pair(), gated.public.seed
    expert = load_expert(seed, gated.plain.expert)
    batch = next(iter(seed.batches(tiny.a.train)))
    for opened, wanted in ((1e4, expert), (-1e4, seed.backbone)):
        for layer in pair.layers:
            layer.router.shift = torch.tensor([0.0, opened])
        with torch.no_grad():
            found, wanted = (seed.hidden(one, batch) for one in (pair.backbone, wanted))
        assert torch.allclose(found, wanted, atol=1e-5)


def test_taken_apart_and_put_together_it_is_the_same(gated):
    pair = gated.pair()
    adapter, routing = take_apart(pair, gated.public.config.expert)
    again = gated_pair(gated.public, "a", adapter, routing)
    assert routing.form == "evidence"
    before, after = weights(pair), weights(again)
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---- the loss


def test_the_loss_is_its_definition(gated, tiny):
    "Against three separate passes, with the drawn samples and openings drawn again."
    pair, public, settings = gated.pair(), gated.public, gated.public.config.gate
    loss, seed = loss_of(gated, pair), gated.public.seed
    private, proxies = gated.client.training_data
    space = union_label_space(tiny.a.classes, public.pool.classes)
    batch = next(iter(seed.batches(labelled(private.select(range(6))), space)))
    torch.manual_seed(3)
    found = loss.of(pair.backbone, batch)
    torch.manual_seed(3)
    own = torch.randint(len(proxies), (round(6 * len(proxies) / len(private)),))
    rows = torch.randint(len(public.pool.train), (6,))
    opened = torch.empty(12 + len(own)).uniform_(settings.least_open, settings.most_open)
    some = next(iter(seed.batches(labelled(proxies.select(own.tolist())), space)))
    drawn = next(iter(seed.batches(public.pool.train.select(rows.tolist()))))
    images = torch.cat([part["images"] for part in (batch, some, drawn)])
    hidden, gates = [], []
    for image, by in zip(images, opened):  # one by one: no sample depends on another
        for layer in pair.layers:
            layer.router.shift = torch.tensor([0.0, by])
        loss.said.clear()
        hidden.append(seed.hidden(pair.backbone, dict(images=image[None])))
        gates.append(torch.stack(loss.said)[:, 0])
    hidden, gates = torch.cat(hidden), torch.stack(gates, 1)
    n = 6 + len(own)
    targets = torch.cat([batch["targets"], some["targets"]])
    right = F.cross_entropy(seed.task(space).compare(hidden[:n]), targets)
    pool = seed.task(public.pool.classes)
    with torch.no_grad():
        p = pool.compare(seed.hidden(seed.backbone, drawn)).softmax(1)
    apart = (p * (p.log() - pool.compare(hidden[n:]).log_softmax(1))).sum(1).mean()
    y = (torch.arange(len(images)) < 6).float()
    told = -(y * F.logsigmoid(gates) + (1 - y) * F.logsigmoid(-gates)).mean()
    wanted = right + settings.keep * apart + settings.tell * told
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert min(right, apart, told) > 1e-3  # each term counts


def test_the_gate_is_heard_as_it_is_without_the_push(gated, tiny):
    "Log odds that the loss hears, against the router's own logits, in float64."
    pair = gated.pair()
    pair.backbone.double()
    loss, seed = loss_of(gated, pair), gated.public.seed
    images = next(iter(seed.batches(tiny.a.train.select(range(5)))))
    heard = []
    for push in (0.0, 5.0, -3.0):
        for layer in pair.layers:
            layer.router.shift = torch.tensor([[0.0, push]]).expand(5, 2)
        loss.said.clear()
        with torch.no_grad():
            seed.hidden(pair.backbone, images)
        heard.append(loss.said[0])  # the first layer's input does not depend on the push
        assert len(loss.said) == len(pair.layers)
    assert torch.allclose(heard[0], heard[1], atol=1e-6)
    assert torch.allclose(heard[0], heard[2], atol=1e-6)
    total = pair.layers[0].router.total[:, 0]
    assert torch.allclose(heard[0], total[:, 1] - total[:, 0], atol=1e-6)


# ---- training


def test_only_the_expert_and_its_gate_move(gated):
    expert, gate, losses = train_gate(*gated.given)
    pair, start = gated.pair(), gated.given[-1]
    again = gated_pair(gated.public, "a", expert, gate)
    before, after = weights(pair), weights(again)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    learning = {name for name in before if ".router." in name or ".a." in name or ".b." in name}
    assert moved == {name for name in learning if not name.endswith("lam")}
    assert len(losses) == 2 and all(np.isfinite(losses))
    for name, p in after.items():
        if name.endswith(("router.vectors", "router.biases")):
            assert not p[0].any()  # the seed's own line
    assert not torch.equal(gate.vectors, start.vectors)
    adapter = gated.given[-2]
    same = lambda x, y: all(
        torch.equal(*z) for pair in zip(x.values(), y.values()) for z in zip(*pair)
    )
    fresh = load_adapter(gated.public.seed, gated.plain.expert)
    assert same(*(expert_factors(gated.public.seed, one) for one in (adapter, fresh)))


def test_without_a_rate_of_its_own_the_gate_stays(gated):
    public = gated.public.with_config(changed(gated.public.config, {"gate.gate_rate": 0.0}))
    _, gate, _ = train_gate(public, *gated.given[1:])
    assert torch.equal(gate.vectors, gated.given[-1].vectors)


def test_it_keeps_nearer_to_the_seed_the_more_that_counts(gated):
    "Divergence from the seed's answers on the pool, wide open."
    seed, pool = gated.public.seed, gated.public.pool
    task = seed.task(pool.classes)
    batch = next(iter(seed.batches(pool.train)))
    apart = []
    for keep in (0.0, 30.0):
        changes = {"gate.keep": keep, "gate.epochs": 6, "gate.learning_rate": 3e-3}
        public = gated.public.with_config(changed(gated.public.config, changes))
        expert, *_ = train_gate(public, *gated.given[1:])
        with torch.no_grad():
            p, q = (
                task.scores(one, batch).log_softmax(1)
                for one in (seed.backbone, expert.merge_and_unload())
            )
        apart.append(F.kl_div(q, p, log_target=True, reduction="batchmean").item())
    assert apart[1] < 0.7 * apart[0]


def test_interrupted_it_ends_as_if_it_had_not_been(gated, tmp_path, monkeypatch):
    whole = train_gate(*gated.given)
    passes, of = [], GateLoss.of

    def interrupted(self, backbone, batch):
        passes.append(batch)
        if len(passes) > 5:
            raise KeyboardInterrupt
        return of(self, backbone, batch)

    monkeypatch.setattr(GateLoss, "of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_gate(*gated.given, Checkpoint(tmp_path, seconds=0))
    monkeypatch.undo()
    again = train_gate(*gated.given, Checkpoint(tmp_path, seconds=0))
    assert again[2] == whole[2] and torch.equal(again[1].vectors, whole[1].vectors)
    seed = gated.public.seed
    one, other = (expert_factors(seed, found[0]) for found in (whole, again))
    assert all(torch.equal(a, b) for x in one for a, b in zip(one[x], other[x]))


def test_a_seed_that_compares_nothing_is_refused_before_any_work(gated, monkeypatch):
    task = type(gated.public.seed.task(["x", "y"]))
    monkeypatch.setattr(task, "two_steps", False)
    with pytest.raises(ValueError, match="gate.epochs is 2, but .* is no image seed"):
        train_gate(*gated.given)


# ---- the client


def test_a_client_sends_what_was_trained_on(gated, tmp_path):
    bundle = read_bundle(gated.client.bundle(tmp_path / "bundle"), gated.public)
    expert, gate, losses = train_gate(*gated.given)
    sent = bundle.routing["evidence"]
    assert torch.equal(sent.vectors, gate.vectors) and torch.equal(sent.biases, gate.biases)
    for key, (a, b) in expert_factors(gated.public.seed, expert).items():
        assert torch.equal(bundle.factors[key][0], a) and torch.equal(bundle.factors[key][1], b)
    assert read_manifest(gated.client.expert)["facts"]["losses"] == losses
    other = read_bundle(gated.plain.bundle(tmp_path / "plain"), gated.plain.public)
    assert set(other.routing) == set(bundle.routing)
    assert not torch.equal(other.routing["evidence"].vectors, sent.vectors)


def test_what_a_gate_does_not_depend_on_is_not_computed_again(gated):
    gated.client.bundle()
    for changes, wanted in (
        ({}, []),
        ({"router.seed_logit": -2.0, "finetune.epochs": 7}, []),
        ({"gate.keep": 2.0}, ["gate"]),
        ({"gate.epochs": 0}, []),
    ):
        public = gated.public.with_config(changed(gated.public.config, changes))
        with stages_run() as ran:
            Client(public, gated.client.domain, gated.client.folder).expert
        assert ran == wanted, changes


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="least_open is 3.0, but must not exceed most_open"):
        GateSettings(least_open=3, most_open=1)
    with pytest.raises(ValueError, match="keep is -1"):
        GateSettings(keep=-1)
    assert GateSettings().epochs == 0
