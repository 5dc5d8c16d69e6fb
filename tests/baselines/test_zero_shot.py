"The clients' experts as they were sent."

import pytest
import torch
from watching import members

from harmomoe.baselines.zero_shot import matching
from harmomoe.client.expert import load_expert
from harmomoe.models.model import Model

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def test_matching_experts_are_harmomoes_own_each_for_the_client_that_sent_it(play, tiny, logits):
    "They are trained on proxies too, unlike separate experts."
    models = play("matching experts").model.members
    assert list(models) == [bundle.client for bundle in tiny.bundles]
    assert len({id(model.backbone) for model in models.values()}) == 3
    apart = members(play("expert").model)
    for bundle in tiny.bundles:
        wanted = logits(Model(tiny.seed, load_expert(tiny.seed, bundle.folder)))["all"]
        own, separate = (logits(which[bundle.client])["all"] for which in (models, apart))
        assert type(models[bundle.client]) is Model
        assert torch.allclose(own, wanted, atol=1e-4)
        assert not torch.allclose(own, separate, atol=1e-2)
    assert list(matching.serve(tiny.bundles[1:2], tiny.public).members) == ["b"]


def test_separate_experts_are_those_that_clients_trained_on_private_data_alone(play, tiny, logits):
    played = play("expert")
    for domain in tiny.clients:
        client = played.method.client(played.public, domain, played.work / domain.name)
        assert client.training_data[1] is None
        wanted = logits(Model(tiny.seed, load_expert(tiny.seed, client.expert)))["all"]
        found = logits(played.model.for_domain(domain.name))["all"]
        assert torch.allclose(found, wanted, atol=1e-4)
