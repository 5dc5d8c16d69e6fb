"What tests ask of small language models, and how they change them."

import torch
from safetensors.torch import load_file, save_file

GATED = ["gate_proj", "up_proj", "down_proj"]
TOKENS = torch.randint(3, 250, (2, 14), generator=torch.Generator().manual_seed(0))


def logits(backbone):
    with torch.no_grad():
        return backbone(TOKENS).logits


@torch.no_grad()
def randomise(model):
    "Experts and routers of a unified model become random numbers."
    for layer in model.layers:
        for p in (*layer.a.values(), *layer.b.values(), layer.router.vectors):
            p.normal_(std=0.3)
        if layer.router.biases is not None:
            layer.router.biases.normal_()
        if hasattr(layer.router, "center"):
            layer.router.center.normal_(std=0.3)
            layer.router.scale.uniform_(0.5, 2)


@torch.no_grad()
def merged(seed, expert):
    "The seed's backbone with the expert's change, added in float64."
    backbone = seed.new_backbone()
    for (path, linear), (a, b) in expert.factors.items():
        weight = getattr(backbone.get_submodule(path), linear).weight
        weight.copy_(weight.double() + expert.scale * b.double() @ a.double())
    return backbone


@torch.no_grad()
def moved(seed, parts=("mlp",), random_state=1, size=0.05):
    "A backbone of the seed whose weights moved wherever one of these is in the name."
    backbone, generator = seed.new_backbone(), torch.Generator().manual_seed(random_state)
    for name, p in backbone.named_parameters():
        if any(part in name for part in parts):
            p += size * torch.randn(p.shape, generator=generator)
    return backbone


def edit(folder, name, change):
    "Rewrite the tensors of a safetensors file."
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})
