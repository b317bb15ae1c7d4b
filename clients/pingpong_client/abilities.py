"""What engines can do beyond the plain, and why not where they were asked to: lines of a status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pingpong_bus.messages import EngineLimits, WorkerStatus


def ability_lines(workers: Sequence[WorkerStatus]) -> Iterable[str]:
    """A line for each ability that some engine has, with the workers where not all have it."""
    known = [(worker.name, worker.limits) for worker in workers if worker.limits is not None]
    yield from _shared("guesses tokens", [(name, limits.speculation) for name, limits in known])
    for name, limits in known:
        if limits.speculation_refusal:
            yield f"no guesses on {name}: {limits.speculation_refusal}"
    yield from _shared("keeps prefixes", [(name, _kept(limits)) for name, limits in known])
    yield from _shared("patches to vLLM", [(name, ", ".join(limits.abilities)) for name, limits in known])


def _kept(limits: EngineLimits) -> str:
    parts = [f"{limits.keep_tokens:,} tokens in the cache"] if limits.keep_tokens else []
    parts += [f"{limits.host_cache_bytes / 2**30:,.1f} GiB in host memory"] if limits.host_cache_bytes else []
    return ", ".join(parts)


def _shared(title: str, found: Sequence[tuple[str, str]]) -> Iterable[str]:
    """One line for workers of which the same is true; nothing of those that have none."""
    by_text: dict[str, list[str]] = {}
    for name, text in found:
        by_text.setdefault(text, []).append(name)
    for text, names in by_text.items():
        if text:
            where = "" if len(by_text) == 1 else f" on {', '.join(names)}"
            yield f"{title}{where}: {text}"
