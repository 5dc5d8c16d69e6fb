"The benchmark of texts: whole, licensed, split by document, and no copies across splits."

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harmomoe.data.benchmarks import open_benchmark, open_pool
from harmomoe.data.corpora import (
    COPIED,
    CORPORA,
    OPENING,
    PASSAGE,
    SHINGLE,
    copied_share,
    corpus_documents,
    load_corpora,
    load_corpus,
    passage_documents,
    passages,
    shingles,
)
from harmomoe.data.domains import SPLITS, fingerprint
from harmomoe.data.glyphs import shipped_manifest

ROOT = Path(__file__).resolve().parents[2]
DOMAINS = ("pool", *CORPORA)


@pytest.fixture(scope="module")
def documents():
    return {(name, split): corpus_documents(name, split) for name in DOMAINS for split in SPLITS}


@pytest.fixture(scope="module")
def corpora():
    return load_corpora()


@pytest.fixture(scope="module")
def numbers(documents):
    """Shingles of each document."""
    return {key: [shingles(one["text"]) for one in of] for key, of in documents.items()}


def length(of: list[dict]) -> int:
    return sum(len(one["text"].encode()) for one in of)


# ---- what is in it


def test_schema_of_every_file():
    folder, manifest = shipped_manifest("corpora")
    names = {f"{name}_{split}.parquet" for name in DOMAINS for split in SPLITS}
    assert set(manifest["files"]) == names
    for name in names:
        schema = pq.read_schema(folder / name)
        assert schema.names == ["source", "document", "text"]
        assert {str(kind) for kind in schema.types} == {"string"}


def test_it_is_small_and_clients_are_of_one_size(documents):
    stored = sum(path.stat().st_size for path in shipped_manifest("corpora")[0].iterdir())
    assert stored <= 8_000_000
    assert 6_000_000 <= length(documents["pool", "train"]) <= 10_000_000
    for client in CORPORA:
        assert 600_000 <= length(documents[client, "train"]) <= 1_000_000, client
        assert 45_000 <= length(documents[client, "validation"]) <= 65_000, client
        assert 85_000 <= length(documents[client, "test"]) <= 100_000, client
        assert len(documents[client, "test"]) >= 15, client  # intervals are over documents


def test_texts_are_tidy(documents):
    for of in documents.values():
        for one in of:
            text = one["text"]
            assert text == text.strip() and len(text.encode()) >= 120, one["document"]
            assert not re.search(r"[ \t]\n|\n\n\n|\r|\ufffd|[\x00-\x08]", text), one["document"]


def test_files_are_in_the_order_of_documents(documents):
    for of in documents.values():
        keys = [(one["source"], one["document"]) for one in of]
        assert keys == sorted(keys)


# ---- splits


def test_no_document_is_in_two_splits(documents):
    for name in DOMAINS:
        seen = [
            (one["source"], one["document"]) for split in SPLITS for one in documents[name, split]
        ]
        assert len(set(seen)) == len(seen), name


def test_no_near_duplicates_across_splits(documents, numbers):
    """Nor of two domains: what was dealt before are all domains' documents of earlier splits."""
    earlier = []
    for split in SPLITS:
        if earlier:
            known = np.sort(np.concatenate(earlier))
            for name in DOMAINS:
                for one in documents[name, split]:
                    share = copied_share(one["text"], known)
                    assert share <= COPIED, (name, split, one["document"], share)
        earlier += [own for name in DOMAINS for own in numbers[name, split]]


def test_the_pool_has_no_copies_of_clients(documents, numbers):
    of_clients = [own for key, of in numbers.items() if key[0] != "pool" for own in of]
    known = np.sort(np.concatenate(of_clients))
    for one, own in zip(documents["pool", "train"], numbers["pool", "train"]):
        own = np.sort(own)
        places = np.searchsorted(known, own).clip(max=len(known) - 1)
        assert (known[places] == own).mean() <= COPIED, one["document"]


def test_shares_are_those_of_brute_force():
    rng = np.random.default_rng(0)
    words = ["Äpfel", "and", "  pears", "fn", "()", "\n", "日本語", "x"]
    texts = [" ".join(rng.choice(words, size=n)) for n in (3, 40, 60, 80, 200)]

    def stretches(text: str) -> list[bytes]:
        plain = " ".join(text.casefold().split()).encode().ljust(SHINGLE, b"\0")
        return [plain[i : i + SHINGLE] for i in range(len(plain) - SHINGLE + 1)]

    for width in range(1, len(texts)):
        own, others = texts[0] + texts[width], [*texts[1:width], texts[width][20:-5]]
        known = {part for text in others for part in stretches(text)}
        numbers = np.unique(np.concatenate([shingles(text) for text in others]))
        assert len(numbers) == len(known)
        share = np.mean([part in known for part in stretches(own)])
        assert copied_share(own, numbers) == share and 0 < share < 1 or width == 1
    assert copied_share("anything", np.empty(0, np.uint64)) == 0


def test_a_copy_is_found_in_other_clothes(documents):
    text = documents["licences", "train"][3]["text"]
    known = np.sort(shingles(text))
    assert copied_share(text.upper().replace("\n", "\n\n   "), known) == 1
    assert copied_share(documents["novels", "test"][0]["text"], known) == 0


# ---- passages


def test_passages_hold_everything_but_white_space(documents):
    for name in DOMAINS:
        for one in documents[name, "test"]:
            cut = passages(one["text"])
            joined = "".join(prompt + answer for prompt, answer in cut)
            assert "".join(joined.split()) == "".join(one["text"].split())
            for prompt, answer in cut:
                assert prompt and answer and prompt == prompt.strip() and answer == answer.rstrip()
                assert len(prompt.encode()) <= OPENING
                assert len((prompt + answer).encode()) <= PASSAGE


@pytest.mark.parametrize("text", ["", "  \n ", "a", "x" * 3000, "語" * 999, "a b " * 700])
@pytest.mark.parametrize("size, opening", [(512, 64), (100, 99), (20, 4)])
def test_passages_of_odd_texts(text, size, opening):
    cut = passages(text, size, opening)
    joined = "".join(prompt + answer for prompt, answer in cut)
    assert "".join(joined.split()) == "".join(text.split())
    for prompt, answer in cut:
        assert 0 < len(prompt.encode()) <= opening and prompt == prompt.rstrip()
        assert len((prompt + answer).encode()) <= size


def test_passages_of_one_document_are_about_equally_long(documents):
    for one in documents["novels", "test"]:
        sizes = [len((prompt + answer).encode()) for prompt, answer in passages(one["text"])]
        assert min(sizes) > 0.6 * PASSAGE, sizes


# ---- opening


def test_domains_hold_the_passages_of_the_documents(corpora, documents):
    assert [one.name for one in (corpora.pool, *corpora.clients)] == list(DOMAINS)
    for domain in (corpora.pool, *corpora.clients):
        assert domain.classes == ["text"]
        rows = passage_documents(domain.name, "test")
        assert len(rows) == len(domain.test)
        for row in (0, len(rows) - 1):
            whole = documents[domain.name, "test"][rows[row]]["text"]
            assert domain.test[row]["prompt"] + domain.test[row]["answer"] in whole


def test_it_opens_by_its_name(corpora):
    some = open_benchmark("corpora", clients="rust, novels")
    assert [client.name for client in some.clients] == ["rust", "novels"]
    assert fingerprint(some.clients[0].train) == fingerprint(corpora.clients[5].train)
    assert fingerprint(open_pool("corpora").train) == fingerprint(corpora.pool.train)
    with pytest.raises(ValueError, match="no client 'cobol' in data='corpora'; it has speeches"):
        open_benchmark("corpora", clients="cobol")


def test_passages_know_their_document_if_asked(corpora):
    found = open_benchmark("corpora", clients="novels", group="document")
    for domain in (found.pool, *found.clients):
        names = [one["document"] for one in corpus_documents(domain.name, "test")]
        wanted = [names[place] for place in passage_documents(domain.name, "test")]
        assert domain.test["group"] == wanted and 1 < len(set(wanted)) < len(wanted)
    assert "group" not in corpora.pool.test.features
    assert found.clients[0].test["answer"] == corpora.clients[4].test["answer"]
    with pytest.raises(ValueError, match="unknown group 'page'; there are document"):
        open_benchmark("corpora", group="page")


def test_another_build_opens_by_its_folder(corpora, tmp_path):
    folder = tmp_path / "build"
    shutil.copytree(shipped_manifest("corpora")[0], folder)
    found = open_benchmark(f"corpora:{folder}", clients="rust")
    assert fingerprint(found.clients[0].train) == fingerprint(corpora.clients[5].train)
    assert fingerprint(open_pool(f"corpora:{folder}").train) == fingerprint(corpora.pool.train)
    (folder / "rust_test.parquet").write_bytes(b"x")
    for data in (f"corpora:{folder}", f"corpora:{tmp_path / 'none'}", f"embedded:{folder}"):
        with pytest.raises((ValueError, FileNotFoundError), match="is not as it was made"):
            open_benchmark(data)
    with pytest.raises(ValueError, match="the corpora benchmark is not as it was made"):
        open_pool(f"corpora:{folder}")


def test_other_sizes_make_other_samples():
    small = load_corpus("biology", size=200, opening=20)
    assert max(len(text.encode()) for text in small.test["prompt"]) <= 20
    assert len(passage_documents("biology", "test", size=200, opening=20)) == len(small.test)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown client 'cobol'; there are speeches"):
        load_corpora(["cobol"])
    with pytest.raises(ValueError, match="unknown domain 'cobol'; there are pool, speeches"):
        corpus_documents("cobol", "test")
    with pytest.raises(ValueError, match="unknown split 'dev'; there are train"):
        corpus_documents("rust", "dev")
    with pytest.raises(ValueError, match="an opening of 9 bytes is no part of a passage of 9"):
        load_corpus("rust", size=9, opening=9)
    shutil.copytree(shipped_manifest("corpora")[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "rust_test.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="rust_test.parquet was changed"):
        load_corpora(["rust"], tmp_path)


# ---- licences


def test_notice_lists_every_source_with_its_licence(documents):
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    part = notice.split("The folder harmomoe/assets/corpora")[1].split("-" * 100)[0]
    sources = {one["package"]: one for one in shipped_manifest("corpora")[1]["facts"]["sources"]}
    used = {one["source"] for of in documents.values() for one in of}
    assert used == sources.keys()
    for package, facts in sources.items():
        line = re.escape(f"{package} {facts['version']}: {facts['authors']}")
        place = re.escape(f"{facts['url']} [{facts['used']}]")
        assert re.search(f"{line}\n +{place}\n +Changed: ", part), package
    for text in ("Permission is hereby granted", "Princeton University", "Redistribution and use"):
        assert text in part


def test_licences_allow_to_pass_on():
    allowed = {"public domain", "CC0-1.0", "CC-BY-4.0", "CC-BY-SA-3.0", "Artistic-2.0", "MIT"}
    allowed |= {"BSD-3-Clause", "WordNet"}
    assert {one["licence"] for one in shipped_manifest("corpora")[1]["facts"]["sources"]} <= allowed


def test_sources_are_used_where_the_manifest_says(documents):
    for one in shipped_manifest("corpora")[1]["facts"]["sources"]:
        used = {
            name
            for (name, _), of in documents.items()
            if one["package"] in {d["source"] for d in of}
        }
        assert ", ".join(sorted(used)) == one["used"], one["package"]
