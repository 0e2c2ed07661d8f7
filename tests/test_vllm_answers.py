"""The server engine against servers that are away, restarted or hostile: offline, on a small HTTP server."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agon_cli import engines, models
from agon_cli.engines.copies import rank_room
from agon_cli.engines.vllm import _check as check
from agon_cli.engines.wire import Wire
from agon_cli.errors import Exit, GuardError, MachineError, ResourceError, UnreachableError, UsageError
from agon_cli.policy import Policy
from agon_cli.recipe import load
from agon_cli.types import Prompt, Sampling
from scripted import make_recipe, tokenizer, write_model

EOS = tokenizer().convert_tokens_to_ids("<eos>")
PROMPT = Prompt("", (4, 11, 30))
SAMPLING = Sampling(1.0, 1.0, 0, 8)


class Broken(bytes):
    """An answer that announces ten bytes more than it has."""


class Dripped(bytes):
    """An answer of which a byte comes every tenth of a second."""


class Fake:
    """Loads adapters that it can read, samples the seed's own digits, and does worse things when told to."""

    def __init__(self, base: str) -> None:
        self.base, self.room = base, 128
        self.adapters: dict[str, str] = {}
        self.asked: list[int] = []
        self.keys: list[str | None] = []
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.refuse: dict[str, tuple[int, Any]] = {}
        self.forget_after: int | None = None
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def reply(self, status: int, value: Any) -> None:
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content) + 10 * isinstance(value, Broken)))
                self.end_headers()
                self.close_connection = isinstance(value, Broken | Dripped)
                with suppress(OSError):
                    for start in range(0, len(content), 1 if isinstance(value, Dripped) else len(content)):
                        time.sleep(0.1 * isinstance(value, Dripped))
                        self.wfile.write(content[start : start + 1] if isinstance(value, Dripped) else content)

            def do_GET(self) -> None:
                fake.keys.append(self.headers["Authorization"])
                self.reply(*(fake.refuse.get(self.path) or (200, {"data": fake.cards()})))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.under_way += 1
                    fake.most_under_way = max(fake.most_under_way, fake.under_way)
                found = fake.refuse.get(self.path) or fake.answer(self.path, body)
                with fake.lock:
                    fake.under_way -= 1
                self.reply(*found)

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *about: Any) -> None:
                if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that hangs up is none of its faults
                    super().handle_error(*about)

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def cards(self) -> list[dict[str, Any]]:
        base = {"id": self.base, "root": self.base, "parent": None, "max_model_len": self.room}
        return [base, *({"id": name, "root": path, "parent": self.base} for name, path in self.adapters.items())]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
            assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, b"Success"
        if path == "/v1/unload_lora_adapter":
            return (200, b"Success") if self.adapters.pop(body["lora_name"], None) else (404, {})
        if self.forget_after is not None and len(self.asked) >= self.forget_after:
            self.adapters, self.forget_after = {}, None  # killed and restarted
        if body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.asked.append(body["seed"])
        ids = [20 + int(digit) for digit in str(body["seed"])] + [EOS]
        choice = {
            "token_ids": ids, "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": [-1.0] * len(ids)},
        }  # fmt: skip
        return 200, self.spoil({"choices": [choice]})


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def fake(folder) -> Iterator[Fake]:
    found = Fake(str(folder))
    yield found
    found.http.shutdown()
    found.http.server_close()


def engine(folder: Path, *fakes: Fake, timeout: float = 5.0, **sections: Any) -> Any:
    recipe = make_recipe(
        folder, engine={"type": "server", "urls": [f.url for f in fakes], "timeout": timeout}, **sections
    )
    return engines.make(recipe, Policy(recipe))


def test_every_seed_has_its_own_answer_and_servers_share_the_work(folder, fake):
    second = Fake(str(folder))
    both = engine(folder, fake, second)
    seeds = [list(range(100, 130)), [], list(range(200, 203))]
    found = both.sample([PROMPT] * 3, "A", SAMPLING, seeds)
    assert [[c.ids for c in row] for row in found] == [
        [(*(20 + int(digit) for digit in str(seed)), EOS) for seed in row] for row in seeds
    ]
    assert len(fake.asked) + len(second.asked) == 33
    assert min(len(fake.asked), len(second.asked)) >= 16
    both.close()
    assert fake.adapters == second.adapters == {}


def test_servers_work_side_by_side_each_on_so_many_at_once(folder, fake, monkeypatch):
    """One whose share is far larger than what it works on at once does not hold up the next."""
    monkeypatch.setattr("agon_cli.engines.server.AT_ONCE", 4)
    second = Fake(str(folder))
    both = engine(folder, fake, second)
    met = threading.Barrier(8)

    def meet(answer: dict[str, Any]) -> dict[str, Any]:
        with suppress(threading.BrokenBarrierError):
            met.wait(10)
        return answer

    fake.spoil = second.spoil = meet
    both.sample([PROMPT], "A", SAMPLING, [range(100, 140)])
    assert not met.broken, "eight questions were under way at all times"
    assert fake.most_under_way == second.most_under_way == 4
    both.close()


def test_a_failure_breaks_off_what_else_is_under_way_and_asks_no_more(folder, fake):
    """A second server that would answer in its own good time holds the error up as little as one that is gone."""
    second = Fake(str(folder))
    both = engine(folder, fake, second, timeout=60.0)
    second.spoil = lambda answer: Dripped(json.dumps(answer).encode() + b" " * 1000)
    fake.spoil = lambda answer: b"<html>"
    began = time.monotonic()
    with pytest.raises(GuardError, match=fake.url):
        both.sample([PROMPT], "A", SAMPLING, [range(100, 140)])
    assert time.monotonic() - began < 15
    both.close()


def test_an_interrupt_leaves_no_question_under_way_even_one_that_nobody_has_kept(folder, fake, monkeypatch):
    """Ctrl-C may come between a question's being given to a thread and its being written down."""
    one = engine(folder, fake, timeout=60.0)
    fake.spoil = lambda answer: Dripped(json.dumps(answer).encode() + b" " * 1000)
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, *work: Any) -> Any:
        submit(pool, *work)
        while not fake.under_way and not fake.asked:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        one.sample([PROMPT], "A", SAMPLING, [range(100, 140)])
    assert time.monotonic() - began < 15
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("agon-ask")]
    one.close()
    assert fake.adapters == {}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_connections_go_with_the_sample_that_opened_them(folder, fake):
    one = engine(folder, fake)

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def settled(most: int) -> bool:
        end = time.monotonic() + 5
        while open_files() > most and time.monotonic() < end:
            time.sleep(0.05)
        return open_files() <= most

    assert settled(before := open_files())
    for _ in range(3):
        one.sample([PROMPT], "A", SAMPLING, [range(100, 150)])
        one.publish("A")
    assert settled(before), f"{open_files()} open files, {before} before"
    one.close()


def test_no_room_for_a_connection_is_not_the_servers_fault(folder, fake, monkeypatch):
    one = engine(folder, fake)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("socket.create_connection", full)
    with pytest.raises(ResourceError, match="Too many open files") as caught:
        one.sample([PROMPT], "A", SAMPLING, [[1]])
    assert "ulimit -n" in caught.value.hint
    one.close()


def test_a_publish_replaces_the_players_adapter_and_no_other(folder, fake):
    one = engine(folder, fake)
    before = dict(fake.adapters)
    assert len(before) == 2
    one.publish("B")
    assert len(fake.adapters) == 2
    (kept,) = before.keys() & fake.adapters.keys()
    assert "-A-" in kept
    assert [Path(path).is_dir() for name, path in before.items() if name != kept] == [False]


def test_without_a_run_adapters_lie_where_the_environment_says(folder, fake, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)  # else what an earlier test found
    one = engine(folder, fake)
    assert [shared in Path(path).parents for path in fake.adapters.values()] == [True, True]
    one.close()
    assert not list(shared.iterdir())


def test_a_server_that_comes_back_empty_gets_its_adapters_and_no_answer_is_lost(folder, fake):
    one = engine(folder, fake)
    fake.forget_after = 10
    (row,) = one.sample([PROMPT], "B", SAMPLING, [list(range(100, 140))])
    assert [c.ids[0:3] for c in row] == [tuple(20 + int(digit) for digit in str(seed)) for seed in range(100, 140)]
    assert sorted(fake.asked) == list(range(100, 140)), "each was answered once"


def test_a_server_that_stays_away_is_named_with_the_command_that_starts_it(folder, fake):
    one = engine(folder, fake, timeout=0.7)
    fake.http.shutdown()
    fake.http.server_close()
    with pytest.raises(UnreachableError, match=f"{fake.url} has been away for 0.7 s") as caught:
        one.sample([PROMPT], "A", SAMPLING, [[1, 2]])
    assert caught.value.code is Exit.UNREACHABLE
    assert f"vllm serve {folder} --dtype float32 --max-model-len 88" in caught.value.hint
    one.close()


def spoiled(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: {"choices": [answer["choices"][0] | changes]}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: b"<html>",
        lambda answer: b"[" * 100_000,
        lambda answer: [],
        lambda answer: {"choices": []},
        lambda answer: b"x" * (4 << 20),
        spoiled(token_ids=None),
        spoiled(token_ids=[True, EOS]),
        spoiled(token_ids=[10**9, EOS], logprobs={"token_logprobs": [-1.0, -1.0]}),
        spoiled(token_ids=[-1, EOS], logprobs={"token_logprobs": [-1.0, -1.0]}),
        spoiled(token_ids=[EOS, EOS], logprobs={"token_logprobs": [-1.0, -1.0]}),
        spoiled(token_ids=[20, 21], logprobs={"token_logprobs": [-1.0, -1.0]}),
        spoiled(token_ids=[], logprobs={"token_logprobs": []}),
        spoiled(token_ids=[20] * 9, logprobs={"token_logprobs": [-1.0] * 9}),
        spoiled(logprobs={"token_logprobs": [-1.0]}),
        spoiled(token_ids=[EOS], logprobs={"token_logprobs": [float("nan")]}),
        spoiled(token_ids=[EOS], logprobs={"token_logprobs": [2.0]}),
        spoiled(token_ids=[EOS], logprobs={"token_logprobs": ["-1"]}),
        spoiled(token_ids=[EOS], logprobs={"token_logprobs": [-(10**400)]}),
        spoiled(prompt_token_ids=[4]),
    ],
)
def test_an_answer_that_cannot_be_true_stops_the_run(folder, fake, spoil):
    one = engine(folder, fake)
    fake.spoil = spoil
    with pytest.raises(GuardError, match=fake.url):
        one.sample([PROMPT], "A", SAMPLING, [[1]])


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((404, {"detail": "Not Found"}), "loads no adapters while it runs"),
        ((500, {"error": {"message": "LoRA rank 16 is greater than max_lora_rank 8.\x1b[31m"}}), "max_lora_rank 8"),
        ((404, {"error": {"message": "Loading lora x failed: No adapter found for /x"}}), "cannot read"),
        ((401, {"error": "Unauthorized"}), "wants a key"),
    ],
)
def test_a_server_that_takes_no_adapter_is_refused_at_the_start(folder, fake, refusal, said):
    fake.refuse["/v1/load_lora_adapter"] = refusal
    with pytest.raises(UsageError, match=said) as caught:
        engine(folder, fake)
    assert "\x1b" not in caught.value.message
    assert ("TMPDIR" in caught.value.hint) == (said == "cannot read")


def test_another_base_or_too_little_room_is_refused_at_the_start(folder, fake):
    fake.room = 80
    with pytest.raises(UsageError, match="reads 80 tokens, a prompt and a completion can take 88"):
        engine(folder, fake)
    fake.base = "someone/else\x1b[2J\nerror: forged"
    with pytest.raises(UsageError, match=r"they serve someone/else\[2J error: forged$"):
        engine(folder, fake)


@pytest.mark.parametrize(("status", "hint"), [(401, "VLLM_API_KEY"), (302, "start it so"), (500, "start it so")])
def test_a_server_that_does_not_say_what_it_serves_is_refused(folder, fake, status, hint):
    fake.refuse["/v1/models"] = (status, {"error": "no"})
    with pytest.raises(UsageError, match=f"lists no models: {status} no") as caught:
        engine(folder, fake)
    assert hint in caught.value.hint


def test_an_answer_that_breaks_off_is_asked_for_again(folder, fake):
    one = engine(folder, fake)
    spoils = iter([Broken])
    fake.spoil = lambda answer: next(spoils, lambda whole: whole)(json.dumps(answer).encode())
    ((found,),) = one.sample([PROMPT], "A", SAMPLING, [[7]])
    assert found.ids == (27, EOS)


def test_a_completion_that_the_server_broke_off_is_asked_for_again(folder, fake):
    one = engine(folder, fake)
    spoils = iter([spoiled(finish_reason="abort", token_ids=[20], logprobs={"token_logprobs": [-1.0]})])
    fake.spoil = lambda answer: next(spoils, lambda whole: whole)(answer)
    ((found,),) = one.sample([PROMPT], "A", SAMPLING, [[7]])
    assert found.ids == (27, EOS)
    assert len(fake.asked) == 2


def test_a_full_disk_is_no_bug(folder, fake):
    """safetensors' own way to write a file hides what the system said. A file size limit stands for the full disk."""
    one = engine(folder, fake)
    before, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # the configuration fits, the weights do not
    try:
        with pytest.raises(ResourceError, match="disk full while writing an adapter"):
            one.publish("A")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    one.close()
    assert fake.adapters == {}


@pytest.mark.parametrize("key", ["s3cret\n", " s3cret ", "s3\ncret", "s3cr\u0435t", "s3 cret", "\x00s3cret"])
def test_a_key_is_sent_whole_or_refused_and_never_shown(folder, fake, monkeypatch, key):
    monkeypatch.setattr("os.environ", {**os.environ, "VLLM_API_KEY": key})
    if key.strip() == "s3cret":
        one = engine(folder, fake)
        one.close()
        assert set(fake.keys) == {"Bearer s3cret"}
        return
    with pytest.raises(UsageError, match="VLLM_API_KEY has a character that no key has") as caught:
        engine(folder, fake)
    told = "".join(traceback.format_exception(caught.value)) + caught.value.hint
    assert "cret" not in told
    assert fake.keys == []


def test_one_server_under_several_spellings_is_one(folder, fake):
    told: list[str] = []
    plain = f"http://127.0.0.1:{fake.http.server_port}"
    urls = [plain, f"{plain}/", f"{plain}/v1", f"{plain}/v1/", f"{plain}//"]
    recipe = make_recipe(folder, engine={"type": "server", "urls": urls})
    one = engines.make(recipe, Policy(recipe), tell=told.append)
    assert one.origins("A") == [f"the server {plain}"]
    one.close()
    assert told == []


def test_an_address_without_a_port_has_that_of_its_scheme(monkeypatch):
    asked = []
    monkeypatch.setattr("socket.create_connection", lambda address, *_, **__: asked.append(address) or 1 / 0)
    for url in ("http://[::1]", "https://[::1]/v1", "http://h", "https://h:8443"):
        with suppress(ZeroDivisionError):
            Wire(url, 1.0).ask("/v1/models")
    assert asked == [("::1", 80), ("::1", 443), ("h", 80), ("h", 8443)]
    assert [Wire(url, 1.0).url for url in ("http://[::1]:80/", "https://H:443")] == ["http://[::1]", "https://h"]


def test_an_interrupt_while_an_adapter_is_replaced_leaves_neither_version(folder, fake, monkeypatch):
    one = engine(folder, fake)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.publish("A")
    one.close()
    assert fake.adapters == {}


def test_one_server_under_two_names_takes_every_adapter_once(folder, fake):
    """Which of two names an adapter was loaded under, or given back, does not matter to the other."""
    port = fake.http.server_port
    names = [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]
    recipe = make_recipe(folder, engine={"type": "server", "urls": names, "timeout": 5.0})
    listed, answer, refused = fake.cards, fake.answer, []

    def late() -> list[dict[str, Any]]:
        cards = listed()
        time.sleep(0.5)  # both lists are taken before either name is loaded
        return cards

    def noted(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, found = answer(path, body)
        if status != 200:
            refused.append(path)
        return status, found

    fake.cards, fake.answer = late, noted
    one = engines.make(recipe, Policy(recipe))
    one.publish("A")
    assert len(fake.adapters) == 2
    assert "/v1/load_lora_adapter" in refused, "two loads met"
    one.sample([PROMPT], "A", SAMPLING, [range(100, 110)])
    one.close()
    assert fake.adapters == {}


def test_a_server_that_nobody_here_needs_is_told_of_and_not_asked(folder, fake):
    """Two bases have a server each: what plays with one base alone leaves the other's in peace."""
    told: list[str] = []
    other = Fake("someone/else")
    recipe = make_recipe(folder, engine={"type": "server", "urls": [other.url, fake.url]})
    one = engines.make(recipe, Policy(recipe), tell=told.append)
    one.sample([PROMPT], "A", SAMPLING, [[1, 2]])
    one.close()
    assert (len(fake.asked), other.asked) == (2, [])
    assert told == [f"the server {other.url} serves someone/else, which no player here has for a base: it is not asked"]


@pytest.mark.parametrize("key", ["engine.timeout=1e10", "verifier.timeout=1e300"])
def test_a_time_that_no_clock_can_count_is_refused(key):
    with pytest.raises(UsageError, match="must be at most"):
        load("tiny", ["engine.type=server", "engine.urls=[http://127.0.0.1:1]", key])


def test_tls_where_none_is_spoken_is_refused_at_once(folder, fake):
    recipe = make_recipe(folder, engine={"type": "server", "urls": [f"https{fake.url[4:]}"], "timeout": 20.0})
    began = time.monotonic()
    with pytest.raises(UsageError, match="does not speak TLS"):
        engines.make(recipe, Policy(recipe))
    assert time.monotonic() - began < 10


def test_hanging_up_never_makes_a_safe_connection_an_open_one():
    """ssl's own shutdown forgets the cipher first: what is then being sent goes out in the clear, with the key."""
    wire = Wire("https://h", 1.0)
    ours, theirs = socket.socketpair()
    with theirs, ours:
        safe = ssl.create_default_context().wrap_socket(ours, server_hostname="h", do_handshake_on_connect=False)
        wire._connection().sock = safe
        wire.hang_up()
        assert safe._sslobj is not None
        safe.close()


def test_a_silent_server_is_given_up_shortly_at_the_start(folder, fake, monkeypatch):
    monkeypatch.setattr("agon_cli.engines.server.START_SECONDS", 0.5)
    fake.refuse["/v1/models"] = (200, Dripped(b" " * 1000))
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"away for 0\.5 s"):
        engine(folder, fake, timeout=100.0)
    assert time.monotonic() - began < 20


def test_a_server_of_several_processes_needs_room_for_the_adapters_of_each(folder, fake, monkeypatch):
    fake.room = 80
    for processes, room in ((1, 2), (4, 8)):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(UsageError) as caught:
            engine(folder, fake)
        assert f"--max-loras {room} " in caught.value.hint


def test_a_server_that_drips_is_away_like_one_that_is_silent(folder, fake):
    one = engine(folder, fake, timeout=0.7)
    fake.spoil = lambda answer: Dripped(json.dumps(answer).encode())
    with pytest.raises(UnreachableError, match="timed out"):
        one.sample([PROMPT], "A", SAMPLING, [[7]])


def test_a_server_that_does_not_answer_at_the_end_holds_it_up_only_shortly(folder, fake, monkeypatch):
    monkeypatch.setattr("agon_cli.engines.server.LEAVE_SECONDS", 0.2)
    one = engine(folder, fake, timeout=30.0)
    fake.refuse["/v1/unload_lora_adapter"] = (200, Dripped(b"x" * 100))
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 5


def test_silent_servers_are_left_side_by_side_each_at_its_first_silence(folder, monkeypatch):
    monkeypatch.setattr("agon_cli.engines.server.LEAVE_SECONDS", 1.0)
    fakes = [Fake(str(folder)) for _ in range(4)]
    many = engine(folder, *fakes)
    for fake in fakes:
        fake.refuse["/v1/unload_lora_adapter"] = (200, Dripped(b"x" * 100))
    began = time.monotonic()
    many.close()
    assert time.monotonic() - began < 3.5, "eight adapters at a second each took eight"


TINY = "package:agon_cli/tiny/base"


@pytest.mark.parametrize(
    "words", [["eval", "tiny"], ["cascade", "--drafter", TINY, "--solver", TINY, "--recipe", "tiny.yaml", "1 + 1"]]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_the_adapters_back(tmp_path, number, words):
    """From the server, and from the folder they were written to."""
    fake = Fake(models.locate(TINY).source)
    fake.room, fake.spoil = 8192, lambda answer: asked.set() or Dripped(json.dumps(answer).encode() + b" " * 1000)
    asked = threading.Event()
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    (here / "tiny.yaml").write_text(
        f"model: {{id: '{TINY}'}}\ndata: {{type: tiny}}\nengine: {{type: server, urls: ['{fake.url}']}}\n"
    )
    given = ["engine.type=server", f"engine.urls=[{fake.url}]"] if words[0] == "eval" else []
    process = subprocess.Popen(
        [sys.executable, "-m", "agon_cli.cli", *words, *given], cwd=here, env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits deafness
    )  # fmt: skip
    try:
        assert asked.wait(120), process.communicate(timeout=10)
        assert fake.adapters
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (128 + number, ""), err
    assert "Traceback" not in err
    assert fake.adapters == {}
    assert list(temporary.iterdir()) == []


ADDRESSES = [
    "http://h?x=1",
    "http://h/#y",
    "http://a b",
    "http://x..y",
    "http://h/\u00e4",
    "http://h:99999",
    "http://[",
    "http://h:0",
]


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_that_is_none_is_refused(folder, url):
    recipe = make_recipe(folder, engine={"type": "server", "urls": [url]})
    with pytest.raises(UsageError, match="is no address"):
        engines.make(recipe, Policy(recipe))


def test_a_rank_that_vllm_has_no_room_for_is_refused():
    assert [rank_room(rank) for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]
    with pytest.raises(UsageError, match="up to rank 512"):
        rank_room(513)


def test_vllm_in_process_says_what_it_needs(folder):
    """Without the package, or with it on a CPU: either way not with a 4-bit base."""
    recipe = make_recipe(folder, engine={"type": "vllm"}, model={"quantization": "nf4"})
    with pytest.raises(MachineError, match=r"needs the vllm extra|4-bit bases on a GPU alone"):
        check(recipe)
