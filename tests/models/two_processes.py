"""What one process and two are to do alike. `accelerate launch` runs this file in two, and the
tests call the same functions in one."""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from datasets import concatenate_datasets
from families import ABC, QUESTIONS, cut, seed_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from harmomoe.base.artefacts import by_main, stages_run, world
from harmomoe.base.process import seeded
from harmomoe.client.client import Client
from harmomoe.config.settings import (
    Config,
    ExpertSettings,
    FinetuneSettings,
    ProxySettings,
    RoutingSettings,
)
from harmomoe.data.domains import load_benchmark
from harmomoe.describe.public import Public
from harmomoe.models import training
from harmomoe.models.training import Checkpoint, Training, join, train
from harmomoe.models.unified import UnifiedModel
from harmomoe.models.weights import open_seed
from harmomoe.moe.router import RouterSettings
from harmomoe.server.server import Server

ADAMW = dict(learning_rate=3e-3, optimizer="adamw", weight_decay=0.01)
SHORT = Training(epochs=2, batch_size=6, **ADAMW)  # of 20 samples: 6, 6, 6 and 2
FOLDER = Path()  # with `data` and `seed`


@cache
def given(kind):
    "A seed, samples and their classes."
    if kind == "texts":
        return seed_of(), concatenate_datasets([QUESTIONS] * 5).select(range(18)), ABC
    domain = load_benchmark(FOLDER / "data", "a,b,c", "pool").clients[0]
    return open_seed(str(FOLDER / "seed")), domain.train.select(range(20)), domain.classes


def adapted(kind, dtype=None, dropout=0.0):
    "A backbone whose adapters learn."
    seed, _, _ = given(kind)
    config = LoraConfig(r=2, target_modules=list(seed.ffn.linears), lora_dropout=dropout)
    with seeded(0):
        return get_peft_model(seed.new_backbone().to(dtype), config)


def unified(kind):
    "A backbone whose experts and routers learn, with one lambda for all of them."
    settings = RouterSettings(top_k=2, lam=0.4, shared_lam=True)
    model = UnifiedModel(given(kind)[0], ["seed", "a", "b"], [0, 2, 4], [0.0, 2.0, 1.0], settings)
    with torch.no_grad(), seeded(0):
        for layer in model.start_experts(random_state=3).layers:
            layer.router.vectors.normal_(std=0.3)
    return model.backbone


def split(backbone):
    "What learns, and what is frozen."
    both = {True: {}, False: {}}
    for name, p in backbone.named_parameters():
        both[p.requires_grad][name] = p.detach().clone()
    return both[True], both[False]


def run(kind, backbone, how=SHORT, random_state=3, **options):
    """Train; tensors to compare: losses, what has learned, and, as numbers, how many adapters
    stayed, whether frozen weights did, and how many parameters were shards in the meantime."""
    seed, data, classes = given(kind)
    task, shards = seed.task(classes), set()

    def loss(backbone, batch):
        shards.add(sum(isinstance(p, DTensor) for p in backbone.parameters()))
        return task.loss(backbone, batch)

    options = dict(loss=loss) | options
    learning, frozen = split(backbone)
    losses = train(seed, backbone, data, classes, how, random_state, **options)
    learned, now = split(backbone)
    still = [name for name, p in learned.items() if torch.equal(p, learning[name])]
    same = all(
        torch.equal(p, now[name]) and p.dtype == now[name].dtype for name, p in frozen.items()
    )
    whole = not any(isinstance(p, DTensor) for p in backbone.parameters())
    facts = [len(still), float(same and whole), max(shards, default=0)]
    return learned | dict(
        losses=torch.tensor(losses, dtype=torch.float64), facts=torch.tensor(facts)
    )


def interrupted(folder, after, dropout=0.0):
    "Leave a checkpoint."
    Path(folder).mkdir(exist_ok=True)
    seed, _, classes = given("images")
    try:
        where = Checkpoint(folder, seconds=0)
        backbone = adapted("images", None, dropout)
        run("images", backbone, loss=cut(seed, classes, after), checkpoint=where)
    except KeyboardInterrupt:
        return {}
    raise AssertionError("nothing interrupted it")


def resumed(folder, dropout=0.0):
    "Take it up."
    where = Checkpoint(folder, seconds=0)
    return run("images", adapted("images", None, dropout), checkpoint=where)


def house(folder):
    "A client's bundle and the server's model of two; what this process built and wrote."
    how = dict(epochs=2, batch_size=7, **ADAMW)
    config = Config(
        proxies=ProxySettings(candidates=40, number=12),
        expert=ExpertSettings(rank=4, alpha=8, **how),
        routing=RoutingSettings(40),
        finetune=FinetuneSettings(**how),
    )
    benchmark = load_benchmark(FOLDER / "data", "a,b,c", "pool")
    public = Public(given("images")[0], benchmark.pool, config, folder / "public")

    def receive(bundles):
        for bundle in bundles:
            Server(public, folder / "server").receive(bundle)

    with stages_run() as built, steps() as taken:
        clients = [Client(public, d, folder / d.name) for d in benchmark.clients[:2]]
        by_main(receive, [client.bundle() for client in clients])
        server = Server(public, folder / "server")
        model = server.unify()
    built.append(len(taken))
    losses = torch.tensor(server.report().losses, dtype=torch.float64)
    (folder / f"built-{world().rank}.json").write_text(json.dumps(built))
    return {n: p for n, p in split(model.backbone)[0].items()} | dict(losses=losses)


@contextmanager
def steps():
    "Which steps this process takes part in."
    taken, add = [], training.add_gradients
    training.add_gradients = lambda parameters: taken.append(add(parameters))
    yield taken
    training.add_gradients = add


MORE = dict(accumulation=3, clip=0.1, warmup_steps=3)
ALONE = replace(SHORT, batch_size=19)  # the last batch has one sample
CASES = dict(
    lora=lambda: run("images", adapted("images")),
    lora_texts=lambda: run("texts", adapted("texts")),
    lora_half=lambda: run("texts", adapted("texts", torch.bfloat16)),
    lora_steps=lambda: run("images", adapted("images"), replace(SHORT, **MORE)),
    lora_one=lambda: run("images", adapted("images"), ALONE),
    routers=lambda: run("images", unified("images")),
    routers_texts=lambda: run("texts", unified("texts")),
    dropout=lambda: run("images", adapted("images", None, 0.3)),
)


@contextmanager
def fsdp(wanted):
    "As `accelerate launch` says it, with `--use_fsdp --fsdp_version 2` or without."
    before = os.environ.get("ACCELERATE_USE_FSDP")
    os.environ["ACCELERATE_USE_FSDP"] = str(wanted).lower()
    yield
    os.environ.pop("ACCELERATE_USE_FSDP")
    if before is not None:
        os.environ["ACCELERATE_USE_FSDP"] = before


def main(folder):
    "All of it, in two processes."
    join("cpu")
    cases = {("fsdp", name): case for name, case in CASES.items()}
    cases |= {("ddp", name): case for name, case in CASES.items()}
    cases |= {
        ("ddp", "cut by two"): lambda: interrupted(folder / "by two", 5),
        ("ddp", "of one"): lambda: resumed(folder / "by one"),
        ("ddp", "cut, dropout"): lambda: interrupted(folder / "dropout", 5, 0.3),
        ("ddp", "resumed, dropout"): lambda: resumed(folder / "dropout", 0.3),
        ("fsdp", "cut"): lambda: interrupted(folder / "fsdp", 3),
        ("fsdp", "resumed"): lambda: resumed(folder / "fsdp"),
        ("ddp", "house"): lambda: house(folder / "house"),
        ("fsdp", "house"): lambda: house(folder / "house-fsdp"),
    }
    for (kind, name), case in cases.items():
        with fsdp(kind == "fsdp"):
            found = case()
        if found:
            save_file(found, folder / f"{kind} {name} {world().rank}.safetensors")


def found(folder, kind, name, rank=0):
    "What a case gave in one of the two."
    return load_file(folder / f"{kind} {name} {rank}.safetensors")


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    torch.set_num_threads(1)
    main(FOLDER)
