"""A chain under way as a daemon tells it, with its faults; and the screen of somebody who follows it."""

import msgspec

from pingpong_bus.messages import AgentResult, ChainEvent, ChainResult, ResumeEntry

NAMES = ["writer", "critic"]


class Screen:
    """Applies events in order, and is strict about them."""

    def __init__(self):
        self.ids = {name: [] for name in NAMES}
        self.text = dict.fromkeys(NAMES, "")
        self.attempt = dict.fromkeys(NAMES, 1)
        self.finished = set()
        self.resumed = dict.fromkeys(NAMES, 0)
        self.kinds = []
        self.end = None

    def apply(self, events):
        for event in events:
            assert self.end is None, "nothing comes after the end"
            self.kinds.append(event.kind)
            if event.agent and event.kind != "agent_restarted" and event.attempt > self.attempt[event.agent]:
                assert not self.ids[event.agent], "a new attempt says that it voids the old one"
                self.attempt[event.agent] = event.attempt
            if event.kind == "tokens":
                assert event.attempt == self.attempt[event.agent]
                assert event.agent not in self.finished
                assert event.data["first_index"] == len(self.ids[event.agent])
                assert event.data["first_character"] == len(self.text[event.agent])
                self.ids[event.agent] += event.data["ids"]
                self.text[event.agent] += event.data["text"]
                assert event.data["output_tokens"] == len(self.ids[event.agent])
            elif event.kind == "agent_restarted":
                assert event.attempt > self.attempt[event.agent]
                self.attempt[event.agent] = event.attempt
                self.ids[event.agent], self.text[event.agent] = [], ""
                self.finished.discard(event.agent)
            elif event.kind == "agent_finished":
                assert event.agent not in self.finished
                self.finished.add(event.agent)
            elif event.kind == "agent_resumed":
                self.resumed[event.agent] += 1
            elif event.kind == "ended":
                self.end = event.data


class Script:
    """A chain under way: makes events, snapshots, and the tokens of each attempt."""

    def __init__(self):
        self.state = "running"
        self.agents = {name: AgentResult(name=name) for name in NAMES}
        self.seams = {name: [(0, 0)] for name in NAMES}
        """Where events of the attempt end: tokens, characters."""

    def change(self, name, **fields):
        self.agents[name] = msgspec.structs.replace(self.agents[name], **fields)
        return self.agents[name]

    def event(self, kind, name="", **data):
        attempt = self.agents[name].attempt if name else 1
        return ChainEvent(chain="c0", kind=kind, at_ms=1.0, agent=name, attempt=attempt, data=data)

    def open(self, name):
        self.change(name, state="reading", opened_ms=1.0)
        return self.event("opened", name, worker="w0", prompt_tokens=3)

    def write(self, name, tokens, characters, back=0):
        """Tokens come; the event may also hold `back` events that were sent before."""
        agent = self.agents[name]
        at = len(agent.output_ids)
        ids = agent.output_ids + [agent.attempt * 1000 + at + step for step in range(tokens)]
        letters = "abcdefghij" if agent.attempt % 2 else "ABCDEFGHIJ"
        text = agent.text + "".join(letters[(len(agent.text) + step) % 10] for step in range(characters))
        first_index, first_character = self.seams[name][max(len(self.seams[name]) - 1 - back, 0)]
        self.seams[name].append((len(ids), len(text)))
        self.change(name, state="writing", output_ids=ids, text=text, output_tokens=len(ids), first_token_ms=2.0)
        data = {"ids": ids[first_index:], "text": text[first_character:]}
        where = {"first_index": first_index, "first_character": first_character}
        return self.event("tokens", name, output_tokens=len(ids), **data, **where)

    def resume(self, name):
        agent = self.agents[name]
        entry = ResumeEntry(at_ms=3.0, tokens=len(agent.output_ids), worker="w0", why="died")
        self.change(name, resumed=[*agent.resumed, entry], state="waiting")
        times = len(self.agents[name].resumed)
        return self.event("agent_resumed", name, worker="w0", tokens=entry.tokens, why="died", times=times)

    def finish(self, name):
        agent = self.change(name, state="finished", finish_reason="stop", last_token_ms=4.0)
        return self.event("agent_finished", name, output_tokens=agent.output_tokens, finish_reason="stop")

    def restart(self, unsaved):
        """Finished agents are kept, unless the end of one was not on disk yet."""
        for name, agent in self.agents.items():
            if agent.state != "finished" or name in unsaved:
                self.agents[name] = AgentResult(name=name, attempt=agent.attempt + 1)
                self.seams[name] = [(0, 0)]

    def end(self):
        self.state = "finished"
        return self.event("ended", state="finished", error="")

    def snapshot(self):
        return ChainResult(
            id="c0", name="n", state=self.state, placement="ping-pong", agents=[self.agents[name] for name in NAMES]
        )


def check(screen, daemon):
    assert screen.ids == {name: agent.output_ids for name, agent in daemon.agents.items()}
    assert screen.text == {name: agent.text for name, agent in daemon.agents.items()}
    assert all(screen.attempt[name] == agent.attempt for name, agent in daemon.agents.items() if agent.output_ids)
