"What several test files use to make and compare tensors and networks."

import numpy as np
import torch


def normal(*size, random_state=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(random_state))


def spread(z, axis):
    "The standard deviation as it is defined, in float64, at least 0.001."
    return np.sqrt(np.asarray(z, np.float64).var(axis) + 1e-6)


def weights(module):
    "A copy of everything that a network knows."
    return {name: value.clone() for name, value in module.state_dict().items()}


def moved(module, before):
    "Names of the weights that are not what they were."
    after = module.state_dict()
    assert after.keys() == before.keys()
    return {name for name in before if not torch.equal(after[name], before[name])}


def same(one, two):
    "Whether two networks are equal bit by bit."
    return not moved(one, weights(two))


def close(one, two, atol=1e-5):
    return torch.allclose(one, two, atol=atol)


@torch.no_grad()
def embed(model, data, batch_size=64):
    "What a model's backbone makes of a data set, float32 [n, d]."
    batches = model.seed.batches(data, batch_size=batch_size)
    return torch.cat([model.seed.hidden(model.backbone, batch) for batch in batches])
