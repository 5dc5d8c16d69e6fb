"The report is about exactly the files that would leave."

import numpy as np
import pytest

from harmomoe.base.artefacts import MANIFEST
from harmomoe.bundle.files import FILES
from harmomoe.client.disclosure import NUMBERS, disclose
from harmomoe.config.settings import changed
from harmomoe.moe.context import SENT


@pytest.fixture(scope="module")
def report(tiny):
    return disclose(tiny.work / "a" / "bundle", tiny.public)


def test_every_file_is_listed_with_its_size_and_no_other(report):
    files = report.files()
    assert set(files.index) == {*FILES, MANIFEST}
    total = sum(f.stat().st_size for f in report.bundle.folder.rglob("*") if f.is_file())
    assert 1000 * files["kB"].sum() == pytest.approx(total)


def test_numbers_in_the_report_are_those_of_the_files(report, tiny):
    told = report.files()["made from private data"]
    factors = sum(a.numel() + b.numel() for a, b in tiny.bundles[0].factors.values())
    assert f"{factors:,} numbers, fitted to 30 private samples" == told[FILES[1]]
    assert told["proxies.parquet"].startswith("12 row numbers")


def test_each_form_of_routing_vectors_is_said_to_be_private(report, tiny):
    one, both = report, disclose(tiny.both[0].folder, tiny.public)
    told = [r.files()["made from private data"]["routing_vectors.safetensors"] for r in (one, both)]
    assert told[0] == "2 x 65 numbers (mean: the domain's means), computed from 30 private samples"
    first, second = told[1].split(" and ", 1)
    assert first == "2 x 65 numbers (mean: the domain's means)"
    assert second.startswith("2 x 129 numbers (moments: a classifier of private against public")
    assert second.endswith(", computed from 30 private samples")
    assert (*NUMBERS,) == SENT


def test_evidence_is_said_to_be_private_too(tiny):
    told = disclose(tiny.evidence[0].folder, tiny.public).files()["made from private data"]
    first, _, last = told["routing_vectors.safetensors"].partition(" private samples")
    assert first.startswith("2 x 1281 numbers (evidence: a classifier of private against public")
    assert first.endswith("squares), computed from 30") and not last


def test_a_density_is_said_to_be_private_too(tiny, tiny_density):
    told = disclose(tiny_density[0].folder, tiny.public).files()["made from private data"]
    said = told["routing_vectors.safetensors"]
    assert "numbers (density: mean and covariance of private samples, by" in said
    assert said.endswith(", computed from 30 private samples")


def test_evidence_that_was_trained_on_as_a_gate_is_said_to_be(tiny):
    config = changed(tiny.public.config, {"gate.epochs": 1})
    for bundle, trained in ((tiny.evidence[0], True), (tiny.both[0], False)):
        report = disclose(bundle.folder, tiny.public.with_config(config))
        told = report.files()["made from private data"]["routing_vectors.safetensors"]
        assert ("squares, trained on as the expert's gate), computed" in told) == trained
        assert ("gate" in told) == trained


def test_classes_are_those_of_the_proxies(report, tiny):
    labels = np.array(tiny.pool.train["label"])[tiny.bundles[0].ids]
    table = report.classes(most=100)
    assert table["proxies"].sum() == len(labels)
    for name, row in table.iterrows():
        label = tiny.pool.classes.index(name)
        share = (labels == label).mean() / (np.array(tiny.pool.train["label"]) == label).mean()
        assert row["proxies"] == (labels == label).sum()
        assert row["times chance"] == round(share, 1)
    assert table["proxies"].is_monotonic_decreasing


def test_a_changed_file_is_not_reported_but_refused(tiny, tmp_path):
    import shutil

    copy = shutil.copytree(tiny.work / "a" / "bundle", tmp_path / "bundle")
    (copy / "notes.txt").write_text("private")
    with pytest.raises(ValueError, match="notes.txt"):
        disclose(copy, tiny.public)
