"""The stepped engine and the reaper, on real vLLM with a tiny model on a CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.needs import needs_vllm
from helpers.nvidia import ABSENT, show

from prefect_raybatch.doctor import CheckContext, machine
from prefect_raybatch.stages.label_cutoff import EarlyStop, LabelCutoff, grammar_bytes
from prefect_raybatch.stages.vllm import reaper
from prefect_raybatch.stages.vllm.stepper import (
    Completion,
    EngineDied,
    Request,
    SteppedEngine,
)

pytestmark = [needs_vllm, pytest.mark.whole]

ROOT = Path(__file__).parents[2]
CHOICES = ["Law Firm", "Healthcare", "Technology", "Retail", "Other"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # a core with a process of its own, to be killed
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
START_S = 600
"""Seconds an engine may take to start on a busy machine; about 15 on a quiet one."""


def make_random_model(folder: Path) -> str:
    """A Llama of two small layers with random weights and a byte-level vocabulary."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [Path(__file__).read_text()],
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=len(tokenizer),
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    bundled = ROOT / "prefect_raybatch" / "demo" / "model"
    if (bundled / "config.json").exists():
        return str(bundled)
    return make_random_model(tmp_path_factory.mktemp("model"))


def engine_kwargs(model: str) -> dict:
    return dict(
        model=model,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        seed=0,
    )


def start_script(model: str, body: str, **environment: str) -> subprocess.Popen:
    """A Python process that has a `SteppedEngine` named `engine` and then runs `body`."""
    script = textwrap.dedent("""
        import os, sys, time
        from prefect_raybatch.stages.vllm.stepper import EngineDied, Request, SteppedEngine
        kwargs = {kwargs!r}
        if __name__ == "__main__":
            engine = SteppedEngine(kwargs)
            print("READY", flush=True)
    """).format(kwargs=engine_kwargs(model)) + textwrap.indent(textwrap.dedent(body), "    ")
    paths = [str(ROOT), str(ROOT / "tests/helpers/plugin_log"), os.environ.get("PYTHONPATH", "")]
    path = ["PYTHONPATH", os.pathsep.join(paths)]
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, path[0]: path[1], **environment},
    )


def wait_ready(process: subprocess.Popen) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "READY":
            return
    pytest.fail(f"the engine did not start, exit status {process.wait()}")


@pytest.fixture(scope="module")
def plugin_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which process called our vLLM plugin: a file each for `victim` and `in_process`."""
    return tmp_path_factory.mktemp("plugin")


@pytest.fixture(scope="module")
def victim(model: str, plugin_logs: Path) -> Iterator[subprocess.Popen]:
    """A process with an engine that waits to be killed. A list of vLLM plugins that lacks ours must
    not keep it out."""
    log = str(plugin_logs / "victim")
    process = start_script(model, "time.sleep(600)", PLUGIN_LOG=log, VLLM_PLUGINS="another")
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def in_process(model: str, plugin_logs: Path) -> Iterator[subprocess.Popen]:
    """A process whose engine core is not a subprocess: answers three rows, runs out of
    memory, is replaced by another one in the same process, and ends normally."""
    process = start_script(
        model,
        """
        rows = engine.run([Request([5, 6, 7 + i], {"max_tokens": 3, "ignore_eos": True})
                           for i in range(3)])
        print(*(len(row.token_ids[0]) for row in rows), flush=True)
        def out_of_memory():
            raise MemoryError("as the test wants")
        engine._engine.step = out_of_memory
        try:
            engine.run([Request([5], {})])
        except EngineDied as death:
            print("DIED", death, flush=True)
        engine = SteppedEngine(kwargs)
        print(len(engine.run([Request([5], {"max_tokens": 2})])), flush=True)
        engine.close()
        try:
            engine.run([Request([5], {})])
        except EngineDied:
            print("CLOSED", flush=True)
    """,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PLUGIN_LOG=str(plugin_logs / "in_process"),
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def live_engine(model: str) -> Iterator[Callable[[], SteppedEngine]]:
    """Gives the shared engine, and a new one when a test has killed it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        engines: list[SteppedEngine] = []

        def get() -> SteppedEngine:
            if not engines or engines[-1].stats()["died"]:
                engines.append(SteppedEngine(engine_kwargs(model)))
            return engines[-1]

        yield get
        for engine in engines:
            engine.close()


@pytest.fixture
def engine(live_engine: Callable[[], SteppedEngine]) -> SteppedEngine:
    return live_engine()


@pytest.fixture(scope="module")
def tokenizer(model: str) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def engine_processes(pid: int) -> list[int]:
    return [child for child in descendants(pid) if "VLLM::" in command(child)]


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def helpers(pid: int) -> list[int]:
    """The reaper's helper of a process."""
    mark = f"reaper.py\0{pid}\0"
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [one for one in pids if mark in command(one)]


def helper_looks(pid: int) -> None:
    """Waits until the helper of a process has looked at all processes that there are now.

    It sleeps between two looks, and Linux counts how often.
    """
    (helper,) = helpers(pid)

    def slept() -> int:
        status = Path(f"/proc/{helper}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = slept()
    assert wait_until(lambda: slept() >= before + 4, 120)


def exact(tokens: int) -> dict:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}


def test_order_is_kept_though_rows_end_out_of_order(engine: SteppedEngine) -> None:
    # Far more rows than slots, each of its own length: what comes back tells which row it was.
    rows = engine.run([Request([5 + i % 50, 6, 7], exact(1 + (i * 7) % 13)) for i in range(150)])
    assert [len(row.token_ids[0]) for row in rows] == [1 + (i * 7) % 13 for i in range(150)]
    assert all(row.finish_reason == "length" and row.error is None for row in rows)
    assert all(row.texts is None and row.prompt_tokens == 3 for row in rows)


LABELS = [
    ["Law Firm", "Retail", "Real Estate", "Other"],
    ["R", "Re", "Real", "Retail", "Retailer"],  # each the beginning of another
    ["é", "è", "日本", "日曜", "naïve 😀", "naïve 😁"],  # alike up to the middle of a character
    ["only"],
]


@pytest.mark.parametrize("way", ["decided", "first_token"])
def test_answers_stopped_early_are_those_written_out(
    engine: SteppedEngine, tokenizer: Any, way: EarlyStop
) -> None:
    kinds: list[dict] = [{"temperature": 0}, {"temperature": 2}]
    kinds += [{"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4}]
    kinds += [{"temperature": 2, "n": 3, "top_k": 200}]
    fields = [{**k, "choice": c, "max_tokens": 40} for c in LABELS for k in kinds]
    requests = [
        Request([5 + i, 6 + i % 7, 7], {**f, **({"seed": i} if f["temperature"] else {})})
        for i in range(12)
        for f in fields
    ]
    early = LabelCutoff(way, lambda: grammar_bytes(tokenizer))
    steps = engine.stats()["output_tokens"]
    whole, again = engine.run(requests), engine.run(requests)
    spent = (engine.stats()["output_tokens"] - steps) / 2
    made = early.run(engine.run, requests)
    assert engine.stats()["output_tokens"] - steps - 2 * spent < 0.8 * spent
    texts = [[spelt(tokenizer, c) for c in run] for run in (whole, again, made)]
    odd = [i for i, (a, b) in enumerate(zip(*texts[:2], strict=True)) if a != b]
    wrong = [i for i, (a, b) in enumerate(zip(texts[0], texts[2], strict=True)) if a != b]
    assert len(wrong) <= len(odd), [(fields[i % 16], texts[0][i], texts[2][i]) for i in wrong]
    assert [row.error for row in [*whole, *made] if row.error] == []
    assert {row.finish_reason for row in [*whole, *made]} == {"stop"}
    assert len({t for text in texts[2] for t in text}) >= 8


def spelt(tokenizer: Any, row: Completion) -> list[str]:
    return row.texts or tokenizer.batch_decode(row.token_ids, skip_special_tokens=True)


def test_refused_rows_disturb_no_other(engine: SteppedEngine) -> None:
    good = Request([5, 6, 7], exact(2))
    bad = [
        Request([5] * 500, exact(2)),
        Request([], exact(2)),
        Request([5], {"no_such_field": 1}),
        Request([5], {"temperature": -1}),
        Request([5], {"structured_outputs": {"regex": "("}}),
        Request([10**9], exact(2)),
        Request([5], {"choice": ["a"], "structured_outputs": {"regex": "a"}}),
    ]
    requests = [good]
    for request in bad:
        requests += [request, good]
    rows = engine.run(requests)
    assert [row.error is None for row in rows] == [i % 2 == 0 for i in range(len(rows))]
    assert all(row.token_ids == [] and row.finish_reason is None for row in rows[1::2])
    name, message = rows[1].error or ("", "")
    assert name and "500" in message
    assert all(len(row.token_ids[0]) == 2 for row in rows[::2])


def test_a_form_that_the_engines_backend_does_not_take_fails_with_the_remedy(
    model: str, live_engine: Callable[[], SteppedEngine]
) -> None:
    """vLLM accepts it for guidance, and its engine has xgrammar from its first row on."""
    live_engine().run([Request([5], {"structured_outputs": {"regex": "a"}})])
    letters = Request([5], {"structured_outputs": {"regex": r"\p{L}+"}})
    (row,) = live_engine().run([letters])
    assert row.error is not None and row.error[0] == "RequestFailed"
    assert "engine.structured_outputs_config: {backend: guidance}" in row.error[1]


def test_labels_with_any_characters_are_the_answers_whatever_was_asked_before(
    live_engine: Callable[[], SteppedEngine],
) -> None:
    """One with a line break sends vLLM's own choice to guidance, which cannot hold one with a
    tab."""
    choices = [
        ["a\nb", "\n"],
        ["a\tb", "\t"],
        ["\x1b[0m", "\0"],
        ["\u00a0x", "\U0001f600"],
        CHOICES,
    ]
    fields = [{"choice": labels, "detokenize": True, "max_tokens": 50} for labels in choices]
    forms = [
        {"structured_outputs": {"choice": labels}, **fields[0], "choice": None}
        for labels in choices
    ]
    rows = live_engine().run([Request([5, 6], one) for one in [*fields, *forms]])
    for row, labels in zip(rows, [*choices, *choices], strict=True):
        assert row.error is None and (row.texts or [""])[0] in labels, (row, labels)


def test_a_call_of_refused_rows_alone_returns(engine: SteppedEngine) -> None:
    assert [row.error is not None for row in engine.run([Request([], {})] * 3)] == [True] * 3
    assert engine.run([]) == []


def test_several_threads_at_once(engine: SteppedEngine) -> None:
    def call(tokens: int) -> list[Completion]:
        return engine.run([Request([9, tokens, i % 40 + 1], exact(tokens)) for i in range(60)])

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(call, range(1, 7)))
    for tokens, rows in enumerate(answers, start=1):
        assert [len(row.token_ids[0]) for row in rows] == [tokens] * 60
    assert engine.stats()["in_flight"] == engine.stats()["waiting"] == 0


def test_structured_choice(engine: SteppedEngine, tokenizer) -> None:
    params = {"temperature": 0, "max_tokens": 24, "choice": CHOICES}
    rows = engine.run([Request([5 + i, 6], dict(params)) for i in range(40)])
    texts = tokenizer.batch_decode([row.token_ids[0] for row in rows], skip_special_tokens=True)
    assert set(texts) <= set(CHOICES)
    assert {row.finish_reason for row in rows} == {"stop"}


def test_several_answers_a_row(engine: SteppedEngine) -> None:
    params = {"n": 2, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 3}
    rows = engine.run([Request([5, 6, 7 + i], params) for i in range(20)])
    assert all([len(ids) for ids in row.token_ids] == [8, 8] for row in rows)
    assert any(row.token_ids[0] != row.token_ids[1] for row in rows)


def test_stop_strings_need_texts(engine: SteppedEngine) -> None:
    free = engine.run([Request([5, 6], {**exact(12), "detokenize": True})])[0]
    assert free.texts is not None and free.finish_reason == "length"
    stop = free.texts[0][3:5]
    row = engine.run([Request([5, 6], {**exact(12), "stop": [stop]})])[0]
    assert row.texts == [free.texts[0][: free.texts[0].index(stop)]]
    assert row.finish_reason == "stop"


def test_prefix_cache_is_counted(engine: SteppedEngine) -> None:
    before = engine.stats()
    prompt = [5, 6, 7, 8] * 31
    engine.run([Request(prompt, exact(1))])
    engine.run([Request([*prompt[:-1], 9], exact(1))])
    after = engine.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 248
    assert after["rows"] - before["rows"] == 2
    assert after["steps"] > before["steps"] and after["busy_s"] > before["busy_s"]


def test_what_vllm_refuses_at_start_is_raised() -> None:
    with pytest.raises(Exception, match="no-such-model"):
        SteppedEngine({"model": "/no-such-model"})


def test_in_process_engine(in_process: subprocess.Popen) -> None:
    wait_ready(in_process)
    assert in_process.stdout is not None
    answers, death, again, closed = in_process.stdout.read().splitlines()
    assert (answers, again, closed) == ("3 3 3", "1", "CLOSED")
    assert death.startswith("DIED") and "as the test wants" in death
    assert in_process.wait(START_S) == 0


def test_the_doctor_sees_the_engine_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, error=ABSENT)
    # As a user's: two processes more, as of `ENVIRONMENT`, would import vLLM too.
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setattr(machine, "START_LIMIT_SECONDS", START_S)
    (finding,) = machine.check_engine(CheckContext(None, lambda job: job))
    assert (finding.check, finding.mark) == ("engine", "pass"), finding


def called(log: Path) -> dict[int, set[str]]:
    """Functions of our vLLM plugin that ran, by process."""
    found: dict[int, set[str]] = {}
    for line in log.read_text().splitlines():
        process, function = line.split()
        found.setdefault(int(process), set()).add(function)
    return found


def test_amx_is_asked_for_in_every_process_of_an_engine(
    in_process: subprocess.Popen, victim: subprocess.Popen, plugin_logs: Path
) -> None:
    assert in_process.wait(START_S) == 0
    both = {"register", "ask_for_amx"}
    assert called(plugin_logs / "in_process")[in_process.pid] == both

    def found() -> dict[int, set[str]]:
        below = {pid: command(pid) for pid in engine_processes(victim.pid)}
        if not all(any(kind in c for c in below.values()) for kind in ("EngineCore", "Worker")):
            return {}  # not started yet
        log = called(plugin_logs / "victim")
        return {pid: log.get(pid, set()) for pid in (victim.pid, *below)}

    # A process has its name before it calls plugins.
    wait_until(lambda: list(found().values()) == [both] * 3, START_S)
    assert list(found().values()) == [both] * 3


def test_killed_core_ends_every_call(engine: SteppedEngine, victim: subprocess.Popen) -> None:
    others = descendants(victim.pid)
    processes = [pid for pid in engine_processes(os.getpid()) if pid not in others]
    core = next(pid for pid in processes if "EngineCore" in command(pid))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            engine.run([Request([5, 6, 7], exact(100)) for _ in range(3000)])
        except EngineDied as error:
            errors.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: engine.stats()["in_flight"] > 0, 60)
    os.kill(core, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)  # all have been told
    assert len(errors) == 3 and str(core) in str(errors[0])
    assert "exit code -9 (SIGKILL: " in str(errors[0])
    with pytest.raises(EngineDied, match=str(core)):
        engine.run([Request([5], {})])
    # All of it goes without close(): who gets EngineDied has nothing left to clean up.
    assert wait_until(lambda: not any("VLLM::" in command(pid) for pid in processes), 60)
    assert wait_until(
        lambda: not any(t.name.startswith("SteppedEngine") for t in threading.enumerate()), 60
    )
    engine.close()
    engine.close()


def test_reaper_ends_engine_of_a_killed_process(victim: subprocess.Popen) -> None:
    wait_ready(victim)
    processes = engine_processes(victim.pid)
    assert processes
    helper_looks(victim.pid)
    victim.kill()
    victim.wait()
    assert wait_until(lambda: not any("VLLM::" in command(pid) for pid in processes), 120)


SELDOM = """
import subprocess, sys, time
from reaper import watch_children
watch_children()
time.sleep(3)
assert watch_children()
command = [sys.executable, "-c", "import time; time.sleep(120)", "VLLM::EngineCore"]
engine = subprocess.Popen(command)
print(engine.pid, flush=True)
time.sleep(60)
"""


def test_a_reaper_that_looks_seldom_is_told_of_another_engine(tmp_path: Path) -> None:
    text = Path(reaper.__file__).read_text()
    assert "\nSTART_S = 300.0\n" in text and reaper.SELDOM_S > 3
    (tmp_path / "reaper.py").write_text(text.replace("START_S = 300.0", "START_S = 1.0"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", SELDOM], stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        helper_looks(process.pid)  # twice a second, because it was told of the engine
        process.kill()
        process.wait()
        try:
            assert wait_until(lambda: "VLLM::" not in command(engine), 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)


REAPED = """
import os, subprocess, sys, time
from prefect_raybatch.stages.vllm.reaper import watch_children
assert watch_children() and watch_children()
sleep = "import time; time.sleep(120)"
holder = (
    "from multiprocessing.shared_memory import SharedMemory as S; import signal; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); s = S(create=True, size=64); "
    "print(s.name, flush=True); " + sleep
)
engine = subprocess.Popen(
    [sys.executable, "-c", holder, "VLLM::EngineCore"], stdout=subprocess.PIPE, text=True
)
other = os.fork()  # seen by the helper before it is another program: on a busy machine this is long
if other == 0:
    time.sleep(1.5)
    os.execv(sys.executable, [sys.executable, "-c", sleep, "some other program"])
print(engine.pid, other, engine.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["killed", "normal"])
def test_reaper_spares_others_and_leaves_itself_not_behind(ending: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", REAPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    *pids, segment = process.stdout.readline().split()
    child, other = map(int, pids)
    assert Path("/dev/shm", segment).exists()

    try:
        (helper,) = helpers(process.pid)
        assert helper not in descendants(process.pid)
        assert wait_until(lambda: command(other).endswith("some other program\0"), 60)
        helper_looks(process.pid)
        if ending == "killed":
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        assert wait_until(lambda: "VLLM::" not in command(child), 60)
        assert wait_until(lambda: not helpers(process.pid), 60)
        assert "some other program" in command(other)
        assert wait_until(lambda: not Path("/dev/shm", segment).exists(), 60)
    finally:
        os.kill(other, signal.SIGKILL)
        process.kill()
        process.wait()
