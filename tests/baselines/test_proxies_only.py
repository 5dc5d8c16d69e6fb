"HarmoMoE without private data in the experts."

from harmomoe.baselines.proxies_only import proxies_only
from harmomoe.client.client import Client


def test_experts_never_see_a_private_image(play, tiny, rows):
    played = play("proxies_only")
    for domain, bundle in zip(tiny.clients, played.received):
        client = Client(played.public, domain, played.work / domain.name)
        private, public = client.training_data
        assert rows(private) == {("pool", "train", row) for row in bundle.ids.tolist()}
        assert public is None


def test_nothing_else_is_different(tiny):
    config = proxies_only.adjust(tiny.settings)
    assert (config.expert.private, config.expert.proxies) == (False, True)
    for part in ("relevance", "proxies", "routing", "router", "finetune", "random_state"):
        assert getattr(config, part) == getattr(tiny.settings, part)
