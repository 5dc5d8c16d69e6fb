"Routers that learn whose sample it is."

from dataclasses import replace

import pytest
import torch

from harmomoe.baselines.moa import domain_loss, owned_proxies
from harmomoe.describe.routing import layer_means

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def test_each_clients_proxies_have_its_name_and_shared_ones_both_names(tiny, rows):
    same = [replace(bundle, ids=tiny.bundles[0].ids) for bundle in tiny.bundles[:2]]
    for bundles in (tiny.bundles, same):
        data = owned_proxies(bundles, tiny.public)
        assert data["class_name"] == [bundle.client for bundle in bundles for _ in range(12)]
        for index, bundle in enumerate(bundles):
            for place, row in enumerate(bundle.ids.tolist()):
                assert rows(data.select([12 * index + place])) == {("pool", "train", row)}


def test_the_loss_is_minus_log_pi_of_the_owner_in_every_layer(play, tiny):
    model, data, targets = play("moa").model, tiny.pool.test, torch.arange(12) % 3
    [batch] = tiny.seed.batches(data)
    found = domain_loss(model)(model.backbone, dict(batch, targets=targets))
    means = layer_means(tiny.seed, model.backbone, data, 12)
    logits = torch.stack([z @ layer.router.vectors.T for z, layer in zip(means, model.layers)])
    assert model.experts == ["a", "b", "c"]
    wanted = -logits.double().log_softmax(-1)[:, range(12), targets].mean()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-5)
