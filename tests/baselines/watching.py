"""Plays a method while it notes who looked at which samples, what was sent, and what the server
got; and what several test files use to look into the models that methods deliver."""

import shutil
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from datasets import Dataset

from harmomoe.base.artefacts import digest_weights
from harmomoe.baselines.comigs import Participant
from harmomoe.baselines.method import OneShot, Rounds
from harmomoe.data.domains import Domain
from harmomoe.models.ensemble import Ensemble, Personal

PERSONAL = "expert", "matching experts", "comigs"  # these deliver a model for each client


def untrained(config):
    "The same settings, but nothing is trained."
    expert, finetune = (replace(part, epochs=0) for part in (config.expert, config.finetune))
    return replace(config, expert=expert, finetune=finetune)


def members(model):
    "The models that a method delivers, by name."
    return model.members if isinstance(model, Personal) else {"all": model}


def backbones(model):
    "The networks of all of them."
    for own in members(model).values():
        yield from own.backbones if isinstance(own, Ensemble) else [own.backbone]


def alike(one, two):
    "Whether scores, by name of the model, are equal bit by bit."
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def equal(one, two):
    "Whether two lists of tensors are equal bit by bit."
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def reachable(*roots):
    "All that attributes, containers, closures and defaults lead to from `roots`."
    seen, waiting = {}, [*roots]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Dataset):
            continue
        if isinstance(thing, dict):
            waiting += [*thing, *thing.values()]
        if isinstance(thing, (list, tuple, set, frozenset)):
            waiting += thing
        if isinstance(thing, partial):
            waiting += [thing.func, *thing.args, *thing.keywords.values()]
        if isinstance(thing, MethodType):
            waiting += [thing.__self__, thing.__func__]
        if isinstance(thing, FunctionType):
            waiting += [cell.cell_contents for cell in thing.__closure__ or ()]
            waiting += thing.__defaults__ or ()
        waiting += getattr(thing, "__dict__", {}).values()
    return list(seen.values())


def private_parts(things, rows):
    "Domains and data sets other than the public pool's."
    domains = [thing for thing in things if isinstance(thing, Domain) and thing.name != "pool"]
    data = [thing for thing in things if isinstance(thing, Dataset) and len(thing)]
    return domains + [one for one in data if {domain for domain, *_ in rows(one)} != {"pool"}]


class Watch:
    "A method, played once from private data to the model."

    def __init__(self, method, public, domains, rows, work):
        self.method, self.work = method, work
        self.busy, self.turns, self.looked = [], [], defaultdict(set)
        self.given, self.written, self.exchanged = {}, {}, []
        batches, own_round = public.seed.batches, Participant.round

        def noted(data, *args, **named):
            if self.busy:  # a seed with other weights is a copy, and looks on later, too
                self.looked[self.busy[-1]].update(rows(data))
            return batches(data, *args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(public.seed, "batches", noted)
            patch.setattr(Participant, "round", lambda one, mean: self.round(own_round, one, mean))
            self.model, self.bytes = self.watched().run(public, domains, work)
        self.seed = digest_weights(public.seed.whole)  # as the method leaves it

    def watched(self):
        "The method, with everybody's part replaced by one that is watched."
        if isinstance(self.method, OneShot):
            return replace(self.method, serve=self.server, client=self.client)
        if isinstance(self.method, Rounds):
            return replace(self.method, serve=self.server, participant=self.participant)
        return replace(self.method, serve=self.server)

    @contextmanager
    def turn(self, who):
        self.busy.append(who)
        self.turns.append(tuple(self.busy))
        yield
        self.busy.pop()

    def client(self, public, domain, folder):
        own = self.method.client(public, domain, folder)
        self.given[domain.name] = public, folder

        def bundle(to):
            with self.turn(domain.name):
                made = own.bundle(to)
            files = [file for file in made.rglob("*") if file.is_file()]
            sizes = {file.relative_to(made).as_posix(): file.stat().st_size for file in files}
            self.written[made] = sizes
            return made

        return SimpleNamespace(bundle=bundle)

    def participant(self, public, domain):
        self.given[domain.name] = (public,)
        with self.turn(domain.name):
            return self.method.participant(public, domain)

    def round(self, own_round, participant, mean):
        mean = [part.detach().clone() for part in mean]
        with self.turn(participant.name):
            returned = own_round(participant, mean)
        self.exchanged.append((participant.name, mean, [part.clone() for part in returned]))
        return returned

    def server(self, received, public):
        "All of the clients' folders are out of the way while the server works."
        self.received, self.public = received, public
        self.remained = [path for path in self.written if path.exists()]
        self.led_to = reachable(received, public, self.method.serve)
        away = self.work.with_name(f"{self.work.name}-away")
        self.work.rename(away)
        try:
            with self.turn("server"):
                return self.method.serve(received, public)
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            away.rename(self.work)

    def again(self, domains):
        "What the server makes of the same a second time, and whatever trains with it."
        received, method = self.received, self.method
        if isinstance(method, Rounds):
            received = [method.participant(self.public, domain) for domain in domains]
        return method.serve(received, self.public)
