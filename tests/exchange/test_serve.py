"A unified model answers over HTTP: a real client asks a real server process."

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from exchange.small_decoders import randomise
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from transformers.utils.import_utils import is_serve_available

from harmomoe.exchange.serve import (
    Request,
    Served,
    Speaker,
    means_here,
    new_server,
    open_served,
    write,
)
from harmomoe.exchange.transformers import save_transformers
from harmomoe.models.unified import UnifiedModel
from harmomoe.moe.router import RouterSettings

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}>"
ALONE = os.environ | dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SAID = [dict(role="user", content="What do bees make?")]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def unified(decoder):
    torch.manual_seed(3)
    settings = RouterSettings(context="prefix", form="logistic", top_k=2)
    model = UnifiedModel(decoder(), ["seed", "law", "medicine"], [0, 4, 8], [0.0, 2, 1], settings)
    randomise(model)
    return model


@pytest.fixture(scope="module")
def folder(unified, tmp_path_factory):
    "A delivered model whose tokenizer has a chat template."
    folder = save_transformers(unified, tmp_path_factory.mktemp("served") / "two-clients")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Asked:
    "What a server process answers."

    def __init__(self, port):
        self.port = port

    def send(self, path, body=None, raw=None, headers=None):
        "Status, headers and text of an answer."
        line = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = raw if raw is not None else None if body is None else json.dumps(body)
        known = {"Content-Type": "application/json"} | (headers or {})
        line.request("GET" if data is None else "POST", path, data, known)
        answer = line.getresponse()
        text = answer.read().decode()
        line.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, text

    def __call__(self, path, **body):
        status, _, text = self.send(path, body or None)
        assert status == 200, text
        return json.loads(text)

    def text(self, **body):
        "The answer to a prompt, greedy, as characters."
        body = dict(prompt="What do bees make?", max_tokens=12, temperature=0) | body
        return self(TEXT, **body)["choices"][0]["text"]

    def events(self, path, **body):
        "The events of a stream."
        status, headers, text = self.send(path, body | dict(stream=True))
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        lines = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        done = [line == "[DONE]" for line in lines]
        assert not any(done[:-1])
        return [json.loads(line) for line in lines if line != "[DONE]"], done[-1]


def started(command, **environment):
    "A server process and its port, taken from what it prints first."
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ALONE | environment,
        # a shell that runs the tests in the background has switched Ctrl-C off
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    line = process.stdout.readline()
    assert "answers at http://127.0.0.1:" in line, line
    return process, int(line.strip().removesuffix("/v1").rpartition(":")[2])


@pytest.fixture(scope="module")
def server(folder):
    command = shutil.which("harmomoe-serve", path=sysconfig.get_path("scripts"))
    assert command, "the package is not installed with its command"
    process, port = started([command, str(folder), "--port", "0"])
    yield Asked(port)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert "stopped" in process.stdout.read()


@pytest.fixture(scope="module")
def here(folder):
    "The same model and tokenizer, without a server."
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def written(here, prompt, members=None, **how):
    "What `generate` writes."
    model, tokenizer = here
    asked = tokenizer(prompt, return_tensors="pt")
    asked = {key: asked[key] for key in ("input_ids", "attention_mask")}
    how = dict(max_new_tokens=12, do_sample=False) | how
    tokens = model.generate(**asked, **how, members=members and model.members([members]))
    return tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_models_are_listed_with_their_members(server):
    models = server("/v1/models")
    assert models["object"] == "list"
    names = {model["id"]: model["members"] for model in models["data"]}
    members = ["seed", "law", "medicine"]
    assert names == {"two-clients": members} | {f"two-clients:{name}": [name] for name in members}
    assert server("/health") == dict(status="ok")


def test_a_conversation_is_answered_as_generate_answers_it(server, here):
    said = [*SAID, dict(role="assistant", content="Tea."), dict(role="user", content="No.")]
    answer = server(CHAT, model="two-clients", messages=said, max_tokens=12, temperature=0)
    prompt = "user: What do bees make?\nassistant: Tea.\nuser: No.\n>"
    assert answer["choices"][0]["message"] == dict(role="assistant", content=written(here, prompt))
    count = len(here[1](prompt).input_ids)
    assert answer["usage"] == dict(
        prompt_tokens=count, completion_tokens=12, total_tokens=count + 12
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["object"], answer["model"]) == ("chat.completion", "two-clients")
    parts = [dict(type="text", text="What do bees"), dict(type="text", text="make?")]
    in_parts = server(
        CHAT, messages=[dict(role="user", content=parts)], max_tokens=12, temperature=0
    )
    expected = written(here, "user: What do bees\nmake?\n>")
    assert in_parts["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_is_the_answer_in_pieces(server, path):
    asked = dict(messages=SAID) if path == CHAT else dict(prompt="What do bees make?")
    asked |= dict(max_tokens=40, temperature=0)
    whole = server(path, **asked)
    events, done = server.events(path, **asked, expert_shares=True)
    assert done and len({event["id"] for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    if path == CHAT:
        assert choices[0]["delta"] == dict(role="assistant", content="")
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-1]["usage"] == whole["usage"] and "expert_shares" in events[-1]


def test_chance_follows_the_request(server, here):
    draw = dict(temperature=1.5, max_tokens=16)
    once, again, other = (server.text(**draw, seed=seed) for seed in (7, 7, 8))
    assert once == again != other
    assert (
        server.text() == server.text(temperature=0, seed=3) == written(here, "What do bees make?")
    )
    assert server.text(temperature=1.5, top_p=1e-6, seed=1) == server.text()


def test_members_are_told_by_a_field_or_by_the_models_name(server, here):
    prompt = "What do bees make?"
    by_law = written(here, prompt, ["law"])
    both = written(here, prompt, ["law", "medicine"])
    assert len({by_law, both, written(here, prompt)}) == 3
    assert server.text(members=["law"]) == server.text(model="two-clients:law") == by_law
    assert server.text(members=["law", "medicine"]) == both
    assert server.text(model="two-clients:law+medicine") == both
    shares = server(TEXT, prompt=prompt, members=["law"], expert_shares=True)["expert_shares"]
    assert shares == dict(seed=0, law=1, medicine=0)


def test_shares_are_the_models(server, here):
    model, tokenizer = here
    asked = dict(prompt="What do bees make?", max_tokens=9, temperature=0, expert_shares=True)
    found = server(TEXT, **asked)["expert_shares"]
    tokens = tokenizer(asked["prompt"], return_tensors="pt").input_ids
    all_tokens = model.generate(tokens, max_new_tokens=9, do_sample=False)
    expected = model.expert_shares(all_tokens, None, tokens.shape[1])[0]
    assert list(found) == ["seed", "law", "medicine"]
    assert torch.allclose(torch.tensor([*found.values()]), expected, atol=1e-5)


def test_each_answer_has_merged_weights_if_asked(unified, here, folder):
    "One member alone is written as without; shares are those of the weights."
    asked = dict(prompt="What do bees make?", max_tokens=12, temperature=0, expert_shares=True)
    served = open_served(str(folder), merged=True)
    before = {name: p.clone() for name, p in served.model.state_dict().items()}
    for members in (["law"], ["medicine"], ["law", "medicine"]):
        pieces = []
        done = write(served, Request(**asked, members=members), pieces.append)
        expected = written(here, asked["prompt"], members, merged=True)
        assert "".join(pieces) == expected and done.new == 12
        if len(members) == 1:
            assert expected == written(here, asked["prompt"], members)
            assert done.shares[members[0]] == 1
        assert sum(done.shares.values()) == pytest.approx(1) and done.shares["seed"] == 0
    now = served.model.state_dict()
    assert all(torch.equal(now[name], p) for name, p in before.items())


def test_requests_at_the_same_time_do_not_meet(server):
    ways = [["law"], ["medicine"], ["seed", "law"], None] * 2
    alone = [server.text(members=way, max_tokens=20) for way in ways]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(8) as pool:
        at_once = pool.map(lambda way: server.text(members=way, max_tokens=20), ways)
    assert list(at_once) == alone


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop(server, stream):
    text = server.text(max_tokens=40)
    at = next(
        i for i in range(3, 40) if text[i : i + 2].isascii() and text[i : i + 2].isprintable()
    )
    stop = text[at : at + 2]
    assert text.index(stop) == at
    asked = dict(prompt="What do bees make?", max_tokens=40, temperature=0, stop=[stop, "never"])
    if stream:
        choices = [event["choices"][0] for event in server.events(TEXT, **asked)[0]]
        found, reason = "".join(x["text"] for x in choices), choices[-1]["finish_reason"]
    else:
        choice = server(TEXT, **asked)["choices"][0]
        found, reason = choice["text"], choice["finish_reason"]
    assert (found, reason) == (text[:at], "stop")


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "ND two"], list("one END two")])
def test_a_stop_may_come_in_pieces(pieces, here):
    said = []
    speaker = Speaker(here[1], ["END", "E "], said.append)
    for piece in pieces:
        speaker.on_finalized_text(piece)
    speaker.on_finalized_text("", stream_end=True)
    assert "".join(said) == "one " and speaker.stopped
    said.clear()
    speaker = Speaker(here[1], ["END"], said.append)
    speaker.on_finalized_text("an EN")
    speaker.on_finalized_text("", stream_end=True)
    assert "".join(said) == "an EN" and not speaker.stopped


WRONG = [
    (dict(prompt=""), 400, "nothing to answer"),
    (dict(prompt="a", members=["cooking"]), 400, "no member 'cooking', but seed, law, medicine"),
    (dict(prompt="a", members="law"), 400, "members is 'law'"),
    (dict(prompt="a", model="two-clients:law+cooking"), 400, "no member 'cooking'"),
    (dict(prompt="a", model="two-clients:"), 400, "no member ''"),
    (dict(prompt="a", model="two-clientsx"), 404, "no model 'two-clientsx', but two-clients"),
    (dict(prompt="a", model="gpt"), 404, "no model 'gpt'"),
    (dict(prompt="a", temperature=-1), 400, "temperature"),
    (dict(prompt="a", top_p=0), 400, "top_p"),
    (dict(prompt="a", max_tokens=0), 400, "max_tokens"),
    (dict(prompt="a", max_tokens=10**30), 400, "max_tokens"),
    (dict(prompt="a", n=2), 400, "n is 2"),
    (dict(prompt="a" * 200), 400, "the prompt has"),
    (dict(prompt=[1, 2]), 400, "prompt"),
    (dict(messages=[dict(role="user")]), 400, "`role` and a `content`"),
    (dict(messages=[dict(role="user", content=[dict(type="image_url")])]), 400, "`content`"),
    (dict(messages=["hello"]), 400, "messages"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body, status, told", WRONG, ids=[told for *_, told in WRONG])
def test_a_wrong_request_is_told_so(server, body, status, told, stream):
    path = CHAT if "messages" in body else TEXT
    found, _, text = server.send(path, body | dict(stream=stream))
    assert found == status and told in json.loads(text)["error"]["message"]


def test_what_is_no_request_is_refused_and_the_server_goes_on(server):
    assert server.send(TEXT, raw="{")[0] == 400
    assert server.send(TEXT, raw="[" * 100_000)[0] == 400
    assert server.send(TEXT, raw="[]")[0] == 400
    assert server.send(TEXT, raw=b"\xff\xfe")[0] == 400
    assert server.send("/v1/embeddings", dict(input="a"))[0] == 404
    assert server.send("/v1/nothing")[0] == 404
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(f"{HEAD}Content-Length: 99999999\r\n\r\n".encode())
        assert line.recv(99).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(f"{HEAD}\r\n".encode())
        assert line.recv(99).startswith(b"HTTP/1.1 400")
    assert server("/health") == dict(status="ok")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/x"])
def test_what_a_page_of_another_site_may_send_is_refused(server, kind):
    body = json.dumps(dict(prompt="a", max_tokens=2))
    status, _, text = server.send(TEXT, raw=body, headers={"Content-Type": kind})
    assert status == 415 and f"application/json, not {kind}" in json.loads(text)["error"]["message"]
    exact = {"Content-Type": "application/json; charset=utf-8"}
    assert server.send(TEXT, raw=body, headers=exact)[0] == 200


def test_no_page_of_another_site_is_permitted_to_send_json(server):
    asked = "Origin: http://a.b\r\nAccess-Control-Request-Method: POST\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(f"OPTIONS {TEXT} HTTP/1.1\r\nHost: localhost\r\n{asked}\r\n".encode())
        said = line.recv(999)
    assert said.startswith(b"HTTP/1.1 501") and b"access-control" not in said.lower()


def test_a_name_that_another_site_has_given_this_machine_is_refused(server):
    for path, body in (("/health", None), (TEXT, dict(prompt="a", max_tokens=2))):
        status, _, text = server.send(path, body, headers=dict(Host=f"evil.example:{server.port}"))
        assert status == 403 and "evil.example" in json.loads(text)["error"]["message"]
        for host in (f"localhost:{server.port}", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
            assert server.send(path, body, headers=dict(Host=host))[0] == 200, host


@pytest.mark.parametrize(
    "host, names, known",
    [
        ("", [], True),  # HTTP/1.0
        ("10.0.0.7:8000", [], True),
        ("localhost.evil.example", [], False),
        ("127.0.0.1.evil.example", [], False),
        ("evil.example@localhost", [], True),  # the name is what stands behind
        ("localhost@evil.example", [], False),
        ("[::1", [], False),
        ("\0", [], False),
        ("models.example:443", ["models.example"], True),
        ("evil.example", ["models.example"], False),
        ("evil.example", ["*"], True),
    ],
)
def test_names_that_mean_this_machine(host, names, known):
    assert means_here(host, names) == known


def test_a_server_for_other_machines_answers_to_any_name_or_to_those_it_was_given(here):
    served = Served(*here, "two")
    for host, names, known in (
        ("127.0.0.1", None, []),
        ("0.0.0.0", None, ["*"]),
        ("0.0.0.0", ["a.b"], ["a.b"]),
        ("127.0.0.1", ["a.b"], ["a.b"]),
    ):
        with new_server(served, host, 0, names) as server:
            assert server.names == known


def test_a_client_that_leaves_ends_its_answer_and_no_other(server):
    body = json.dumps(dict(prompt="a", max_tokens=100, temperature=0, stream=True))
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), 20) as line:
            line.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert line.recv(20).startswith(b"HTTP/1.1 200")
    assert server.text() == server.text()


def test_nothing_is_written_to_its_end_for_a_client_that_has_left(here, monkeypatch):
    left, ended, ways = Event(), Event(), []

    def watched(*given):
        assert left.wait(20)
        try:
            return write(*given)
        except BaseException as error:
            ways.append(type(error))
            raise
        finally:
            ended.set()

    monkeypatch.setattr("harmomoe.exchange.serve.write", watched)
    body = json.dumps(dict(prompt="a", max_tokens=100, temperature=0))
    with new_server(Served(*here, "two"), port=0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with socket.create_connection(server.server_address, 20) as line:
            line.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        left.set()
        assert ended.wait(60)
        line = HTTPConnection(*server.server_address, timeout=60)
        line.request("POST", TEXT, body, {"Content-Type": "application/json"})
        assert line.getresponse().status == 200
        server.shutdown()
    assert ways == [ConnectionResetError]


def test_a_model_saved_by_this_library_is_served_too(unified, here, tmp_path):
    served = open_served(str(unified.save(tmp_path / "own")), name="other")
    assert served.name == "other"
    tokens = here[1]("What?", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(served.model(tokens).logits, here[0](tokens).logits)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    again = open_served(str(tmp_path / "own"), chat_template=str(template))
    assert again.tokenizer.chat_template == TEMPLATE and again.name == "own"


def test_a_model_that_is_not_unified_is_refused(decoder, tmp_path):
    decoder().model.save_pretrained(tmp_path)
    decoder().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a LlamaForCausalLM: `transformers serve` serves it"):
        open_served(str(tmp_path))


def test_without_a_chat_template_a_conversation_is_refused_with_a_way_out(unified, tmp_path):
    from harmomoe.exchange.serve import prompt_tokens

    tokenizer = unified.seed.tokenizer
    with pytest.raises(ValueError, match="--chat-template FILE"):
        prompt_tokens(tokenizer, Request(messages=SAID))


def test_the_client_of_openai_understands_it(server):
    openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    assert [model.id for model in client.models.list()][0] == "two-clients"
    asked = dict(model="two-clients", messages=SAID, max_tokens=12, temperature=0)
    answer = client.chat.completions.create(**asked, extra_body=dict(members=["law"]))
    assert (
        answer.choices[0].message.content
        == server(CHAT, **asked | dict(model="two-clients:law"))["choices"][0]["message"]["content"]
    )
    pieces = [*client.chat.completions.create(**asked, stream=True)]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == client.chat.completions.create(**asked).choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.chat.completions.create(**asked | dict(model="gpt"))


# The server of transformers


@pytest.fixture(scope="module")
def theirs(folder, tmp_path_factory):
    "`transformers serve`, which has never heard of this library."
    if not is_serve_available():
        pytest.skip("`transformers serve` needs fastapi, uvicorn and openai: transformers[serving]")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("home")
    (home / "hub").mkdir()
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--trust-remote-code"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = ALONE | dict(HF_HOME=str(home), HF_MODULES_CACHE=str(home / "modules"))
    with open(home / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=home)
    asked = Asked(port)
    try:
        for _ in range(600):
            try:
                asked("/health")
                break
            except OSError:
                assert process.poll() is None, Path(home, "log").read_text()[-3000:]
                time.sleep(0.2)
        yield asked
    finally:
        process.terminate()
        process.wait(20)


def test_transformers_serves_a_conversation(theirs, here):
    asked = dict(messages=SAID, max_tokens=12, temperature=0)
    answer = theirs(CHAT, **asked)
    expected = written(here, "user: What do bees make?\n>")
    assert answer["choices"][0]["message"]["content"] == expected
    events = theirs.events(CHAT, **asked)[0]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == expected.rstrip("�")  # it streams whole characters alone
    assert theirs("/v1/models")["object"] == "list"


def test_transformers_serves_a_text(theirs, here):
    assert theirs.text() == written(here, "What do bees make?")
