"""The live view at 80 columns, what it is built from, and plain output."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pingpong_bus.messages import AgentResult, AppendEntry, ChainEvent, ChainResult
from pingpong_client.live import LiveView, PlainView, agent_block, render, watch
from pingpong_client.progress import AgentProgress, ChainProgress
from pingpong_client.table import clean, clip, clip_left, format_table


def event(kind, at_ms=0.0, agent="", **data):
    return ChainEvent(chain="c0", kind=kind, at_ms=at_ms, agent=agent, data=data)


def progress_of(*names):
    return ChainProgress("c0", "demo", [AgentProgress(name) for name in names])


def drawn(progress, width=80, height=24, elapsed=1.25):
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(render(progress, width, height, elapsed))
    return [line.rstrip() for line in console.export_text().splitlines()]


def run_of_events():
    return [
        event("started", placement="ping-pong", why=""),
        event("opened", 100, "writer", worker="g0", prompt_tokens=1000),
        event("reading", 600, "writer", sent=500),
    ]


def test_one_line_per_agent_with_phase_rate_and_last_words():
    progress = progress_of("writer", "critic", "editor")
    for each in run_of_events():
        progress.apply(each)
    assert drawn(progress) == [
        "demo  ping-pong  1.2 s",
        "writer  reading 500/1,000 tokens      1,000.0 tok/s",
        "critic  waiting",
        "editor  waiting",
    ]
    progress.apply(event("finalized", 1000, "writer", prompt_tokens=1000))
    progress.apply(event("writing", 1100, "writer", cached_tokens=0, ttft_ms=1000))
    words = "the tide comes in and the tide goes out again for ever"
    progress.apply(event("tokens", 2100, "writer", ids=list(range(11)), text=words, output_tokens=11))
    progress.apply(event("opened", 1100, "critic", worker="g1"))
    progress.apply(event("reading", 1200, "critic", sent=32))
    lines = drawn(progress)
    assert lines[1].startswith("writer  writing 11 tokens")
    assert "10.0 tok/s" in lines[1]
    assert lines[1].endswith("goes out again for ever")
    assert lines[2].startswith("critic  reading 32 tokens")
    progress.apply(event("agent_finished", 2200, "writer", finish_reason="stop", output_tokens=11, total_ms=2200))
    assert drawn(progress)[1].startswith("writer  finished 11 tokens")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("state", "left"), [("failed", "failed"), ("cancelled", "cancelled"), ("finished", "finished")]
)
def test_the_end_of_a_chain_ends_its_agents(state, left):
    progress = progress_of("writer", "critic")
    progress.apply(event("agent_finished", 1, "writer", output_tokens=0))
    progress.apply(event("ended", 2, state=state, error="why"))
    assert [agent.phase for agent in progress.agents] == ["finished", left]
    assert (progress.state, progress.error) == (state, "why")


def test_more_agents_than_lines_shows_those_that_work():
    progress = progress_of(*(f"a{at}" for at in range(100)))
    for agent in progress.agents[:50]:
        agent.phase = "finished"
    progress.agents[50].phase = "writing"
    lines = drawn(progress, height=12)
    assert len(lines) <= 12
    assert lines[1] == "50 of 100 agents have finished"
    assert lines[2].startswith("a50")


@given(
    st.lists(st.tuples(st.text(max_size=40), st.text(max_size=300)), min_size=1, max_size=8),
    st.integers(20, 200),
    st.integers(3, 50),
)
def test_no_line_is_wider_than_the_screen_and_none_moves_the_cursor(agents, width, height):
    progress = progress_of(*(name for name, _ in agents))
    for agent, (_, text) in zip(progress.agents, agents, strict=True):
        agent.phase, agent.text, agent.written = "writing", text, len(text)
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(render(progress, width, height, 1.0))
    printed = console.export_text()
    assert not set(printed) & {"\x1b", "\r", "\b", "\x07", "\x0b", "\x0c", "\t"}
    assert all(cell_len(line) <= width for line in printed.split("\n"))
    assert printed.count("\n") <= height


def test_a_snapshot_is_where_the_live_view_starts():
    writer = AgentResult(
        name="writer", state="writing", text="so far", output_tokens=3, prompt_tokens=90, first_token_ms=5.0,
        last_token_ms=10.0, opened_ms=1.0,
    )  # fmt: skip
    appends = [AppendEntry(at_ms=3.0, tokens=32, sent=32)]
    critic = AgentResult(name="critic", state="reading", appends=appends, opened_ms=2.0)
    progress = ChainProgress.of_result(
        ChainResult(id="c0", name="demo", state="running", placement="serial", agents=[writer, critic])
    )
    assert [agent.phase for agent in progress.agents] == ["writing", "reading"]
    assert progress.agents[1].read == 32
    progress.apply(event("tokens", 12, "writer", ids=[4], text=" and on", output_tokens=4))
    assert progress.agents[0].text == "so far and on"
    assert progress.agents[0].has_all_text


def writing(progress, text, count):
    progress.apply(event("opened", 1, "writer", worker="g0", prompt_tokens=9))
    progress.apply(event("writing", 2, "writer", cached_tokens=0, ttft_ms=1))
    data = {"ids": list(range(count)), "text": text, "first_index": 0, "output_tokens": count}
    progress.apply(event("tokens", 3, "writer", **data))


def test_a_resumed_agent_keeps_its_text_and_a_restarted_one_begins_again():
    progress = progress_of("writer")
    writer = progress.agents[0]
    writing(progress, "so far", 3)
    progress.apply(event("agent_resumed", 4, "writer", worker="g0", tokens=3, why="it died"))
    assert drawn(progress)[1].startswith("writer  resuming at 3 tokens")
    assert drawn(progress)[1].endswith("so far")
    progress.apply(event("opened", 5, "writer", worker="g1", prompt_tokens=9))
    progress.apply(event("writing", 1002, "writer", cached_tokens=0, ttft_ms=1))
    progress.apply(event("tokens", 1002, "writer", ids=[3], text=" and on", first_index=3, output_tokens=4))
    assert (writer.text, writer.worker, writer.resumed, writer.rate) == ("so far and on", "g1", 1, 3.0)
    assert writer.has_all_text
    progress.apply(
        ChainEvent(chain="c0", kind="agent_restarted", at_ms=9, agent="writer", attempt=2, data={"why": "restart"})
    )
    assert (writer.text, writer.written, writer.received, writer.attempt) == ("", 0, 0, 2)
    assert drawn(progress)[1] == "writer  waiting, attempt 2"


def test_the_headline_says_that_the_daemon_is_away():
    console = Console(file=io.StringIO(), width=80, height=5, record=True)
    console.print(render(progress_of("a", "b", "c", "d"), 80, 5, 1.0, away_s=12.4))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[1] == "the daemon is away, waiting for it to come back (12 s)"
    assert len(lines) <= 5


async def test_plain_output_writes_again_what_was_void():
    progress = progress_of("writer")
    out = io.StringIO()
    view = PlainView(progress, out)
    again = {"chain": "c0", "at_ms": 9, "agent": "writer", "attempt": 2}
    news = [
        event("tokens", 1, "writer", ids=[1], text="old", output_tokens=1),
        event("agent_finished", 2, "writer", output_tokens=1),
        ChainEvent(kind="agent_restarted", data={"why": "restart"}, **again),
        ChainEvent(kind="tokens", data={"ids": [7], "text": "new", "output_tokens": 1}, **again),
        ChainEvent(kind="agent_finished", data={"output_tokens": 1}, **again),
    ]
    await watch(stream(news), progress, view)
    assert out.getvalue() == "== writer ==\nold\n\n== writer, attempt 2 ==\nnew\n\n"
    assert view.shown == {"writer"}


def test_events_of_a_newer_daemon_change_nothing():
    progress = progress_of("writer")
    progress.apply(event("tokens", 1, "nobody", ids=[1], text="x", output_tokens=1))
    assert progress.agents[0] == AgentProgress("writer")


async def stream(events):
    for each in events:
        yield each


async def test_the_live_view_draws_and_takes_itself_away(until):
    progress = progress_of("writer")
    file = io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None, legacy_windows=False)
    async with LiveView(progress, console):
        await until(lambda: "waiting" in file.getvalue())
        for each in run_of_events():
            progress.apply(each)
        await until(lambda: "reading 500/1,000 tokens" in file.getvalue())
    written = file.getvalue()
    assert written.rstrip("\r").endswith("\x1b[2K")  # its lines are erased
    assert "\x1b[?25h" in written  # the cursor is back


async def test_plain_output_is_written_agent_by_agent_without_escape_codes():
    progress = progress_of("writer", "critic")
    out = io.StringIO()
    seen = []

    async def events():
        yield event("tokens", 1, "writer", ids=[1, 2], text="\x1b[31mred\x07 words", output_tokens=2)
        seen.append(out.getvalue())
        yield event("agent_finished", 2, "writer", output_tokens=2)
        seen.append(out.getvalue())
        yield event("ended", 3, state="finished", error="")

    await watch(events(), progress, PlainView(progress, out))
    assert seen == ["", "== writer ==\n[31mred words\n\n"]
    assert "\x1b" not in out.getvalue()


async def test_plain_output_leaves_out_an_agent_whose_events_were_lost():
    progress = progress_of("writer")
    out = io.StringIO()
    view = PlainView(progress, out)
    lost = [
        event("tokens", 1, "writer", ids=[1], text="begin", output_tokens=1),
        event("tokens", 3, "writer", ids=[3], text="end", output_tokens=3),
        event("agent_finished", 4, "writer", output_tokens=3),
    ]
    await watch(stream(lost), progress, view)
    assert out.getvalue() == ""
    assert view.shown == set()


def test_an_empty_text_has_its_headline():
    assert agent_block("writer", "") == "== writer ==\n\n"


@given(st.text(max_size=50), st.integers(1, 40))
def test_clipping_never_passes_the_width(text, cells):
    words = clean(text, lines=False)
    assert cell_len(clip(words, cells)) <= cells
    assert cell_len(clip_left(words, cells)) <= cells
    if cell_len(words) <= cells:
        assert clip(words, cells) == clip_left(words, cells) == words


@given(st.lists(st.lists(st.text(max_size=30), min_size=3, max_size=3), max_size=5), st.integers(24, 100))
def test_tables_fit_their_width(rows, width):
    lines = format_table(["one", "two", "three"], rows, width=width)
    assert len(lines) == len(rows) + 1
    assert all(cell_len(line) <= width for line in lines)
