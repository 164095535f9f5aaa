"""The sites of a round's clients, which share one transfer to the device."""

import numpy as np
import small
import torch
from on_lanes import pool

from fedhassle.engine import trainer as trainers
from fedhassle.engine.device import Engine
from fedhassle.engine.trainer import Task, Trainer
from fedhassle.method import Client
from fedhassle.methods import FedAvg

DATA = small.dataset()
ROWS = [(range(5, 9), range(40, 47)), ((), range(3)), ([7, 2, 7], ()), (range(100, 90, -1), [119])]


def task(k, message=None):
    labelled, unlabelled = ([*part] for part in ROWS[k])
    client = Client(f"client {k}", len(labelled), len(unlabelled))
    return Task(client, np.array(labelled, np.int32), np.array(unlabelled), message or {}, lambda: None)


def test_each_client_has_its_own_rows_and_their_labels():
    trainer = Trainer(DATA, 0, Engine(small.CPU))
    tasks = [task(k) for k in range(len(ROWS))]
    for k, sites in enumerate(zip(trainer.sites(tasks), map(trainer.site, tasks), strict=True)):
        for here in sites:
            samples, (labelled, unlabelled) = here.samples, ([*part] for part in ROWS[k])
            assert here.client == tasks[k].client and samples.images is trainer.images
            assert samples.labelled.tolist() == labelled and samples.unlabelled.tolist() == unlabelled
            assert samples.y.tolist() == [DATA.y_train[i] for i in labelled]
            assert samples.truth.tolist() == [DATA.y_train[i] for i in unlabelled]
            assert samples.labelled.dtype == samples.unlabelled.dtype == torch.int64
    assert trainer.sites([]) == []


def test_the_rows_of_a_round_are_one_transfer(monkeypatch):
    plain, sent = trainers.to_device, []

    def to_device(array, device):
        sent.append(len(array))
        return plain(array, device)

    monkeypatch.setattr(trainers, "to_device", to_device)
    method, trainer = FedAvg(small.net(small.Linear), batch=4, epochs=1), Trainer(DATA, 0, Engine(small.CPU))
    trainer.lanes = pool(2)
    found = trainer.train(method, [task(k, method.initial(0)) for k in (0, 2, 3)], 1)
    assert [update.client.name for update, _ in found] == ["client 0", "client 2", "client 3"]
    assert sent == [4 + 7 + 3 + 10 + 1]
