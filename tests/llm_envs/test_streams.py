"""Training on a stream: its order, shares of processes, exact resumption, bounded memory."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import IterableDataset, interleave_datasets, iterable_dataset
from sums_data import sums

from agilerl import checks
from agilerl.llm.prompts import PromptEncoder
from agilerl.llm_envs import ReasoningGym
from agilerl.llm_envs.dataset import TrainingBatchSampler, streamed_batches
from agilerl.llm_envs.dataset.conversations import ConversationReader
from agilerl.llm_envs.dataset.stream import _has_shuffle_buffer

MakeEnv = Callable[..., ReasoningGym]


def questions(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"question": f"{number}?", "answer": number}


def generated(count: int = 11) -> IterableDataset:
    """Without features: it does not say which columns it has."""
    stream = IterableDataset.from_generator(questions, gen_kwargs={"count": count})
    assert stream.column_names is None
    return stream


STREAMS: dict[str, Callable[[], IterableDataset]] = {
    "generated": generated,
    "table": lambda: sums(0, 11).to_iterable_dataset(num_shards=3),
    "shuffled": lambda: generated().shuffle(seed=1, buffer_size=4),
    "shuffled table": lambda: (
        sums(0, 11).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=3)
    ),
    "shuffled and mapped": lambda: (
        generated().shuffle(seed=1, buffer_size=4).map(lambda row: row, batched=True, batch_size=3)
    ),
    "mapped": lambda: generated().map(lambda row: row, batched=True, batch_size=4),
    "filtered": lambda: generated(16).filter(lambda row: row["answer"] % 3),
    "interleaved": lambda: interleave_datasets(
        [generated(5), generated(9)], probabilities=[0.5, 0.5], seed=3
    ),
    "taken": lambda: generated(30).skip(4).take(11),
}


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_warned", set())


@pytest.fixture(params=STREAMS)
def build(request: pytest.FixtureRequest) -> Callable[[], IterableDataset]:
    return STREAMS[request.param]


@pytest.fixture
def make(make_env: MakeEnv) -> MakeEnv:
    def made(stream: IterableDataset, **arguments: Any) -> ReasoningGym:
        defaults = {"reward_fn": lambda completion: 0.0, "max_context_length": 100}
        return make_env(train_dataset=stream, **(defaults | arguments))

    return made


def step(env: ReasoningGym) -> list[str]:
    """The questions of the batch that waits, which is then answered."""
    prompts, asked = env.reset(), env.questions
    env.step([torch.cat([p["input_ids"], torch.tensor([[32]])], dim=1) for p in prompts])
    return asked


def expected_pass(build: Callable[[], IterableDataset], epoch: int) -> list[str]:
    stream = build()
    stream.set_epoch(epoch)
    return [row["question"] for row in stream]


def test_passes_in_the_streams_own_order(
    build: Callable[[], IterableDataset], make: MakeEnv
) -> None:
    env = make(build())
    for epoch in range(3):
        expected, seen = expected_pass(build, epoch), []
        while env.num_epochs == epoch:
            seen += step(env)
        assert seen == expected
        assert env.num_epochs == epoch + 1


def test_a_shuffled_stream_has_another_order_in_every_pass() -> None:
    passes = [expected_pass(STREAMS["shuffled"], epoch) for epoch in range(3)]
    assert len({str(each) for each in passes}) == 3


@pytest.mark.parametrize(("rows", "ranks", "size"), [(7, 1, 3), (20, 3, 2), (13, 2, 2), (5, 5, 1)])
def test_processes_share_batches_as_those_of_a_dataset(
    make: MakeEnv, rows: int, ranks: int, size: int
) -> None:
    """No row is dropped or repeated, and every process has one in every batch."""
    envs = [
        make(
            generated(rows),
            data_batch_size_per_gpu=size,
            accelerator=SimpleNamespace(process_index=rank, num_processes=ranks),
        )
        for rank in range(ranks)
    ]
    samplers = [TrainingBatchSampler(rows, size, 0, rank, ranks) for rank in range(ranks)]
    in_order = TrainingBatchSampler(rows, rows, 0).current()
    while samplers[0].epoch < 2:
        if samplers[0].epoch == 0:
            shares = [[in_order.index(row) for row in each.current()] for each in samplers]
        assert {json.dumps(env.state_dict()) for env in envs} == {json.dumps(envs[0].state_dict())}
        seen = [step(env) for env in envs]
        if samplers[0].epoch == 0:
            assert seen == [[f"{row}?" for row in share] for share in shares]
        for sampler in samplers:
            sampler.advance()
        assert {env.num_epochs for env in envs} == {samplers[0].epoch}


def test_a_state_resumes_exactly(build: Callable[[], IterableDataset], make: MakeEnv) -> None:
    """At every batch of two passes."""
    whole, states = make(build(), data_batch_size_per_gpu=2), []
    batches = []
    while whole.num_epochs < 2:
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append(step(whole))
    batches += [step(whole) for _ in range(8)]
    for done, state in enumerate(states):
        resumed = make(build(), data_batch_size_per_gpu=2)
        resumed.load_state_dict(state)
        assert resumed.num_epochs == state["epoch"]
        assert [step(resumed) for _ in range(8)] == batches[done : done + 8]


def test_going_back_after_resuming(make: MakeEnv) -> None:
    env = make(generated(), data_batch_size_per_gpu=2)
    first = step(env)
    for _ in range(3):
        step(env)
    env.load_state_dict(env.state_dict())
    env.reset(reset_dataloaders=True)
    assert env.questions == first


def test_resuming_reads_on_from_the_datasets_state(make: MakeEnv) -> None:
    """Not from the start of the pass, except where rows wait in a shuffle buffer."""
    read: list[int] = []

    def noted(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["answer"])
        return row

    for stream, first in ((generated(200), 112), (generated(200).shuffle(1, buffer_size=4), 0)):
        env = make(stream.map(noted), data_batch_size_per_gpu=4)
        for _ in range(30):
            step(env)
        state = env.state_dict()
        resumed = make(stream.map(noted), data_batch_size_per_gpu=4)
        read.clear()
        resumed.load_state_dict(state)
        assert first <= min(read) <= first + 8
        assert step(resumed) == step(env)


def test_rows_are_read_as_they_are_needed(make: MakeEnv) -> None:
    """An endless stream; of what was read only the next batch, and one row more, is kept."""
    env = make(generated(3).repeat(None), data_batch_size_per_gpu=4)
    for _ in range(100):
        step(env)
    kept = env._train._ahead, env._train._waiting, env._train._checkpoints
    assert [len(each) for each in kept] == [1, 1, 2]
    assert env.num_epochs == 0
    assert env.state_dict()["offset"] == 400


def test_upcoming_leaves_the_position(make: MakeEnv) -> None:
    env = make(generated(7), data_batch_size_per_gpu=3)
    step(env)
    before = env.state_dict()
    announced = [[p["text"] for p in prompts] for prompts in env.upcoming(5)]
    assert [len(batch) for batch in announced] == [3, 1, 3, 3, 1]
    assert (env.state_dict(), env.num_epochs) == (before, 0)
    for batch in announced:
        assert [p["text"] for p in env.reset()] == batch
        step(env)
    assert env.num_epochs == 2
    assert env.state_dict()["offset"] == env.state_dict()["dataset_state_offset"] == 0


def test_environments_may_share_a_stream(make: MakeEnv) -> None:
    stream = STREAMS["shuffled table"]()
    one, other = make(stream), make(stream)
    alone = make(STREAMS["shuffled table"]())
    expected = [step(alone) for _ in range(9)]
    for batch in expected[:5]:
        assert step(one) == batch
    for batch in expected:
        assert step(other) == batch
    assert step(one) == expected[5]
    other.reset(reset_dataloaders=True)
    assert step(other) == expected[0]


def test_rows_that_are_too_long_are_left_out(
    make: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    """25 tokens around the question."""
    rows = [{"question": "x" * (1 + i % 4), "answer": ""} for i in range(12)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    env = make(stream, max_context_length=27, test_dataset=None)
    assert env.prompt_lengths() == [27]
    seen = []
    while env.num_epochs < 2:
        seen += step(env)
    assert seen == ["x", "xx"] * 6
    dropped = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert len(dropped) == 1
    assert dropped[0].startswith("train_dataset: dropped 6 of 12 rows")


def test_a_stream_has_no_length(make: MakeEnv) -> None:
    with pytest.raises(TypeError, match="train_dataset is a stream, which has no length: bound"):
        len(make(generated()))


def test_the_fingerprint_is_of_columns_and_first_rows(make: MakeEnv) -> None:
    digests = {
        make(generated()).fingerprint(),
        make(generated(20)).fingerprint(),
        make(STREAMS["shuffled"]()).fingerprint(),
        make(generated().map(lambda row: {"question": row["question"] + "!"})).fingerprint(),
    }
    assert len(digests) == 3  # what comes later is not known


def test_conversations_in_a_stream(make: MakeEnv) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"prompt": [{"role": "user", "content": "2+2?"}]}
        yield {"prompt": []}

    stream = IterableDataset.from_generator(rows)
    env = make(stream, conversation_template=None, test_dataset=None, data_batch_size_per_gpu=1)
    with pytest.raises(ValueError, match="train_dataset row 1: prompt has no messages"):
        env.reset()


def test_test_prompts_that_come_by(make: MakeEnv, caplog: pytest.LogCaptureFixture) -> None:
    test = [{"question": f"{number}?", "answer": 0} for number in range(15, 35)]
    env = make(generated(20), test_dataset=test)
    while env.num_epochs < 2:
        step(env)
    found = [r.getMessage() for r in caplog.records if "are in train_dataset too" in r.getMessage()]
    assert len(found) == 1
    assert found[0].startswith("Of the prompts of test_dataset at least 10%")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"stream": generated(0)}, ValueError, "train_dataset has no rows"),
        ({"max_context_length": None}, ValueError, "None, but train_dataset is a stream"),
        ({"conversation_template": None}, ValueError, "train_dataset has no conversations"),
        (
            {"stream": generated().remove_columns("answer"), "reward_fn": None},
            ValueError,
            "'answer'",
        ),
    ],
)
def test_bad_arguments(
    make: MakeEnv, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    stream = arguments.pop("stream", None)
    if "reward_fn" in arguments:
        arguments["reward_fn"] = lambda completion, answer: 0.0
    with pytest.raises(error, match=match):
        make(generated() if stream is None else stream, **arguments)


def test_too_few_rows(make: MakeEnv) -> None:
    ranks = SimpleNamespace(process_index=0, num_processes=3)
    with pytest.raises(ValueError, match=r"2 rows of at most max_context_length=100 .* 3 pro"):
        make(generated(2), accelerator=ranks).reset()
    with pytest.raises(ValueError, match="0 rows of at most max_context_length=5 tokens in 11"):
        make(generated(), max_context_length=5, test_dataset=None).reset()
    with pytest.raises(ValueError, match="none of the first 1000 prompts fits"):
        make(generated().repeat(None), max_context_length=5, test_dataset=None).reset()


def test_a_state_of_another_stream_is_refused(make: MakeEnv) -> None:
    env = make(generated())
    step(env)
    state = env.state_dict()
    for other in (generated().skip(1), generated(2)):
        with pytest.raises(ValueError, match="gives another row 3 in pass 0 than when"):
            make(other).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state has the keys \['epoch'\]"):
        env.load_state_dict({"epoch": 1})


@pytest.mark.process
def test_an_open_stream_leaves_the_interpreter_quietly(tmp_path: Path) -> None:
    """Without being closed, a stream of Parquet files ends in tracebacks."""
    code = """
from datasets import Dataset, load_dataset
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import byte_tokenizer

Dataset.from_list([{"question": f"{i}?"} for i in range(50)]).to_parquet("rows.parquet")
stream = load_dataset(
    "parquet", data_files="rows.parquet", streaming=True, split="train", cache_dir="cache"
)
template = [{"role": "user", "content": "{question}"}]
env = ReasoningGym(
    stream, None, byte_tokenizer(), lambda completion: 0.0, template, max_context_length=64
)
print(len(env.reset()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "8\n"
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("other", [generated(11).skip(1), generated(2)])
def test_a_refused_state_leaves_everything_as_it_was(make: MakeEnv, other: IterableDataset) -> None:
    saved, env, alone = (make(each) for each in (generated(), other, other))
    for _ in range(2):
        step(saved)
    step(env)
    step(alone)
    before = env.state_dict(), env.reset()[0]["text"]
    with pytest.raises(ValueError, match="than when state was saved"):
        env.load_state_dict(saved.state_dict())
    assert (env.state_dict(), env.reset()[0]["text"]) == before
    assert [step(env) for _ in range(5)] == [step(alone) for _ in range(5)]


@pytest.mark.parametrize("kind", ["arrow", "pandas", "numpy", "torch", None])
def test_formats(make: MakeEnv, kind: str | None) -> None:
    """Rows of tables are read as dicts, as those of a dataset are."""
    for stream in (sums(0, 5).to_iterable_dataset(), generated(5)):
        env = make(stream.with_format(kind), data_batch_size_per_gpu=2)
        asked = step(env)
        resumed = make(stream.with_format(kind), data_batch_size_per_gpu=2)
        resumed.load_state_dict(env.state_dict())
        assert step(resumed) == step(env) != asked


def test_a_generator_that_holds_a_client(make: MakeEnv) -> None:
    """It is not copied: a lock cannot be pickled."""

    class Client:
        def __init__(self) -> None:
            self.lock, self.asked = threading.Lock(), 0

    def from_client(client: Client) -> Iterator[dict[str, Any]]:
        for number in range(6):
            with client.lock:
                client.asked += 1
            yield {"question": f"{number}?", "answer": number}

    client = Client()
    stream = IterableDataset.from_generator(from_client, gen_kwargs={"client": client})
    one, other = make(stream), make(stream)
    assert step(one) == step(other) == ["0?", "1?", "2?"]
    assert step(other) == ["3?", "4?", "5?"]
    other.load_state_dict(one.state_dict())
    assert step(one) == step(other) == ["3?", "4?", "5?"]
    assert client.asked > 0


def test_prompts_that_are_too_long_without_end(
    make: MakeEnv, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After one that is not."""
    monkeypatch.setattr(streamed_batches, "_LONG_ROWS_IN_A_ROW", 50)

    def rows() -> Iterator[dict[str, Any]]:
        yield {"question": "short"}
        while True:
            yield {"question": "x" * 100}

    env = make(IterableDataset.from_generator(rows), test_dataset=None)
    with pytest.raises(ValueError, match=r"of 50 rows up to row 50 no prompt .*=100 tokens"):
        env.reset()
    (record,) = caplog.records
    assert record.getMessage() == (
        "train_dataset row 1 is left out, and so will others be: its prompt has 125 tokens "
        "(template included), more than max_context_length=100."
    )


@pytest.mark.parametrize("streamed", [True, False])
def test_prompts_are_rendered_once(
    make: MakeEnv, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """As the training loop asks for them, for two agents."""
    rows = generated(40) if streamed else list(questions(40))
    env = make(rows, data_batch_size_per_gpu=2, test_dataset=None)
    rendered, tokenised = [], []
    render, tokenize = PromptEncoder.render, PromptEncoder.tokenize

    def noted_render(self: PromptEncoder, conversation: Any) -> str:
        rendered.append(conversation)
        return render(self, conversation)

    def noted_tokenize(self: PromptEncoder, texts: Any) -> list[list[int]]:
        tokenised.extend(texts)
        return tokenize(self, texts)

    monkeypatch.setattr(PromptEncoder, "render", noted_render)
    monkeypatch.setattr(PromptEncoder, "tokenize", noted_tokenize)
    for _ in range(5):
        env.upcoming(1)
        env.upcoming(2)
        step(env)
        step(env)
    # One row more of a stream is read, to see whether the pass goes on.
    assert 20 <= len(rendered) == len(tokenised) <= 23
    env.reset()[0]["text"] = "changed"
    assert env.reset()[0]["text"] != "changed"


def test_a_shuffle_buffer_is_filled_once(make: MakeEnv) -> None:
    read: list[int] = []

    def noted(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["answer"])
        return row

    stream = generated(200).map(noted).shuffle(seed=1, buffer_size=50)
    expected = [row["question"] for row in stream.take(12)]
    read.clear()
    env = make(stream, data_batch_size_per_gpu=3)
    assert [question for _ in range(4) for question in step(env)] == expected
    assert len(read) == len(set(read)) <= 70
    env.reset(reset_dataloaders=True)
    assert env.questions == expected[:3]


def test_rows_are_read_once_without_test_rows(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To check them and to count their tokens; there is nothing to compare them with."""
    names = []
    read = ConversationReader.read

    def noted(self: ConversationReader, row: Any, where: str) -> Any:
        names.append(where)
        return read(self, row, where)

    monkeypatch.setattr(ConversationReader, "read", noted)
    for length in (None, 100):
        make_env(train_dataset=list(questions(100)), test_dataset=None, max_context_length=length)
        assert len(names) == 100 + 1  # the first is rendered before
        names.clear()


def test_where_datasets_keeps_what_is_read_here() -> None:
    """Shuffle buffers are found, and positions copied, by these private names of datasets."""
    parts = {"ex_iterable", "ex_iterables"}
    classes = [
        each
        for each in vars(iterable_dataset).values()
        if isinstance(each, type) and issubclass(each, iterable_dataset._BaseExamplesIterable)
    ]
    assert iterable_dataset.BufferShuffledExamplesIterable in classes
    for each in classes:
        parameters = inspect.signature(each).parameters.values()
        names = {p.name for p in parameters if "ExamplesIterable" in str(p.annotation)}
        assert names <= parts, each
    stream = generated()
    assert isinstance(stream._ex_iterable, iterable_dataset._BaseExamplesIterable)
    assert isinstance(stream.map(lambda row: row)._ex_iterable.ex_iterable, tuple(classes))
    assert len(interleave_datasets([stream, stream])._ex_iterable.ex_iterables) == 2
    assert stream.with_format("arrow")._formatting.format_type == "arrow"
    buffered = {name for name, each in STREAMS.items() if _has_shuffle_buffer(each())}
    assert buffered == {"shuffled", "shuffled table", "shuffled and mapped"}


def test_held_out_rows_of_a_stream_are_skipped_by_training(make: MakeEnv) -> None:
    stream = generated(12)
    with pytest.raises(TypeError) as caught:
        make(stream, test_dataset=stream)
    remedy = "train_dataset=stream.skip(500), test_dataset=list(stream.take(500))"
    assert remedy in str(caught.value)
    arguments = {"train_dataset": stream.skip(4), "test_dataset": list(stream.take(4))}
    env = make(arguments.pop("train_dataset"), **arguments)
    trained_on = step(env)
    while env.num_epochs == 0:
        trained_on += step(env)
    assert trained_on == [f"{number}?" for number in range(4, 12)]
    with env.eval_mode():
        env.reset()
        assert env.questions == [f"{number}?" for number in range(4)]
