"""What would make a chain faster, by what is known of it: `submit --explain` shows it. Pure.

Times come from the cost model alone: where it cannot tell, an advice has no number. What another grouping of the
devices would take was not measured, so that is only suggested to be tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pingpong_bus.messages import Advice, Prediction
from pingpongd.cost_model import CostModel
from pingpongd.shapes import ChainShape, GroupView
from pingpongd.shared_runs import SharedRun, shared_runs

LONG_TOKENS = 256
"""From here on text that prompts share is worth moving, and cold prefill worth hiding."""
DECODE_BOUND = 0.9
"""From this part of the predicted time on, decoding is what a chain takes."""
WORTH_HIDING = 0.05
"""From this part of the predicted time on, prefill that nothing hides is worth another configuration."""
LONG_STEPS_MS = 100.0
"""Steps between agents that take less are not worth a word."""
WORTH_MS = 1.0
"""An advice that should save less has no number."""

_GPUS = ("cuda:", "GPU-", "MIG-")
"""How the names of GPUs begin in a configuration."""
_MOST_NAMES = 4
_MOST_DOCUMENTS = 3


class _Case(msgspec.Struct, frozen=True):
    """A chain, and what it may run on."""

    shape: ChainShape
    texts: Sequence[Sequence[int]]
    predictions: Sequence[Prediction]
    groups: Sequence[GroupView]
    names: Sequence[str]
    notes: Sequence[str]
    devices: Mapping[str, Sequence[str]]

    @property
    def best(self) -> Prediction | None:
        """What should take least."""
        return min(self.predictions, key=lambda prediction: prediction.e2e_ms, default=None)

    @property
    def readers(self) -> list[int]:
        """Agents that read another; no steps."""
        return [index for index, reads in enumerate(self.shape.upstreams) if reads and not self.shape.is_step(index)]

    def cold_tokens(self, group: GroupView) -> int:
        """Tokens of the prefixes that a group's prefix cache does not hold, of readers that its model runs: what can be
        read ahead."""
        cold = 0
        for index in self.readers:
            if self.shape.model(index) != group.model:
                continue
            prefix = self.shape.prefixes[index]
            rungs = (*(self.shape.rungs[index] if self.shape.rungs else ()), prefix)
            held = max((length for digest, length in rungs if digest in group.held), default=0)
            cold += prefix[1] if self.shape.isolated else prefix[1] - held
        return cold

    def listed(self, indices: Sequence[int]) -> str:
        """Names of agents, as a sentence has them."""
        return _listed([self.names[index] if self.names else f"agent {index + 1}" for index in indices])


def advise(
    shape: ChainShape,
    texts: Sequence[Sequence[int]],
    predictions: Sequence[Prediction],
    groups: Sequence[GroupView],
    *,
    names: Sequence[str] = (),
    notes: Sequence[str] = (),
    devices: Mapping[str, Sequence[str]] | None = None,
) -> list[Advice]:
    """What to change in a chain or in the configuration; what saves most comes first.

    It looks at every token of the texts: some 30 ms for 100,000, 0.2 s at most.

    Args:
        shape: the chain.
        texts: per agent, the literal token ids of its prompt in order, the outputs of others left out.
        predictions: what its placements should take; empty where the engines were not measured.
        groups: that take hops now.
        names: per agent, its name; empty: they are numbered from 1.
        notes: per agent, why its prompt is joined; empty where that is not known.
        devices: per group, its devices as the configuration names them; without them no grouping is suggested.
    """
    case = _Case(shape, texts, predictions, groups, names, notes, devices or {})
    found = [
        *_shared_documents(case),
        *_joined_prompts(case),
        *_no_overlap(case),
        *_all_warm(case),
        *_decode_bound(case),
        *_step_bound(case),
        *_other_groupings(case),
    ]
    return sorted(found, key=lambda advice: -(advice.saves_ms or 0.0))


def _shared_documents(case: _Case) -> Iterator[Advice]:
    """Text that prefix caches cannot keep for all, because each agent has other text before it."""
    if case.shape.isolated:
        return
    told: list[SharedRun] = []
    for run in shared_runs(case.texts, LONG_TOKENS):
        if len({case.shape.model(index) for index in run.members}) == len(run.members):
            continue  # each of another model, and so in another cache
        if len(told) < _MOST_DOCUMENTS and not any(_overlapping(run, other) for other in told):
            told.append(run)
            behind = [index for index, start in zip(run.members, run.starts, strict=True) if start]
            where = "all of them" if len(behind) == len(run.members) else case.listed(behind)
            saved = _saved_by_sharing(case, run)
            text = (
                f"{case.listed(run.members)} share {run.tokens:,} tokens, which stand after other text in {where}. Put "
                "them first, before the role text: then a group computes them once and its prefix cache keeps them, "
                f"instead of computing them {len(run.members)} times."
            )
            if saved is not None and saved < WORTH_MS:
                text += (
                    " For this chain alone, now, that is no gain, for what it costs is hidden or cached already: it is "
                    "one for chains beside it and after it."
                )
            yield Advice(text=text, saves_ms=saved if saved is not None and saved >= WORTH_MS else None)


def _saved_by_sharing(case: _Case, run: SharedRun) -> float | None:
    """What the best placement would take less on idle groups if a run came first: cold, once for all its members.

    None where nothing was measured.
    """
    shape = case.shape
    there = {group.name for group in case.groups}
    leasts: dict[str, Prediction] = {}
    for each in sorted(case.predictions, key=lambda prediction: prediction.e2e_ms):
        if there.issuperset({*each.groups} - {""}):  # a group may have gone down since
            leasts.setdefault(each.placement, each)
    if not shape.shared or not leasts:
        return None
    shared = tuple(
        tuple(max(run.tokens, same) if {index, at} <= {*run.members} else same for at, same in enumerate(earlier))
        for index, earlier in enumerate(shape.shared)
    )
    # The prompts begin differently then: nothing of them is held.
    rungs = tuple(() if index in run.members else found for index, found in enumerate(shape.rungs))
    moved = msgspec.structs.replace(shape, shared=shared, rungs=rungs)
    model = CostModel(case.groups)

    def least(of: ChainShape) -> float:
        return min(
            model.predict(of, each.placement, each.groups).prediction.e2e_ms * each.factor for each in leasts.values()
        )

    return round(least(shape) - least(moved), 1)


def _joined_prompts(case: _Case) -> Iterator[Advice]:
    """Prompts that can only be tokenized when all that they read is there."""
    whys: dict[str, list[int]] = {}
    for index, joined in enumerate(case.shape.joined):
        if joined:
            why = case.notes[index].rstrip(".") if case.notes else ""
            whys.setdefault(why or "its prompt is tokenized as one text", []).append(index)
    for why, indices in whys.items():
        whose = "the prompt" if len(indices) == 1 else "the prompts"
        yield Advice(
            text=f"Nothing of {whose} of {case.listed(indices)} can be read ahead: {why}. A raw_prompt goes through no "
            "template."
        )


def _no_overlap(case: _Case) -> Iterator[Advice]:
    """One group whose engine takes no appends beside decodes: then everything is in series."""
    if len(case.groups) != 1 or case.groups[0].overlap or not case.readers or not _worth_hiding(case):
        return
    yield Advice(
        text=f"{case.groups[0].name} is the one device group, and its engine does not hold appends to a budget beside "
        "decodes, so agents cannot overlap on it and nothing is read ahead. Leave `[decode_first]` enabled, or set "
        "`long_prefill_token_threshold` in `[vllm]`, or configure a second group."
    )


def _all_warm(case: _Case) -> Iterator[Advice]:
    if len(case.shape.wanted) > 1:  # no group could run it in series alone
        return
    if case.shape.isolated or sum(case.shape.prefixes[index][1] for index in case.readers) < LONG_TOKENS:
        return
    warm = [group.name for group in case.groups if case.cold_tokens(group) < LONG_TOKENS]
    if warm:
        caches = f"cache of {warm[0]} holds" if len(warm) == 1 else f"caches of {_listed(warm)} hold"
        others = ", and leaves other groups to other chains" if len(case.groups) > 1 else ""
        yield Advice(
            text=f"The prefix {caches} the beginnings of all prompts already, so there is next to nothing to read "
            f"ahead: series there is as fast{others}."
        )


def _decode_bound(case: _Case) -> Iterator[Advice]:
    """Chains of which prefill is a small part whatever is done about it."""
    best = case.best
    outputs = [0 if case.shape.is_step(at) else tokens for at, tokens in enumerate(case.shape.outputs)]
    if best is None:
        bound = sum(outputs) >= sum(map(len, case.texts))  # a token decoded takes far longer than one that is read
        share = "nearly all of the time"
    else:
        bound = best.decode_ms >= DECODE_BOUND * best.e2e_ms
        share = f"{best.decode_ms / best.e2e_ms:.0%} of the predicted time" if best.e2e_ms else ""
    if not bound or not any(outputs):
        return
    longest = max(range(len(outputs)), key=outputs.__getitem__)
    whose = ""
    if len(outputs) > 1 and 2 * outputs[longest] >= sum(outputs):
        whose = f", most of it for up to {outputs[longest]:,} tokens of {case.listed([longest])}"
    guesses = (
        "" if case.shape.paces else ", and `speculate` where agents repeat what they read or wrote in earlier runs"
    )
    yield Advice(
        text=f"Decoding is {share}{whose}: reading ahead and prefix caches cannot help with that. A smaller max_tokens "
        f"or a stop does, and so do engines that decode faster (quantization, tensor parallelism){guesses}."
    )


def _step_bound(case: _Case) -> Iterator[Advice]:
    """Steps between agents that take long: by earlier runs of the chain, for nothing is known of them before."""
    best, steps = case.best, case.shape.steps
    if best is None or not steps or best.steps_ms < WORTH_HIDING * best.e2e_ms or best.steps_ms < LONG_STEPS_MS:
        return
    longest = max(range(len(steps)), key=lambda at: steps[at] or 0.0)
    yield Advice(
        text=f"Steps between agents are {best.steps_ms / best.e2e_ms:.0%} of the predicted time, and "
        f"{case.listed([longest])} takes the longest, {steps[longest] or 0.0:,.0f} ms. The prompts of those that read "
        "them are read ahead meanwhile, and nothing else can be done while they run."
    )


def _other_groupings(case: _Case) -> Iterator[Advice]:
    """Groups of other GPUs, where what a chain takes is what such groups are better at."""
    gpus = {
        group.name: [device for device in case.devices.get(group.name, ()) if device.startswith(_GPUS)]
        for group in case.groups
    }
    best = case.best
    if best is None or not best.e2e_ms or len(case.shape.wanted) > 1:
        return
    single = [name for name, devices in gpus.items() if len(devices) == 1]
    if len(single) >= 2 and best.decode_ms >= 0.5 * best.e2e_ms:
        yield Advice(
            text=f"Worth a measurement: {_listed(single[:2])} have a GPU each. One group of both "
            "(`devices` with two entries: tensor parallelism) may decode one chain faster where they are well "
            "connected, but runs fewer chains side by side. It was not measured here."
        )
    pair = next((name for name, devices in gpus.items() if len(devices) >= 2), None)
    if pair is not None and len(gpus) == 1 and case.readers and _worth_hiding(case):
        yield Advice(
            text=f"Worth a measurement: {pair} has {len(gpus[pair])} GPUs. As two groups they could read ahead on one "
            "while the other decodes (ping-pong), though each decodes more slowly. It was not measured here."
        )


def _worth_hiding(case: _Case) -> bool:
    """Whether prefill costs enough, in predicted time or else in cold tokens, to be read ahead some other way."""
    if case.best is not None:
        return case.best.prefill_ms >= WORTH_HIDING * case.best.e2e_ms
    return any(case.cold_tokens(group) >= LONG_TOKENS for group in case.groups)


def _overlapping(one: SharedRun, other: SharedRun) -> bool:
    """Whether two runs share tokens of a text."""
    places = dict(zip(other.members, other.starts, strict=True))
    return any(
        index in places and start < places[index] + other.tokens and places[index] < start + one.tokens
        for index, start in zip(one.members, one.starts, strict=True)
    )


def _listed(names: Sequence[str]) -> str:
    """A, B and C; of many the first."""
    if len(names) == 1:
        return names[0]
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
