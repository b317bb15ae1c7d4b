"""Guesses in a scheduler: which requests get them, when it waits, and what is told of them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from pingpong_bus.messages import DraftCounts, Sampling
from pingpong_worker.config import WorkerConfig
from pingpong_worker.draft_matcher import DraftMatcher
from pingpong_worker.vllm_draft_runner import faults
from pingpong_worker.vllm_guesses import Guesses
from pingpong_worker.vllm_guessing import counts_of, guessed_for, guesses, known_runs, refusal
from pingpong_worker.vllm_handle import Handling
from pingpong_worker.vllm_settings import GUESSING_GPU_WORKER, engine_arguments

RUN = list(range(100, 160))


def request(name: str, written: int = 20, *, max_tokens: int = 60, **mark: Any) -> SimpleNamespace:
    """One that has written the first tokens of RUN, and computed all but the last."""
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        output_token_ids=RUN[:written],
        num_output_tokens=written,
        num_tokens=3 + written,
        num_computed_tokens=2 + written,
        num_output_placeholders=0,
        max_tokens=max_tokens,
        spec_token_ids=[],
        sampling_params=SimpleNamespace(extra_args={"pingpong": mark}),
    )


def marked(name: str, written: int = 20, **more: Any) -> SimpleNamespace:
    return request(name, written, drafts=[RUN], draft_tokens=6, **more)


def output(guessed: dict[str, list[int]], *others: str) -> SimpleNamespace:
    scheduled = {name: 1 + len(ids) for name, ids in guessed.items()} | dict.fromkeys(others, 1)
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: ids for name, ids in guessed.items() if ids},
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[],
    )


def prepare(guess: Guesses, *running: SimpleNamespace) -> bool:
    return guess.prepare(running, {one.request_id: one for one in running})


def write(one: SimpleNamespace, tokens: int) -> None:
    one.output_token_ids = RUN[: one.num_output_tokens + tokens]
    one.num_output_tokens += tokens
    one.num_tokens += tokens
    one.num_computed_tokens += tokens


def test_only_what_is_marked_and_decodes_is_guessed_for() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    plain, decode, prompt = request("plain"), marked("decode"), marked("prompt", 0)
    prompt.num_computed_tokens = 1
    assert not prepare(guess, decode, prompt)
    assert decode.spec_token_ids == RUN[20:26]
    assert prompt.spec_token_ids == []
    assert not prepare(guess, plain)
    assert plain.spec_token_ids == []


def test_no_more_is_guessed_than_may_be_written() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    one = marked("a", max_tokens=23)
    prepare(guess, one)
    assert one.spec_token_ids == RUN[20:22], "three are left, and one comes without a guess"
    last = marked("b", max_tokens=21)
    prepare(guess, last)
    assert last.spec_token_ids == []


def test_how_it_went_is_told_with_the_tokens() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    one = marked("a")
    prepare(guess, one)
    step = output({"a": one.spec_token_ids})
    guess.scheduled(step)
    write(one, 5)  # four of six were right
    result = SimpleNamespace(request_id="a", finish_reason=None, kv_transfer_params={"connector": 1})
    guess.ended(step, {0: SimpleNamespace(outputs=[result])}, 1.0)
    assert result.kv_transfer_params["connector"] == 1
    assert counts_of(result) == DraftCounts(steps=21, drafted=6, accepted=4)
    prepare(guess, one)
    step = output({"a": one.spec_token_ids})
    write(one, 7)
    result = SimpleNamespace(request_id="a", finish_reason="stop", kv_transfer_params=None)
    guess.ended(step, {0: SimpleNamespace(outputs=[result])}, 1.1)
    assert counts_of(result) == DraftCounts(steps=22, drafted=12, accepted=10)
    assert not guess._known, "it is let go of"


def test_nothing_is_told_where_nothing_was_to_be_guessed() -> None:
    for said in (None, {}, {"connector": 1}, "text"):
        assert counts_of(SimpleNamespace(kv_transfer_params=said)) is None
    assert counts_of(SimpleNamespace()) is None


def test_an_engine_that_plans_ahead_waits_while_it_guesses_and_only_then() -> None:
    guess = Guesses(ahead=True, on_cores=False)
    one = marked("a")
    one.num_computed_tokens, one.num_output_placeholders = 23, 1  # its next token is being computed
    assert prepare(guess, one)
    assert guess.waits
    write(one, 1)
    one.num_computed_tokens, one.num_output_placeholders = 23, 0
    assert not prepare(guess, one)
    step = output({"a": one.spec_token_ids})
    guess.scheduled(step)
    assert prepare(guess, one), "its guesses are being checked"
    other = request("b")
    other.num_output_placeholders, other.num_computed_tokens = 1, 23
    guess.ended(step, {}, 1.0)
    assert not prepare(guess, other), "who is not guessed for waits for nothing"


def test_nothing_waits_for_a_guess_of_what_is_being_computed() -> None:
    guess = Guesses(ahead=True, on_cores=False)
    for run, waits in ((RUN[:21], False), (RUN[:30], True)):  # one token of it is left, the one that is being computed
        one = request("a", drafts=[run], draft_tokens=6)
        one.num_computed_tokens, one.num_output_placeholders = 23, 1
        assert prepare(guess, one) == waits


def test_a_plain_step_that_came_after_a_wait_is_no_measure_of_plain_steps() -> None:
    guess = Guesses(ahead=True, on_cores=False)
    plain, one = request("plain"), marked("a")

    def step(now: float, *running: SimpleNamespace) -> None:
        assert not prepare(guess, *running)
        ids = {each.request_id: each.spec_token_ids for each in running if each.spec_token_ids}
        made = output(ids, *(each.request_id for each in running if each.request_id not in ids))
        guess.scheduled(made)
        assert prepare(guess, *running) == bool(ids), "while guesses are checked"
        guess.ended(made, {}, now)

    for at in range(3):
        step(1 + at * 0.010, plain)
    one.num_computed_tokens, one.num_output_placeholders = 23, 1
    assert prepare(guess, one), "its last token is being computed"
    one.num_computed_tokens, one.num_output_placeholders = 22, 0
    step(1.032, one)
    step(1.132, plain)
    step(1.142, plain)
    assert guess._times._plain[1] == (pytest.approx(0.010), 3), "the late one of 100 ms is not among them"
    assert not guess._late


def test_appends_are_no_decodes_whose_time_counts() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    dear = {1: (0.010, 8)}, {3: (1.8, 8, 0)}
    for others, pays in ((0, True), (12, True)):
        one = marked("a")
        appends = [request(f"append{at}", append=True) for at in range(others)]
        for each in appends:
            each.streaming_queue = None
        guess._times._plain, guess._times._ratios = dict(dear[0]), dict(dear[1])
        prepare(guess, one, *appends)
        assert bool(one.spec_token_ids) == pays


def test_of_many_answers_each_has_its_turn_to_have_a_copy_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[DraftMatcher] = []
    find = DraftMatcher._find
    monkeypatch.setattr(DraftMatcher, "_find", lambda matcher: looked.append(matcher) or find(matcher))
    guess = Guesses(ahead=False, on_cores=True)
    many = [request(f"r{at}", 0, drafts=[[7, 7, 7]], draft_tokens=4) for at in range(40)]  # like nothing they write
    for one in many:
        one.num_tokens, one.num_computed_tokens = 4, 3
    for _ in range(20):
        prepare(guess, *many)
    for step in range(5):
        made = output({}, *(one.request_id for one in many))
        for one in many:
            write(one, 1)
        looked.clear()
        guess.ended(made, {}, float(step))
        assert len(looked) == 16
        if step == 0:
            first = set(map(id, looked))
        elif step == 2:
            assert first & set(map(id, looked)), "the first have their turn again"
    assert {state.matcher.written for state in guess._known.values()} == {5}
    few = {one.request_id: one for one in many[:3]}
    guess.prepare(many[:3], few)
    write(many[0], 1)
    looked.clear()
    guess.ended(output({}, "r0"), {}, 9.0)
    assert len(looked) == 1, "of few, all of them, each time"


def test_answers_that_begin_together_are_followed_one_after_the_other() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    many = [marked(f"r{at}") for at in range(5)]
    for followed in (2, 4, 5, 5):
        prepare(guess, *many)
        assert sum(bool(one.spec_token_ids) for one in many) == followed
        for one in many:
            one.output_token_ids = [*one.output_token_ids, RUN[one.num_output_tokens]]
            one.num_output_tokens, one.num_tokens = one.num_output_tokens + 1, one.num_tokens + 1
            one.num_computed_tokens += 1
        guess.ended(output({}, *(one.request_id for one in many)), {}, 1.0)
    assert {state.matcher.written for state in guess._known.values()} == {24}


def test_what_was_aborted_is_forgotten_and_what_was_preempted_is_not() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    one, two = marked("a"), marked("b")
    prepare(guess, one, two)
    guess.prepare([], {"b": two})
    assert set(guess._known) == {"b"}
    guess.prepare([], {})
    assert not guess._known


def test_others_in_the_step_are_held_up_no_more_than_their_pace_allows() -> None:
    guess = Guesses(ahead=False, on_cores=True)
    one, other = marked("a"), request("b", itl_ratio=1.01)
    prepare(guess, one, other)
    assert one.spec_token_ids == []
    other.sampling_params.extra_args["pingpong"]["itl_ratio"] = 2.0
    prepare(guess, one, other)
    assert one.spec_token_ids


def config(*devices: str, **fields: Any) -> WorkerConfig:
    settings = {"speculation_tokens": 8, **fields}
    return WorkerConfig(name="w", devices=list(devices), slab_fd=-1, control="", bell="", supervisor_pid=0, **settings)


@pytest.mark.parametrize(
    ("worker", "version", "words"),
    [
        (config("cpu:0"), (0, 32, 0), ""),
        (config("cpu:0", speculation_tokens=0, decode_first=False), (0, 32, 0), ""),
        (config("cuda:0"), (0, 24, 0), ""),
        (config("cuda:0"), (0, 32, 0), "vLLM 0.32.0"),
        (config("cpu:0", decode_first=False), (0, 32, 0), "decode-first"),
        (config("cuda:0", batch_invariant=True), (0, 24, 0), "batch-invariant"),
        (config("cuda:0", engine_args={"speculative_config": {"method": "ngram"}}), (0, 24, 0), "speculative_config"),
        (config("cuda:0", engine_args={"pipeline_parallel_size": 2}), (0, 24, 0), "stages"),
    ],
)
def test_an_engine_that_cannot_guess_says_why(worker: WorkerConfig, version: tuple[int, ...], words: str) -> None:
    said = refusal(worker, version)
    assert (words in said) if words else said == ""
    assert guesses(worker, version) == (0 if words else worker.speculation_tokens)


def test_engines_on_gpus_that_guess_have_our_worker() -> None:
    made = engine_arguments(config("cuda:0"), "m", (0, 24, 0))
    assert made["worker_cls"] == GUESSING_GPU_WORKER
    assert "speculative_config" not in made
    assert "worker_cls" not in engine_arguments(config("cuda:0", speculation_tokens=0), "m", (0, 24, 0))


def test_seeds_and_grids_are_not_guessed_for() -> None:
    assert guessed_for(Sampling(max_tokens=5), None)
    assert guessed_for(Sampling(max_tokens=5, temperature=1.0), None)
    assert not guessed_for(Sampling(max_tokens=5, temperature=1.0, seed=1), None)
    assert not guessed_for(Sampling(max_tokens=5), 192)


def test_marks_of_guesses_are_of_the_answer_alone() -> None:
    handling = Handling(drafts=[[1, 2]], draft_tokens=8)
    assert "drafts" not in handling.marks(append=True)["pingpong"]
    assert handling.marks(decodes=True)["pingpong"]["drafts"] == [[1, 2]]
    assert handling.marks(decodes=True)["pingpong"]["draft_tokens"] == 8
    assert "drafts" not in Handling().marks(decodes=True)["pingpong"]


def test_runs_of_another_vocabulary_are_left_out() -> None:
    assert known_runs([[1, 2], [], [9, 10], [-1]], 10) == [[1, 2]]


def test_another_model_runner_is_noticed() -> None:
    class Runner:
        def _prepare_inputs(self, scheduler_output: Any, counts: Any) -> Any:
            return scheduler_output.scheduled_spec_decode_tokens

        def _sample(self, logits: Any) -> Any:
            return self.rejection_sampler(logits)  # type: ignore[attr-defined]

        def _bookkeeping_sync(self) -> None: ...

    class Scheduler:
        def schedule(self, request: Any, token_budget: int) -> None:
            while token_budget > 0:
                request.spec_token_ids, request.num_tokens_with_spec  # noqa: B018

        def update_from_output(self) -> None:
            num_rejected = 0  # noqa: F841

    assert list(faults(Runner, Scheduler)) == []
    del Runner._bookkeeping_sync
    assert "another way" in next(faults(Runner, Scheduler))
    assert "num_rejected" in inspect.getsource(Scheduler.update_from_output)

    class Old(Scheduler):
        def schedule(self, request: Any, token_budget: int) -> None:
            """Knows of no guesses."""

    Runner._bookkeeping_sync = lambda self: None  # type: ignore[method-assign]
    assert len(list(faults(Runner, Old))) == 2


@pytest.mark.filterwarnings("ignore")  # what torch and vLLM say at import is not ours to mend
def test_a_runner_v2_is_given_the_ids_where_a_proposer_would_have_put_them() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from pingpong_worker.vllm_draft_runner import check_guesses

    seen: list[Any] = []

    class Runner:
        def __init__(self) -> None:
            self.device = torch.device("cpu")
            self.req_states = SimpleNamespace(
                draft_tokens=torch.zeros(4, 0, dtype=torch.int64), req_id_to_index={"a": 2, "b": 0}
            )
            self.is_last_pp_rank = True
            self.sampler = SimpleNamespace()
            self.rejection_sampler = self.speculator = None
            self.decode_query_len = 1

        def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Any:
            seen.append((self.decode_query_len, self.req_states.draft_tokens.tolist()))
            return batch_desc

        def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            seen.append(self.speculator and self.speculator.draft_logits is None)
            return hidden_states

    runner: Any = Runner()
    check_guesses(runner, 3)
    assert runner.rejection_sampler.num_speculative_steps == 3
    assert runner.prepare_inputs(SimpleNamespace(scheduled_spec_decode_tokens={"a": [7, 8]}), "batch") == "batch"
    assert runner.sample("hidden", SimpleNamespace(num_draft_tokens=2), None) == "hidden"
    runner.prepare_inputs(SimpleNamespace(scheduled_spec_decode_tokens={}), "batch")
    runner.sample("hidden", SimpleNamespace(num_draft_tokens=0), None)
    guessed = [[0, 0, 0], [0, 0, 0], [7, 8, 0], [0, 0, 0]]
    assert seen == [(4, guessed), True, (1, guessed), None]
    assert runner.speculator is None
    check_guesses(untouched := Runner(), 0)
    assert untouched.rejection_sampler is None
