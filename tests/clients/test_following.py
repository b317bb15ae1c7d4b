"""Each token is given once: whatever is lost, sent twice or begun anew, the events add up to the result."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chain_script import NAMES, Screen, Script, check
from pingpong_bus.messages import AgentResult, AppendEntry, ChainEvent, ChainResult
from pingpong_client.following import Following

NAME = st.sampled_from(NAMES)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), NAME),
        st.tuples(st.just("write"), NAME, st.integers(0, 4), st.integers(0, 6), st.integers(0, 3)),
        st.tuples(st.just("resume"), NAME),
        st.tuples(st.just("finish"), NAME),
        st.tuples(st.just("lose")),
        st.tuples(st.just("drop one"), NAME, st.integers(1, 4), st.integers(0, 6)),
        st.tuples(st.just("send twice")),
        st.tuples(st.just("attach")),
        st.tuples(st.just("restart"), st.sets(NAME)),
    ),
    max_size=40,
)


@settings(max_examples=400)
@given(STEPS, st.booleans())
def test_events_add_up_to_the_result(steps, from_snapshot):
    daemon, screen = Script(), Screen()
    following = Following.of_result(daemon.snapshot()) if from_snapshot else Following("c0", NAMES)
    connected = True
    last = None

    def deliver(news):
        if connected:
            screen.apply(following.take(news))
            if following.stale:
                screen.apply(following.take(daemon.snapshot()))
                assert not following.stale
                check(screen, daemon)

    for step, *words in steps:
        if step == "lose":
            connected = False
        elif step == "attach":
            connected = True
            deliver(daemon.snapshot())
            check(screen, daemon)
        elif step == "restart":
            connected = False
            last = None
            daemon.restart(*words)
        elif step == "send twice":
            if last is not None:
                deliver(last)
        elif daemon.agents[words[0]].state != "finished":
            if step == "drop one":
                last = daemon.write(*words)
            else:
                last = getattr(daemon, step)(*words)
                deliver(last)
            if last.kind != "tokens":
                last = None
    if not connected:
        connected = True
        deliver(daemon.snapshot())
    for name in NAMES:
        if daemon.agents[name].state != "finished":
            deliver(daemon.write(name, 2, 3))
            deliver(daemon.finish(name))
    deliver(daemon.end())
    check(screen, daemon)
    assert screen.end == {"state": "finished", "error": ""}
    assert screen.finished == set(NAMES)
    assert screen.resumed["writer"] >= len(daemon.agents["writer"].resumed)


def test_events_without_faults_pass_as_they_are():
    daemon, following = Script(), Following("c0", NAMES)
    events = [daemon.event("started", placement="serial", why="")]
    for name in NAMES:
        events += [daemon.open(name), daemon.write(name, 3, 5), daemon.write(name, 1, 0), daemon.finish(name)]
    events.append(daemon.end())
    assert [given for event in events for given in following.take(event)] == events
    assert following.ended


def test_a_snapshot_becomes_the_events_that_are_missing():
    daemon, following = Script(), Following("c0", NAMES)
    daemon.open("writer")
    daemon.write("writer", 3, 5)
    daemon.finish("writer")
    daemon.open("critic")
    daemon.change("critic", appends=[AppendEntry(at_ms=1.5, tokens=3, sent=3)])
    events = following.take(daemon.snapshot())
    assert [(event.kind, event.agent) for event in events] == [
        ("started", ""), ("opened", "writer"), ("writing", "writer"), ("tokens", "writer"),
        ("agent_finished", "writer"), ("opened", "critic"), ("reading", "critic"),
    ]  # fmt: skip
    assert events[3].data["text"] == daemon.agents["writer"].text
    assert following.take(daemon.snapshot()) == []


def test_a_new_attempt_voids_what_was_given_and_only_that():
    daemon, screen, following = Script(), Screen(), Following("c0", NAMES)
    screen.apply(following.take(daemon.write("writer", 3, 5)))
    daemon.restart(set())
    screen.apply(following.take(daemon.snapshot()))
    assert screen.kinds == ["tokens", "started", "agent_restarted"]
    assert screen.attempt == {"writer": 2, "critic": 1}
    screen.apply(following.take(daemon.write("writer", 1, 1)))
    screen.apply(following.take(daemon.write("critic", 1, 1)))
    check(screen, daemon)


@pytest.mark.parametrize("finished", [False, True])
def test_a_daemon_that_knows_less_than_was_given_begins_the_agent_anew(finished):
    # Its store had not kept the attempt; without a restarted agent the new tokens would be taken for the old ones.
    daemon, following = Script(), Following("c0", NAMES)
    following.take(daemon.write("writer", 3, 5))
    if finished:
        following.take(daemon.finish("writer"))
    daemon.change("writer", state="waiting", output_ids=[], text="", output_tokens=0)
    daemon.seams["writer"] = [(0, 0)]
    assert "agent_restarted" in [event.kind for event in following.take(daemon.snapshot())]
    (event,) = following.take(daemon.write("writer", 2, 2))
    assert (event.data["first_index"], event.data["ids"]) == (0, [1000, 1001])


def test_a_resumed_agent_keeps_what_it_gave():
    daemon, screen, following = Script(), Screen(), Following("c0", NAMES)
    for event in (daemon.open("writer"), daemon.write("writer", 3, 5), daemon.resume("writer")):
        screen.apply(following.take(event))
    screen.apply(following.take(daemon.open("writer")))
    screen.apply(following.take(daemon.write("writer", 2, 2)))
    assert screen.kinds == ["opened", "tokens", "agent_resumed", "opened", "tokens"]
    check(screen, daemon)


def test_a_resumption_that_a_snapshot_told_of_is_not_told_again():
    daemon, screen, following = Script(), Screen(), Following("c0", NAMES)
    screen.apply(following.take(daemon.write("writer", 3, 5)))
    late = daemon.resume("writer")
    for news in (daemon.snapshot(), late, daemon.resume("writer")):
        screen.apply(following.take(news))
    assert screen.resumed["writer"] == 2


@pytest.mark.parametrize("kind", ["tokens", "opened", "agent_finished"])
def test_what_a_void_attempt_still_sends_is_dropped(kind):
    daemon, following = Script(), Following("c0", NAMES)
    late = {"tokens": daemon.write("writer", 3, 5), "opened": daemon.open("writer"), "agent_finished": daemon.event(
        "agent_finished", "writer", output_tokens=3
    )}  # fmt: skip
    daemon.restart(set())
    following.take(daemon.snapshot())
    assert following.take(late[kind]) == []
    assert not following.stale


def test_the_end_of_a_chain_with_agents_missing_asks_for_a_snapshot():
    daemon, following = Script(), Following("c0", NAMES)
    assert following.take(daemon.end()) == []
    assert following.stale
    assert [event.kind for event in following.take(daemon.snapshot())] == ["started", "ended"]
    assert following.take(daemon.snapshot()) == []


def test_a_step_is_given_by_its_text() -> None:
    following = Following("c", ["step"])
    data = {"ids": [], "text": "ab", "first_index": 0, "first_character": 0, "output_tokens": 0}
    tokens = ChainEvent(chain="c", kind="tokens", at_ms=1.0, agent="step", data=data)
    end = ChainEvent(
        chain="c",
        kind="agent_finished",
        at_ms=1.0,
        agent="step",
        data={"finish_reason": "stop", "output_tokens": 0, "characters": 2, "total_ms": 1.0},
    )
    assert [event.kind for event in following.take(tokens) + following.take(end)] == ["tokens", "agent_finished"]
    lost = Following("c", ["step"])
    assert lost.take(end) == []
    assert lost.stale
    step = AgentResult(
        name="step", state="finished", kind="call", text="ab", output_tokens=2, finish_reason="stop", last_token_ms=1.0
    )
    found = lost.take(ChainResult(id="c", name="n", state="running", placement="serial", agents=[step]))
    assert [(event.kind, event.data.get("text"), event.data.get("characters")) for event in found[1:]] == [
        ("tokens", "ab", None),
        ("agent_finished", None, 2),
    ]
