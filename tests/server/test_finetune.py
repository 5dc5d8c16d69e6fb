"The last step: what it moves, what it leaves, and on which samples."

import pytest
import torch
from networks import close, embed, moved, same, weights

from harmomoe.config.settings import changed
from harmomoe.models.model import load_model
from harmomoe.models.training import Checkpoint
from harmomoe.moe.context import FORMS, vector_size
from harmomoe.server.finetune import finetune, proxy_union


@pytest.fixture(scope="session")
def tune(tiny):
    "A function (model, changes of `Config.finetune`, random state) that fine-tunes on few samples."

    def run(model, data=None, random_state=0, checkpoint=None, **changes):
        changes = {f"finetune.{name}": value for name, value in (dict(epochs=1) | changes).items()}
        config = changed(tiny.settings, changes | dict(random_state=random_state))
        public = tiny.public.with_config(config)
        finetune(model, data or tiny.pool.test, public, checkpoint=checkpoint)
        return model

    return run


# ---- what learns


def test_it_moves_routers_lambda_and_factors_and_nothing_else(merge_with, tune, tiny):
    model = merge_with(top_k=2)
    before = weights(model.backbone)
    tune(model, tiny.pool.train, epochs=3)
    changes = moved(model.backbone, before)
    assert changes == {name for name, p in model.backbone.named_parameters() if p.requires_grad}
    assert len(changes) == 2 * 6
    assert len(model.losses) == 3 and model.losses[-1] < model.losses[0]


def test_b_alone_leaves_every_a_as_it_came_and_able_to_learn_again(merge_with, tune):
    model = merge_with(top_k=2)
    before = weights(model.backbone)
    changes = moved(tune(model, factors="B").backbone, before)
    assert len(changes) == 2 * 4 and not any(".a." in name for name in changes)
    assert {".b." in name for name in changes} == {True, False}
    before = weights(model.backbone)
    assert len(moved(tune(model).backbone, before)) == 2 * 6


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_routers_of_a_top_one_model_learn(optimizer, merge_with, tune):
    """With weights divided by their sum, the one weight would be 1 and the router would get no
    gradient."""
    for divided in (False, True):
        model = merge_with(top_k=1, norm_topk_prob=divided)
        before = weights(model.backbone)
        changes = moved(tune(model, optimizer=optimizer).backbone, before)
        vectors = {name for name in changes if name.endswith("router.vectors")}
        assert len(vectors) == (0 if divided else 2)


def test_fixed_lambda_stays(merge_with, tune):
    fixed = tune(merge_with(learn_lam=False))
    assert {layer.router.lam.item() for layer in fixed.layers} == {torch.tensor(0.3).item()}


def test_no_epochs_change_nothing(merge_with, tune):
    still = merge_with()
    before = weights(still.backbone)
    assert tune(still, epochs=0).losses == [] and not moved(still.backbone, before)


@pytest.mark.parametrize("form", [*FORMS, "random"])
def test_biases_are_there_to_be_trained_where_vectors_are_density_ratios(
    form, merge_with, tune, tiny
):
    model, ratios = merge_with(form=form), form not in ("mean", "random")
    before = weights(model.backbone)
    biases = {name for name in before if name.endswith("router.biases")}
    assert biases == {f"{layer}.router.biases" for layer in tiny.seed.layers if ratios}
    assert biases <= moved(tune(model).backbone, before)
    width = vector_size("mean" if form == "random" else form, 64, 256)
    count = 2 * (4 * (width + ratios) + 1)
    assert model.parameter_groups()["routers"] == count


@pytest.mark.parametrize("lam, learn_lam", [(0.3, True), (1.0, True), (0.0, False)])
def test_both_halves_of_the_vectors_move_unless_lambda_stays_zero(lam, learn_lam, merge_with, tune):
    model = merge_with(form="moments", lam=lam, learn_lam=learn_lam)
    before = [layer.router.vectors.detach().clone() for layer in model.layers]
    for layer, old in zip(tune(model).layers, before):
        of_token, of_spread = (layer.router.vectors != old).split(64, 1)
        assert of_token.any() and of_spread.any() == learn_lam
        if learn_lam:
            assert of_token.any(1).all() and of_spread.any(1).all()  # those of every expert


@pytest.mark.parametrize("form", ["logistic", "moments"])
def test_what_an_optimiser_leaves_is_saved_as_it_is(form, merge_with, tune, tiny, tmp_path):
    "A lambda beyond 1 too, which counts as 1."
    model, [batch] = tune(merge_with(form=form)), tiny.seed.batches(tiny.pool.test)
    with torch.no_grad():
        model.layers[0].router.lam.fill_(1.2)
        again = load_model(model.save(tmp_path / "model"))
        found, wanted = (one.scorer(tiny.pool.classes)(batch) for one in (again, model))
    assert torch.equal(found, wanted) and same(again.backbone, model.backbone)
    assert all(p.requires_grad for p in again.layers[0].router.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_model_gives_an_image_the_same_embedding_in_every_batch(form, merge_with, tune, tiny):
    data, model = tiny.a.test, tune(merge_with(form=form))
    together = embed(model, data)
    for batch_size in (1, 5):
        assert close(embed(model, data, batch_size), together)
    assert close(embed(model, data.select(range(11, -1, -1))), together.flip(0))


# ---- how it repeats


def test_it_repeats_bit_by_bit_and_another_random_state_takes_another_order(merge_with, tune):
    small = dict(batch_size=8)  # several batches, so that their order matters
    one, two, other = (tune(merge_with(), random_state=state, **small) for state in (3, 3, 4))
    assert one.losses == two.losses != other.losses
    assert same(one.backbone, two.backbone) and not same(one.backbone, other.backbone)


def test_interrupted_it_goes_on_from_its_checkpoint(merge_with, tune, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "due", lambda self: True)
    whole, half, again = merge_with(), merge_with(), merge_with()
    tune(whole, epochs=3, batch_size=6)
    write, written = Checkpoint.write, []

    def interrupted(self, *state):
        write(self, *state)
        written.append(1)
        if len(written) == 4:  # of the six batches
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(half, checkpoint=Checkpoint(tmp_path), epochs=3, batch_size=6)
    tune(again, checkpoint=Checkpoint(tmp_path), epochs=3, batch_size=6)
    assert len(written) == 6 and again.losses == whole.losses
    assert same(again.backbone, whole.backbone)


# ---- the samples


def test_union_of_proxies_has_each_sample_once_in_the_order_of_the_pool(tiny):
    union = proxy_union(tiny.bundles, tiny.public)
    rows = sorted(set().union(*(bundle.ids.tolist() for bundle in tiny.bundles)))
    assert len(rows) < sum(len(bundle.ids) for bundle in tiny.bundles)
    wanted = tiny.pool.train.select(rows)
    assert union.features == wanted.features and union["label"] == wanted["label"]
    assert [image.tobytes() for image in union["image"]] == [
        image.tobytes() for image in wanted["image"]
    ]


def test_union_does_not_depend_on_the_order_of_the_clients(tiny):
    one, other = (proxy_union(sent, tiny.public) for sent in (tiny.bundles, tiny.bundles[::-1]))
    assert one["label"] == other["label"] and len(one) == len(other)
    assert one[0]["image"].tobytes() == other[0]["image"].tobytes()
