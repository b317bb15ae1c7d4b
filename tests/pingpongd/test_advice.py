"""What would make a chain faster: the finder of shared text against a naive one, and each advice where it applies."""

from collections import Counter

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pingpong_bus.messages import EngineFigures, Literals, OutputOf, Prediction, PreparedAgent
from pingpongd.advice import advise
from pingpongd.cost_model import CostModel
from pingpongd.shapes import GroupView, chain_shape
from pingpongd.shared_runs import shared_runs

FIGURES = EngineFigures(
    measured_at="2026-05-04T09:30:00Z", prefill=[(512, 30.0), (4096, 200.0), (12288, 640.0)],
    finalize=[(512, 1, 13.0), (4096, 1, 14.0), (4096, 64, 15.0), (12288, 1, 17.0)],
    decode=[(512, 8.5), (12288, 9.0)], batch=[(2, 9.0)],
)  # fmt: skip
NAMES = ["writer", "critic", "editor"]

# ------------------------------------------------------------------------------------------------------------- finder


def naive_longest(first, second):
    """The longest run of both, by comparing everything with everything."""
    longest, before = 0, [0] * (len(second) + 1)
    for token in first:
        row = [0, *(before[at] + 1 if token == other else 0 for at, other in enumerate(second))]
        longest, before = max(longest, *row), row
    return longest


words = st.lists(st.integers(0, 9), max_size=20)
documents = st.lists(st.integers(0, 60), min_size=5, max_size=30)
mixed = st.tuples(words, documents, words, documents).map(
    lambda parts: (parts[0] + parts[1] + parts[2], parts[2] + parts[1] + parts[0] + parts[3])
)


@settings(deadline=None)
@given(mixed)
@example(([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 0]))  # a common prefix is none
@example(([0, 5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]))
@example(([], [1]))
def test_nothing_long_is_left_in_two_texts_beside_what_is_found_and_their_common_beginning(texts):
    at_least = 6
    first, second = texts
    blocks = Counter(tuple(first[at : at + 3]) for at in range(0, len(first) - 2, 3))
    assume(all(count <= 4 for count in blocks.values()))
    left = list(second)
    for at, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            break
        left[at] = -1
    for run in shared_runs(texts, at_least):
        left[run.starts[1] : run.starts[1] + run.tokens] = [-1] * run.tokens
    assert naive_longest(first, left) < at_least


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=5), st.integers(2, 9))
def test_what_is_found_is_there(texts, at_least):
    for run in shared_runs(texts, at_least):
        assert run.tokens >= at_least
        assert len(run.members) == len(run.starts) >= 2
        assert list(run.members) == sorted(set(run.members))
        assert any(run.starts)
        parts = {
            tuple(texts[index][start : start + run.tokens])
            for index, start in zip(run.members, run.starts, strict=True)
        }
        assert len(parts) == 1
        assert len(parts.pop()) == run.tokens


def test_a_document_of_many_prompts_is_found_once_and_whole():
    document = list(range(1000, 9000))
    texts = [[index] * (50 + 7 * index) + document + [90 + index] * 300 for index in range(6)]
    [run] = shared_runs(texts, 256)
    assert (run.members, run.tokens) == (tuple(range(6)), 8000)
    assert run.starts == tuple(50 + 7 * index for index in range(6))


def test_text_that_seems_to_match_everywhere_ends():
    texts = [[index, *([7] * 200 + [8 + index]) * 500] for index in range(3)]
    assert shared_runs(texts, 256) == []


# ------------------------------------------------------------------------------------------------------------- advice


def case(*literals, outputs=(64, 64, 64), joined=(), groups=("a",), held=(), figures=FIGURES, overlap=False, **more):
    """A chain in which each agent reads the one before, after its literal tokens; and predictions for idle groups."""
    agents = [
        PreparedAgent(
            segments=[Literals(ids=list(ids)), *([OutputOf(agent=at - 1)] if at else [])],
            joined=at in joined,
            note="x.",
        )
        for at, ids in enumerate(literals)
    ]
    upstreams = [[at - 1] if at else [] for at in range(len(agents))]
    shape = chain_shape(upstreams, agents, outputs=outputs[: len(agents)], isolated=more.pop("isolated", False))
    kept = frozenset(digest for at in held for digest, _ in shape.rungs[at])
    views = [GroupView(name, 0, kept, overlap=overlap, figures=figures) for name in groups]
    predictions = []
    if figures is not None:
        model = CostModel(views)
        predictions = [model.predict(shape, "serial", (name,) * len(agents)).prediction for name in groups]
    return advise(shape, list(literals), predictions, views, names=NAMES[: len(agents)], **more)


def about(advices, words):
    return [advice for advice in advices if words in advice.text]


def run_of(first, length):
    return list(range(first, first + length))


def test_a_document_after_role_texts_is_told_with_agents_tokens_and_what_it_costs():
    document = run_of(10_000, 4096)
    advices = case([1, 2, 3, *document], run_of(100, 40) + document, run_of(300, 50))
    [advice] = about(advices, "share")
    assert advice.text.startswith("writer and critic share 4,096 tokens, which stand after other text in all of them. ")
    assert 150 < advice.saves_ms < 210  # one cold prefill of 4,096 tokens is 200 ms
    assert advices[0] == advice


def test_a_document_at_the_beginning_of_all_prompts_is_well():
    document = run_of(10_000, 4096)
    assert not about(case([*document, 1], [*document, 2]), "share")
    assert not about(case([1, *document], [2, *document], isolated=True), "share")
    assert not about(case([1, *document[:255]], [2, *document[:255]]), "share")


def test_a_document_that_costs_nothing_now_is_told_with_that():
    document = run_of(10_000, 4096)
    [advice] = about(case([1, *document], [2, *document], held=(0, 1)), "share")
    assert advice.saves_ms is None
    assert "no gain" in advice.text


def test_predictions_for_a_group_that_has_gone_down_give_no_number():
    texts = [[at, *run_of(10_000, 300)] for at in range(2)]
    shape = chain_shape([[], [0]], [PreparedAgent(segments=[Literals(ids=ids)]) for ids in texts], outputs=[1, 1])
    gone = Prediction(placement="serial", groups=("b", "b"), e2e_ms=100.0, prefill_ms=50.0, decode_ms=50.0)
    [advice] = about(advise(shape, texts, [gone], [GroupView("a", 0, figures=FIGURES)]), "share")
    assert advice.saves_ms is None


def test_without_figures_the_document_is_told_without_a_number():
    document = run_of(10_000, 4096)
    [advice] = about(case([1, *document], [2, *document], figures=None), "share")
    assert advice.saves_ms is None


def test_a_joined_prompt_is_told_with_its_note():
    advices = case(run_of(0, 9), run_of(0, 9), joined=(1,), notes=["", "the template trims messages."])
    [advice] = about(advices, "can be read ahead")
    assert advice.text.startswith("Nothing of the prompt of critic can be read ahead: the template trims messages. ")


@pytest.mark.parametrize("figures", [FIGURES, None])
def test_one_group_that_cannot_overlap(figures):
    texts = (run_of(0, 4000), run_of(5000, 4000))
    [advice] = about(case(*texts, figures=figures), "decode_first")
    assert advice.text.startswith("a is the one device group")
    assert not about(case(*texts, figures=figures, overlap=True), "decode_first")
    assert not about(case(*texts, figures=figures, groups=("a", "b")), "decode_first")
    assert not about(case(run_of(0, 4000), outputs=(9,), figures=figures), "decode_first")


def test_where_everything_is_warm_nothing_is_left_to_read_ahead():
    texts = (run_of(0, 4000), run_of(5000, 4000))
    [advice] = about(case(*texts, held=(0, 1)), "beginnings")
    assert "cache of a holds" in advice.text
    assert advice.text.endswith("series there is as fast.")  # and there are no others to leave to chains
    assert not about(case(*texts, held=(0,)), "beginnings")
    assert not about(case(*texts, held=(0, 1), isolated=True), "beginnings")
    assert not about(case(run_of(0, 9), run_of(9, 9), held=(0, 1)), "beginnings")


@pytest.mark.parametrize("figures", [FIGURES, None])
def test_a_chain_that_decodes_for_long(figures):
    texts = (run_of(0, 400), run_of(5000, 400))
    [advice] = about(case(*texts, outputs=(64, 4000), figures=figures), "Decoding is")
    assert "up to 4,000 tokens of critic" in advice.text
    assert not about(case(*texts, outputs=(4, 4), figures=figures), "Decoding is")


def test_other_groupings_are_only_suggested_to_be_measured():
    texts = (run_of(0, 4000), run_of(5000, 4000))
    two = {"a": ["cuda:0"], "b": ["cuda:1"]}
    [advice] = about(case(*texts, groups=("a", "b"), devices=two), "Worth a measurement")
    assert "tensor parallelism" in advice.text
    [reverse] = about(case(*texts, devices={"a": ["cuda:0", "cuda:1"]}), "Worth a measurement")
    assert "two groups" in reverse.text
    assert advice.saves_ms is reverse.saves_ms is None
    assert not about(case(*texts, groups=("a", "b"), devices={"a": ["cpu:0"], "b": ["cpu:1"]}), "Worth a measurement")
    assert not about(case(*texts, groups=("a", "b")), "Worth a measurement")


def test_many_agents_are_named_in_short_and_without_names_numbered():
    document = run_of(10_000, 300)
    agents = [PreparedAgent(segments=[Literals(ids=[at, *document])]) for at in range(9)]
    shape = chain_shape([[]] * 9, agents, outputs=[1] * 9)
    [advice] = about(advise(shape, [[at, *document] for at in range(9)], [], [GroupView("a", 0)]), "share")
    assert advice.text.startswith("agent 1, agent 2, agent 3, agent 4 and 5 more share 300 tokens")


def test_the_least_prediction_decides():
    texts = (run_of(0, 400), run_of(5000, 400))
    agents = [PreparedAgent(segments=[Literals(ids=ids)]) for ids in texts]
    shape = chain_shape([[], [0]], agents, outputs=[100, 100])
    slow = Prediction(placement="serial", groups=("a", "a"), e2e_ms=1000.0, prefill_ms=500.0, decode_ms=500.0)
    fast = Prediction(placement="ping-pong", groups=("a", "b"), e2e_ms=900.0, prefill_ms=50.0, decode_ms=850.0)
    views = [GroupView("a", 0), GroupView("b", 0)]
    assert not about(advise(shape, texts, [slow], views), "Decoding is")
    assert about(advise(shape, texts, [fast, slow], views), "Decoding is 94%")
